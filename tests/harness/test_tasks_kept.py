"""Answers are kept per document: found again, resumed after kill -9 to the same numbers, never mixed up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import forked

pytest.importorskip("lm_eval", reason="needs lm-eval")

import scoremode as sm
from scoremode.cache.task_answers import AnswerFile, digest_of, opened_answers
from scoremode.disk.folders import ANSWERS
from scoremode.errors import InputError, RunError
from scoremode.verbs.scoring import likelihoods
from tests.harness.task_rows import rounded_copy, write_rows
from tests.makers import make_tiny_model

IDENTITY = {"model": "m", "engine": "e"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    model = make_tiny_model(folder / "tiny", adds_bos=False)
    return str(model), str(rounded_copy(model, folder))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many continuations engines were asked, in the order of the calls."""
    counts: list[int] = []

    def counting(engine: Any, asked: Any, groups: Any, done: Any, progress: Any) -> Any:
        counts.append(int((~done).sum()))
        return likelihoods(engine, asked, groups, done, progress)

    monkeypatch.setattr("scoremode.harness.answering.likelihoods", counting)
    return counts


def numbers(found: sm.TasksComparison) -> str:
    return json.dumps(found.rows)


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_answers_come_back_as_they_were(tmp_path: Path) -> None:
    with opened_answers(tmp_path, IDENTITY) as kept:
        kept.add("a", [(-1.25, True), (-np.inf, None)])
        kept.set_engine({"engine": "e", "dtype": "float32"})
        kept.add("a", [(-2.5, False), (-3.0, None)])
    with opened_answers(tmp_path, IDENTITY) as kept:
        assert kept.get("a", 2) == [(-2.5, False), (-3.0, None)]
        assert kept.get("b", 2) is None
        assert kept.engine == {"engine": "e", "dtype": "float32"}
    assert [path.name for path in tmp_path.iterdir()] == [ANSWERS]


def test_a_digest_tells_documents_apart() -> None:
    ids = np.arange(5, dtype=np.int32)
    found = [digest_of([(ids, 2)]), digest_of([(ids, 3)]), digest_of([(ids, 2), (ids, 2)]), digest_of([(ids[:4], 2)])]
    assert len(set(found)) == 4
    assert digest_of([(ids.copy(), 2)]) == found[0]


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_torn_record_is_dropped_and_the_rest_is_kept(cut: int, tmp_path: Path) -> None:
    with opened_answers(tmp_path, IDENTITY) as kept:
        kept.add("a", [(-1.0, True)])
        kept.add("b", [(-2.0, True)])
    path = tmp_path / ANSWERS
    path.write_bytes(path.read_bytes()[:-cut])
    with opened_answers(tmp_path, IDENTITY) as kept:
        assert kept.get("a", 1) == [(-1.0, True)]
        assert kept.get("b", 1) is None


@pytest.mark.parametrize("answers", [[[0.5, True]], [["-1", True]], [[-1.0, 1]], [[-1.0]], "-1"])
def test_impossible_numbers_are_refused(answers: Any, tmp_path: Path) -> None:
    """A checksum vouches for what was written, not that it can be."""
    kept = AnswerFile(tmp_path, IDENTITY)
    kept._append({"document": "a", "answers": answers})
    kept.close()
    with pytest.raises(RunError, match="damaged in record 0"):
        AnswerFile(tmp_path, IDENTITY)


def test_a_folder_of_another_model_and_of_somebody_else_is_refused(tmp_path: Path) -> None:
    with opened_answers(tmp_path / "one", IDENTITY) as kept:
        kept.add("a", [(-1.0, True)])
    before = (tmp_path / "one" / ANSWERS).read_bytes()
    with (
        pytest.raises(RunError, match="differs in: model"),
        opened_answers(tmp_path / "one", {**IDENTITY, "model": "n"}),
    ):
        pass
    assert (tmp_path / "one" / ANSWERS).read_bytes() == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"notes\.txt"), opened_answers(tmp_path, IDENTITY):
        pass


def test_two_processes_do_not_write_at_once(tmp_path: Path) -> None:
    busy = pytest.raises(RunError, match="another process")
    with opened_answers(tmp_path, IDENTITY), busy, opened_answers(tmp_path, IDENTITY):
        pass


