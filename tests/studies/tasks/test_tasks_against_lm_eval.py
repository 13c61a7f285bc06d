"""lm-eval runs tasks with our adapter and logs them; ``scoremode tasks`` compares the logs. Its numbers are checked
against lm-eval's own aggregates, and by hand from the rows and the logged log-likelihoods."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval")

import scoremode as sm
from tests.studies.tasks.task_rows import own_definitions, rounded_copy, write_rows
from tests.studies.tasks.tasks import log_of, write_tasks

TASKS = ("arc_easy", "winogrande", "own_last_word")
ROWS = {"arc_easy": 24, "winogrande_xl": 24}


@pytest.fixture(scope="module")
def definitions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("definitions")
    own_definitions(folder, write_rows(folder / "rows", ROWS), {name: name for name in TASKS[:2]})
    return write_tasks(folder, TASKS[2:])


@pytest.fixture(scope="module")
def logs(tiny: Path, definitions: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Those of a model and of the same with rounded weights."""
    folder = tmp_path_factory.mktemp("logs")
    models = {"base": tiny, "rounded": rounded_copy(tiny, folder)}
    return [log_of(folder / n, f"model={m},dtype=float32", TASKS, definitions) for n, m in models.items()]


@pytest.fixture(scope="module")
def compared(logs: list[Path]) -> sm.TasksComparison:
    return sm.tasks(*logs)[0]


def results(log: Path) -> dict[str, Any]:
    (path,) = log.rglob("results_*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def samples(log: Path, task: str) -> list[dict[str, Any]]:
    (path,) = log.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_accuracies_and_errors_are_those_of_lm_eval(compared: sm.TasksComparison, logs: list[Path]) -> None:
    assert len(list(compared.flips())) > 3, "else these tests could not fail"
    for side, log in zip(("baseline", "candidate"), logs, strict=True):
        printed = results(log)["results"]
        for name in TASKS:
            row = compared.row(name)
            assert row["documents"] == len(samples(log, name))
            for metric in ("acc", "acc_norm"):
                if f"{metric},none" in printed[name]:
                    assert row[f"{metric}_{side}"] == pytest.approx(printed[name][f"{metric},none"], abs=1e-12)
                    error = printed[name][f"{metric}_stderr,none"]
                    assert row[f"{metric}_{side}_stderr"] == pytest.approx(error, abs=1e-12)
                else:
                    assert row[f"{metric}_{side}"] is None
    assert "own_last_word: only means over documents are compared, and not perplexity" in compared.notes
    assert compared.overall["kl_choices"] is None  # a last word has no choices


def right_and_lengths(task: str, doc: dict[str, Any]) -> tuple[int, list[int] | None]:
    """From the fields of the datasets' rows, without lm-eval."""
    if task == "arc_easy":
        return doc["choices"]["label"].index(doc["answerKey"]), [len(text) for text in doc["choices"]["text"]]
    return int(doc["answer"]) - 1, None


@pytest.mark.parametrize("task", ["arc_easy", "winogrande"])
def test_margins_divergences_and_changed_answers_by_hand(
    task: str, compared: sm.TasksComparison, logs: list[Path]
) -> None:
    gold_shift, margin_shift, kl, changed = [], [], [], []
    for one, two in zip(*(samples(log, task) for log in logs), strict=True):
        right, lengths = right_and_lengths(task, one["doc"])
        p, q = (np.array([float(resp[0][0]) for resp in row["resps"]]) for row in (one, two))
        gold_shift.append(q[right] - p[right])
        margins = [side[right] - np.delete(side, right).max() for side in (p, q)]
        margin_shift.append(margins[1] - margins[0])
        a, b = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
        kl.append(float((np.exp(a) * (a - b)).sum()))
        if lengths is not None:
            p, q = p / lengths, q / lengths
        changed.append(p.argmax() != q.argmax())
    row = compared.row(task)
    assert row["gold_shift"] == pytest.approx(np.mean(gold_shift))
    assert row["margin_shift"] == pytest.approx(np.mean(margin_shift))
    assert row["kl_choices"] == pytest.approx(np.mean(kl), rel=1e-6)
    assert row["changed"] == pytest.approx(np.mean(changed))


def test_the_model_and_its_engine_are_in_the_results(compared: sm.TasksComparison, tiny: Path) -> None:
    assert compared.baseline["engine"] == "transformers"
    assert (compared.baseline["dtype"], compared.baseline["head"]) == ("float32", "exact-fp32")
    assert len(compared.baseline["model_fingerprint"]) >= 32
    assert compared.baseline["bits_per_weight"] > 0
    assert compared.settings["lm_eval"].startswith("0.")
    assert compared.settings["seeds"]["fewshot"] == 1234
    assert compared.baseline_name == tiny.name


def test_logs_of_lm_evals_own_back_end_are_read_too(
    logs: list[Path], tiny: Path, definitions: Path, tmp_path: Path
) -> None:
    model = f"pretrained={tiny},dtype=float32"
    theirs = log_of(tmp_path / "hf", model, TASKS, definitions, "--model", "hf", "--device", "cpu", "--limit", "9")
    ours = log_of(tmp_path / "ours", f"model={tiny},dtype=float32", TASKS, definitions, "--limit", "9")
    found = sm.tasks(theirs, ours)[0]
    assert found.baseline["engine"] == "lm-eval hf"
    assert found.overall["flips"] == 0
    assert found.row("arc_easy")["kl_choices"] < 1e-7
    assert abs(found.row("winogrande")["margin_shift"]) < 1e-3
    assert "not all documents: lm-eval ran with --limit 9" in " ".join(found.notes)
    with pytest.raises(sm.ScoremodeError, match="15 documents are in the baseline alone"):
        sm.tasks(logs[0], ours)


@pytest.mark.parametrize("by_size", [True, False])
def test_groups_are_aggregated_as_lm_eval_defines_them(by_size: bool, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", {"arc_easy": 24, "winogrande_xl": 9})
    group = {
        "group": "own_group",
        "task": ["own_arc", "own_wino"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": by_size}],
    }
    definitions = own_definitions(tmp_path / "yaml", rows, {"own_arc": "arc_easy", "own_wino": "winogrande"}, group)
    log = log_of(tmp_path / "log", "model=table:uniform,prefix_token_id=0", ["own_group"], definitions)
    found = sm.tasks(log, log, tasks="own_group")[0]
    assert found.top == ("own_group",)
    printed = results(log)["groups"]["own_group"]
    assert found.row("own_group")["acc_baseline"] == pytest.approx(printed["acc,none"], abs=1e-12)
    assert found.groups["own_group"]["own_arc"] == pytest.approx(24 / 33 if by_size else 1 / 2)
    assert found.overall["documents"] == 33
    for document, log_probs in zip(found.tasks[0].documents, found.tasks[0].baseline or (), strict=True):
        expected = [-math.log(256) * len(continuation.encode()) for _, continuation in document.pairs]
        assert log_probs == pytest.approx(expected)


def test_texts_that_a_back_end_of_lm_eval_generated_are_compared_by_their_metric(tiny: Path, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks", ["own_writing"])
    hf = ["--model", "hf", "--device", "cpu"]
    log = log_of(tmp_path / "log", f"pretrained={tiny},dtype=float32", ["own_writing"], folder, *hf)
    found = sm.tasks(log, log)[0]
    assert (found.overall["metric"], found.overall["flips"]) == ("exact_match", 0)
    assert found.overall["margin_shift"] is None
    assert found.overall["accuracy_baseline"] == results(log)["results"]["own_writing"]["exact_match,none"]
