"""The columns of a divergence arrive everywhere: from tables, after an interruption, in Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import scoremode as sm
from scoremode.core.engine.base import Wanted
from scoremode.core.scores.schema import DIVERGENCE
from scoremode.core.store.runs import SCORES
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import EngineError
from scoremode.head.divergence import define_divergence
from tests.partial_engine import LOGITS

NAMES = tuple(column.name for column in DIVERGENCE)
QUESTION: dict[str, Any] = {"text": "The quick brown fox. " * 6, "context_length": 32, "stride": 16}
OTHER = LOGITS + np.sin(np.arange(LOGITS.size)).reshape(LOGITS.shape)


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tables in place of the usual ones."""
    monkeypatch.setattr(TableEngine, "named", staticmethod(lambda name: Table(LOGITS if name == "uniform" else OTHER)))
    Table.most = None


class Table(TableEngine):
    most: int | None = None  # divergences before it fails

    def score(self, source: Any, done: Any, want: Wanted | None = None) -> Any:
        for number, found in enumerate(super().score(source, done, want or Wanted())):
            if number == self.most and want and want.against:
                raise EngineError("it dies", fix="again")
            yield found


def compared(out: Path, name: str = "runs") -> sm.Comparison:
    if not (out / "ref").exists():
        sm.reference("table:uniform", out=out / "ref", **QUESTION)
    return sm.compare(str(out / "ref"), "table:successor", out=out / name)[0]


def test_a_table_against_a_table_in_parquet(tmp_path: Path) -> None:
    found = compared(tmp_path)
    assert found.divergences.measured == NAMES
    ids = found.candidate.facts.id
    stored = pq.read_table(Path(str(found.path)) / SCORES)
    assert stored.column_names[-len(NAMES) :] == list(NAMES)
    assert sm.load(Path(str(found.path))).divergences.measured == NAMES
    before = np.frombuffer(QUESTION["text"].encode(), np.uint8).astype(np.int64)[found.candidate.facts.token - 1]
    assert len(before) == len(ids)
    lines = [torch.from_numpy(table if len(table) > 1 else table.repeat(256, 0))[before] for table in (LOGITS, OTHER)]
    true = define_divergence(lines[0], lines[1], torch.zeros(len(ids), 1, dtype=torch.int64))
    for name in NAMES:  # a reference holds the baseline's head in float32
        np.testing.assert_allclose(getattr(found.divergences, name), getattr(true, name), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(getattr(found.divergences, name), stored[name].to_numpy())
    statistics = found.statistics()
    assert statistics["overlap"] == pytest.approx(1 - measured_mean(found, "total_variation"), rel=1e-12)


def measured_mean(found: sm.Comparison, name: str) -> float:
    return float(getattr(found.divergences, name).mean())


def test_a_model_against_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # these logits would be rounded to float32 on the baseline's side
    (found,) = sm.compare("table:uniform", "table:uniform", **QUESTION)
    assert [np.unique(getattr(found.divergences, name)).tolist() for name in NAMES] == [[0], [0], [0], [5]]


def test_an_interrupted_comparison_resumes_with_all_of_them(tmp_path: Path) -> None:
    Table.most = 3
    with pytest.raises(EngineError, match="it dies"):
        compared(tmp_path)
    Table.most = None
    resumed, whole = compared(tmp_path), compared(tmp_path, "again")
    for name in NAMES:
        np.testing.assert_array_equal(getattr(resumed.divergences, name), getattr(whole.divergences, name))
