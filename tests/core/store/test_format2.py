"""Runs from before columns became optional: they open, and are still written the same way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import scoremode as sm
from scoremode.core.scores.answers import measured
from scoremode.core.scores.schema import BUILT_IN
from scoremode.core.store.runs import MANIFEST, SCORES
from scoremode.core.verbs.baselines import of_runs
from scoremode.core.verbs.planned import PlannedQuestion
from scoremode.engines.table.engine import TableEngine
from tests.makers import ask
from tests.partial_engine import LOGITS

KEPT = Path(__file__).resolve().parents[2] / "data" / "format2"
TEXT = "Ten short lines.\nOne table of bytes.\nEvery column is here.\n"
QUESTION: dict[str, Any] = {"text": TEXT, "method": "sliding-once", "context_length": 16, "stride": 8}
SECONDS, WINDOWS = 0.25, 3  # of each record, and how many there are


def asked() -> PlannedQuestion:
    return ask("table:uniform", **QUESTION)


@pytest.mark.parametrize("name", ["run", "reference", "candidate"])
def test_a_run_opens_with_every_column(name: str) -> None:
    run = sm.load(KEPT / name)
    assert [name for name in BUILT_IN.names if run.scores.has(name)] == list(BUILT_IN.names)
    assert measured(run.facts.top_text)[0] == chr(measured(run.scores.top)[0])


def test_a_run_has_the_numbers_that_it_had() -> None:
    run = sm.load(KEPT / "run")
    assert run.perplexity.value == 564.2402810214879
    assert run.mean_rank.value == 130.20689655172413
    assert run.summary()["mean_entropy"] == 4.886002035044504


def test_a_reference_is_still_a_baseline() -> None:
    (found,) = of_runs(str(KEPT / "reference"), [str(KEPT / "candidate")])
    assert found.statistics()["kl_max"] == 0.0
    assert found.statistics()["same_top"] == 1.0


def test_columns_are_written_as_before(tmp_path: Path) -> None:
    """The same schema and values; the two columns of texts have one dictionary now."""
    sm.ppl("table:uniform", engine=TableEngine(LOGITS), out=tmp_path / "run", **QUESTION)
    ours, kept = tmp_path / "run" / SCORES, KEPT / "run" / SCORES
    assert pq.read_table(ours).to_pylist() == pq.read_table(kept).to_pylist()
    assert pq.read_schema(ours).equals(pq.read_schema(kept), check_metadata=True)
    text, top_text = (pq.read_table(ours).column(name).chunk(0).dictionary for name in ("text", "top_text"))
    assert text.equals(top_text)


def test_a_manifest_of_all_columns_has_the_same_fields_and_metrics(tmp_path: Path) -> None:
    sm.ppl("table:uniform", engine=TableEngine(LOGITS), out=tmp_path / "run", **QUESTION)
    ours, kept = (json.loads((folder / MANIFEST).read_text()) for folder in (tmp_path / "run", KEPT / "run"))
    assert list(ours) == list(kept)
    assert list(ours["metrics"]) == list(kept["metrics"])
    for name, metric in kept["metrics"].items():  # sums are exact now: the last digits moved
        known = {field: value for field, value in metric.items() if value is not None}
        assert {field: ours["metrics"][name][field] for field in known} == pytest.approx(known, rel=1e-13), name
        assert [field for field, value in ours["metrics"][name].items() if value is not None] == list(known)


def test_a_run_that_is_read_is_written_again_the_same(tmp_path: Path) -> None:
    """Reading loses nothing: the table of a stored run is the table of the file."""
    run = sm.load(KEPT / "candidate")
    table, kept = run.to_arrow(), pq.read_table(KEPT / "candidate" / SCORES)
    assert table.schema.equals(kept.schema)
    assert table.to_pylist() == kept.to_pylist()
    assert replace(run.scores).top_logprob is not None
