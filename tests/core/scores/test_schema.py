"""The schema declares every column once: the docs list the same, and a run with other columns is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.core.disk.manifests import sealed
from scoremode.core.scores.schema import BUILT_IN, DIVERGENCE, FACTS, Column
from scoremode.core.store.runs import MANIFEST
from scoremode.errors import RunError

DOCS = Path(__file__).resolve().parents[3] / "docs"


def as_table(columns: Sequence[Column]) -> str:
    """Columns as a table, as docs/scores.md and docs/runs.md have it."""
    lines = [f"| `{column.name}` | {column.meaning} |" for column in columns]
    return "\n".join(["| column | meaning |", "|---|---|", *lines])


def test_the_tables_of_the_docs_are_those_of_the_schema() -> None:
    assert as_table(BUILT_IN.scores) in (DOCS / "scores.md").read_text()
    assert as_table((*FACTS, *DIVERGENCE)) in (DOCS / "runs.md").read_text()


def test_a_run_with_columns_that_its_engine_declared_is_refused(tmp_path: Path) -> None:
    """Engines once could. Nothing of such a run is dropped silently."""
    sm.ppl("table:uniform", text="a few words", out=tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(sealed({**manifest, "columns": [{"name": "margin"}]})))
    with pytest.raises(RunError, match="columns that this scoremode does not read"):
        sm.load(tmp_path)
