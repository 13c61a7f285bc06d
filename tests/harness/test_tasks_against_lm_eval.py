"""Accuracies, requests and groups of ``scoremode tasks`` equal lm-eval's own, on the same rows and models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval")

import scoremode as sm
from scoremode.harness.documents import build_documents
from scoremode.harness.loading import TaskSelection, load_tasks, quiet_harness
from tests.conftest import DATA
from tests.harness.task_rows import own_definitions, rounded_copy, write_rows

TASKS = ("arc_easy", "hellaswag", "winogrande", "lambada_openai")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def rounded(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rounded_copy(tiny, tmp_path_factory.mktemp("rounded"))


@pytest.fixture(scope="module")
def compared(tiny: Path, rounded: Path, rows: Path) -> sm.TasksComparison:
    return sm.tasks(str(tiny), str(rounded), tasks=TASKS, task_data=rows, dtype="float32")[0]


def lm_eval_results(model: Path, folder: Path, names: list[str]) -> dict[str, Any]:
    """What lm-eval prints with its own Hugging Face back end."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    with quiet_harness():
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        lm = HFLM(pretrained=str(model), dtype="float32", batch_size=4, device="cpu")
        found = lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, bootstrap_iters=1000)
    assert found is not None
    return dict(found)


@pytest.fixture(autouse=True)
def without_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's bootstrap forks this process, which has threads of other tests by now; a child may never end."""
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")


def test_accuracies_and_errors_are_those_of_lm_eval(
    compared: sm.TasksComparison, tiny: Path, rounded: Path, rows: Path, tmp_path: Path
) -> None:
    folder = own_definitions(tmp_path, rows, {f"own_{name}": name for name in TASKS})
    for side, model in (("baseline", tiny), ("candidate", rounded)):
        printed = lm_eval_results(model, folder, [f"own_{name}" for name in TASKS])["results"]
        for name in TASKS:
            row, theirs = compared.row(name), printed[f"own_{name}"]
            for metric in ("acc", "acc_norm"):
                if f"{metric},none" in theirs:
                    assert row[f"{metric}_{side}"] == pytest.approx(theirs[f"{metric},none"], abs=1e-12)
                    error = theirs[f"{metric}_stderr,none"]
                    assert row[f"{metric}_{side}_stderr"] == pytest.approx(error, abs=1e-12)
                else:
                    assert row[f"{metric}_{side}"] is None
        number = 0 if side == "baseline" else 1
        perplexity = {t.name: t.paired.lm_eval for t in compared.tasks}["lambada_openai"]["perplexity"][number]
        assert perplexity == pytest.approx(printed["own_lambada_openai"]["perplexity,none"], rel=1e-4)


def test_the_two_models_differ_so_that_these_tests_can_fail(compared: sm.TasksComparison) -> None:
    assert len(list(compared.flips())) > 3
    assert compared.overall["kl_choices"] is None  # lambada has no choices
    assert compared.row("arc_easy")["kl_choices"] > 0


@pytest.mark.parametrize("shots", [0, 2])
def test_requests_are_those_of_lm_eval(shots: int, rows: Path, tmp_path: Path) -> None:
    """The same few-shot examples, drawn with lm-eval's seed."""
    from lm_eval.tasks import TaskManager

    loaded = load_tasks(TaskSelection(("arc_easy",), num_fewshot=shots, task_data=rows, limit=7))
    ours = [pair for document in build_documents(loaded, "arc_easy") for pair in document.pairs]
    folder = own_definitions(tmp_path, rows, {"own_arc": "arc_easy"})
    with quiet_harness():
        theirs = TaskManager(include_path=str(folder), include_defaults=False).load(["own_arc"])["tasks"]["own_arc"]
        theirs.set_config(key="num_fewshot", value=shots)
        theirs.set_fewshot_seed(seed=1234)
        theirs.build_all_requests(limit=7)
    assert ours == [tuple(instance.args) for instance in theirs.instances]
    assert (ours[0][0].count("Question:")) == shots + 1


def test_real_rows_have_lm_evals_accuracies(stories: Path, tmp_path: Path) -> None:
    """ARC and Winogrande with a trained model whose tokenizer adds a BOS."""
    rows = tmp_path / "rows"
    rows.mkdir()
    for target in ("arc_easy_test", "arc_easy_train"):
        shutil.copy(DATA / "tasks" / "arc_easy_validation.jsonl", rows / f"{target}.jsonl")
    shutil.copy(DATA / "tasks" / "winogrande_xl_validation.jsonl", rows)
    folder = own_definitions(tmp_path / "yaml", rows, {"own_arc": "arc_easy", "own_wino": "winogrande"})
    printed = lm_eval_results(stories, folder, ["own_arc", "own_wino"])["results"]
    found = sm.tasks(str(stories), str(stories), tasks="arc_easy,winogrande", task_data=rows, dtype="float32")[0]
    for ours, theirs in (("arc_easy", "own_arc"), ("winogrande", "own_wino")):
        assert found.row(ours)["acc_baseline"] == pytest.approx(printed[theirs]["acc,none"], abs=1e-12)
        assert found.row(ours)["documents"] == 40
        assert found.row(ours)["flips"] == 0
    assert found.row("arc_easy")["acc_norm_baseline"] == pytest.approx(printed["own_arc"]["acc_norm,none"], abs=1e-12)


@pytest.mark.parametrize("by_size", [True, False])
def test_groups_are_aggregated_as_lm_eval_defines_them(by_size: bool, tiny: Path, rows: Path, tmp_path: Path) -> None:
    short = tmp_path / "rows"
    short.mkdir()
    for path in rows.iterdir():
        lines = path.read_text().splitlines()
        kept = lines[:9] if path.name.startswith("hellaswag") else lines
        (short / path.name).write_text("\n".join(kept) + "\n")
    group = {
        "group": "own_group",
        "task": ["own_arc", "own_swag"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": by_size}],
    }
    tasks = {"own_arc": "arc_easy", "own_swag": "hellaswag"}
    folder = own_definitions(tmp_path / "yaml", short, tasks, group)
    found = sm.tasks(str(tiny), str(tiny), tasks="own_group", include_path=folder, dtype="float32")[0]
    printed = lm_eval_results(tiny, folder, ["own_group"])["groups"]["own_group"]
    assert found.row("own_group")["acc_baseline"] == pytest.approx(printed["acc,none"], abs=1e-12)
    assert found.overall["acc_baseline"] == found.row("own_group")["acc_baseline"]
    sizes = [24, 9]
    assert found.groups[0].weights["own_arc"] == pytest.approx(24 / 33 if by_size else 1 / 2)
    assert found.overall["documents"] == sum(sizes)