# ── asked once ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_nothing_is_asked_twice(models: tuple[str, str], rows: Path, tmp_path: Path, asked: list[int]) -> None:
    given: dict[str, Any] = {"task_data": rows, "out": tmp_path / "out"}
    first = sm.tasks(*models, tasks="arc_easy", limit=10, **given)[0]
    before = sum(asked)
    assert before > 0
    again = sm.tasks(*models, tasks="arc_easy", limit=10, **given)[0]
    assert sum(asked) == before
    assert numbers(again) == numbers(first)
    assert again.candidate == first.candidate  # who answered is kept too
    sm.tasks(*models, tasks="arc_easy,winogrande", limit=12, **given)
    added = sum(asked) - before
    more = sm.tasks(*models, tasks="arc_easy,winogrande", limit=12, **given)[0]
    documents = {task.name: task.documents for task in more.tasks}
    expected = sum(len(d.pairs) for d in documents["arc_easy"][10:]) + sum(
        len(d.pairs) for d in documents["winogrande"]
    )
    assert added == 2 * expected  # of both models
    fresh = sm.tasks(*models, tasks="arc_easy", limit=10, fresh=True, **given)[0]
    assert sum(asked) - before - added == before
    assert numbers(fresh) == numbers(first)


def test_a_run_that_was_cut_short_ends_with_the_same_numbers(
    models: tuple[str, str], rows: Path, tmp_path: Path, asked: list[int]
) -> None:
    given: dict[str, Any] = {"tasks": "hellaswag,lambada_openai", "task_data": rows}
    whole = sm.tasks(*models, out=tmp_path / "whole", **given)[0]
    everything, total = sum(asked), (tmp_path / "whole" / "baseline" / ANSWERS).read_bytes()
    for share in (0.3, 0.7):
        out = tmp_path / f"cut-{share}"
        (out / "baseline").mkdir(parents=True)
        (out / "baseline" / ANSWERS).write_bytes(total[: int(share * len(total))])
        asked.clear()
        assert numbers(sm.tasks(*models, out=out, **given)[0]) == numbers(whole)
        assert 0 < sum(asked) < everything


def test_kill_9_loses_little_and_changes_nothing(models: tuple[str, str], tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", count=160)
    out, kept = tmp_path / "out", tmp_path / "out" / "baseline" / ANSWERS
    flags = ["--tasks", "arc_easy", "--task-data", str(rows), "--out", str(out), "--json"]
    command = [sys.executable, "-m", "scoremode", "tasks", *models, *flags]
    process = forked.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ends = time.monotonic() + 120
    while time.monotonic() < ends and process.poll() is None and (not kept.exists() or kept.stat().st_size < 2500):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it was killed"
    assert kept.stat().st_size >= 2500
    done = forked.run(command, capture_output=True, text=True, check=True, timeout=180)
    resumed = json.loads(done.stdout)["candidates"][0]
    undisturbed = sm.tasks(*models, tasks="arc_easy", task_data=rows, out=tmp_path / "undisturbed")[0]
    assert resumed["rows"] == json.loads(json.dumps(undisturbed.rows))
    whole = (tmp_path / "undisturbed" / "baseline" / ANSWERS).read_bytes()
    assert kept.read_bytes()[:2500] == whole[:2500]  # what was there before the kill is still there
    assert kept.stat().st_size == len(whole)  # and nothing was asked twice


def test_what_cannot_be_asked_is_refused_before_a_model_is_opened(rows: Path, tmp_path: Path, asked: list[int]) -> None:
    for wrong, words in (
        ({"tasks": "piqa"}, "no data of the task piqa"),
        ({"tasks": "arc_easy", "rows": ["arc_esy"]}, "is not asked here"),
        ({"tasks": "winogrande", "num_fewshot": 2}, "few-shot examples of winogrande"),
        ({"tasks": "gsm8k"}, "generates text"),
    ):
        with pytest.raises(InputError, match=words):
            sm.tasks("table:uniform", "table:uniform", task_data=rows, out=tmp_path, **wrong)
    assert asked == []
