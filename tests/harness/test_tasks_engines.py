"""Tasks on other engines: the same questions to a GGUF in llama.cpp and to its original, and to a table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval")

import scoremode as sm
from tests.gguf_files import gguf_of, require_llamacpp
from tests.harness.task_rows import write_rows


def test_a_gguf_recovers_its_original(tiny: Path, tmp_path: Path) -> None:
    require_llamacpp()
    rows = write_rows(tmp_path / "rows")
    file = gguf_of(tiny, tmp_path / "tiny.gguf")
    found = sm.tasks(str(tiny), str(file), tasks="arc_easy,winogrande,lambada_openai", task_data=rows)[0]
    assert found.candidate["engine"] == "llamacpp"
    assert found.baseline["engine"] == "transformers"
    assert found.overall["lost_documents"] + found.overall["gained_documents"] <= 1  # half-precision keys may tie
    assert found.row("arc_easy")["kl_choices"] < 1e-3
    assert abs(found.row("winogrande")["margin_shift"]) < 0.05


def test_a_uniform_table_is_known_in_closed_form(tmp_path: Path) -> None:
    """Each byte costs ln 256, so the shortest choice wins, and nothing differs between a table and itself."""
    rows = write_rows(tmp_path / "rows")
    found = sm.tasks("table:uniform", "table:uniform", tasks="arc_easy", task_data=rows, metric="acc")[0]
    (task,) = found.tasks
    for document, answers in zip(task.documents, task.baseline, strict=True):
        for (_, continuation), (log_prob, _) in zip(document.pairs, answers, strict=True):
            assert log_prob == pytest.approx(-math.log(256) * len(continuation.encode()))
    shortest = [len(min(d.choices, key=len)) == len(d.choices[d.gold[0]]) for d in task.documents if d.gold]
    assert found.overall["acc_baseline"] <= sum(shortest) / len(shortest)
    assert found.overall["recovery"] == 1
    assert found.overall["kl_choices"] == 0
    assert found.overall["mcnemar"] == 1
