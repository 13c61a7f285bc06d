"""The adapter against the harness's own Transformers back end, and against float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from scoremode.core.engine.plugin import Work
from scoremode.errors import EngineError, InputError, OptionError, RunError
from tests.conftest import DATA
from tests.partial_engine import PartialEngine
from tests.studies.tasks.tasks import CHOICE, CHOICES, write_task, write_tasks

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval")

from scoremode.studies.tasks import model as adapter  # noqa: E402 - needs lm_eval
from scoremode.studies.tasks.model import ScoremodeLM  # noqa: E402
from tests.studies.tasks.judge import PER_TOKEN, check, harness_model, instances  # noqa: E402


def evaluate(lm: Any, tasks: Path, names: list[str], **settings: Any) -> Any:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(model=lm, tasks=names, task_manager=manager, bootstrap_iters=0, **settings)


def ours(folder: Path | str, **settings: Any) -> ScoremodeLM:
    return ScoremodeLM(model=str(folder), dtype="float32", **settings)


def test_tasks_give_the_results_of_the_harness(folder: Path, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    names = ["own_choice", "own_last_word", "own_rolling"]
    theirs = evaluate(harness_model(folder), tasks, names)
    found = evaluate(ours(folder), tasks, names)
    for name in names:
        for metric, value in theirs["results"][name].items():
            other = found["results"][name][metric]
            assert other == pytest.approx(value, rel=1e-4) if isinstance(value, float) else other == value
        for a, b in zip(theirs["samples"][name], found["samples"][name], strict=True):
            assert a["arguments"] == b["arguments"]
            _same_answers(a["resps"], b["resps"], a["arguments"])


def _same_answers(theirs: Any, found: Any, arguments: Any) -> None:
    for (a,), (b,), texts in zip(theirs, found, arguments, strict=True):
        if isinstance(a, tuple):
            assert a[1] == b[1], texts
            assert abs(a[0] - b[0]) <= PER_TOKEN * len(texts[1].encode()), texts
        else:
            assert abs(a - b) <= PER_TOKEN * len(texts[0].encode()), texts


ODD = [
    ("", "The quick brown fox"),
    ("The quick", " brown"),
    ("The quick", " brown fox jumps over"),
    ("The quick", "."),
    ("x " * 700, "y"),
    ("naïve 東京 ", "2024年"),
    ("mode", "l and the lang"),
    ("A model can be cut any", "where"),
    (" ", "leading spaces"),
]


def test_odd_shapes(folder: Path) -> None:
    lm = ours(folder)
    theirs = harness_model(folder)
    pairs = [pair for pair in ODD if pair[0].strip() or lm.subject.tokenizer.facts.adds_bos]
    check(lm, theirs, instances(pairs), lm.encoder)


@pytest.mark.parametrize("file", ["arc_easy_validation", "winogrande_xl_validation"])
def test_questions(file: str, stories: Path) -> None:
    pairs = [pair for row in _rows(file, 12) for pair in _pairs(row)]
    lm = ours(stories)
    check(lm, harness_model(stories, batch_size=4), instances(pairs, file), lm.encoder)


def _rows(file: str, count: int) -> list[dict[str, Any]]:
    lines = (DATA / "tasks" / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def _pairs(row: dict[str, Any]) -> list[tuple[str, str]]:
    """As the harness's tasks make them."""
    if "sentence" in row:
        before, after = row["sentence"].split("_")
        return [(before + row[key], after) for key in ("option1", "option2")]
    return [(f"Question: {row['question']}\nAnswer:", f" {text}") for text in row["choices"]["text"]]


def test_chunks_change_no_answer(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(f"The quick brown {word}", f" {choice}") for word in ("fox", "dog", "cat") for choice in "abcd"]
    whole = ours(tiny).loglikelihood(instances(pairs), disable_tqdm=True)
    monkeypatch.setattr(adapter, "CHUNK", 2)
    parts = ours(tiny).loglikelihood(instances(pairs), disable_tqdm=True)
    assert [p[0] for p in parts] == pytest.approx([w[0] for w in whole], abs=1e-5)
    assert [p[1] for p in parts] == [w[1] for w in whole]


def test_a_context_is_computed_once_for_its_choices(tiny: Path) -> None:
    import torch

    lm = ours(tiny)
    context = "The quick brown fox jumps over the lazy dog. " * 2
    requests = instances([(context, f" {choice}") for choice in ("fox", "dog runs", "cat", "model")])
    engine: Any = lm.held.opened(Work(100, shares_prompts=True))
    fed: list[int] = []
    engine.model.get_input_embeddings().register_forward_hook(lambda _, ids, __: fed.append(ids[0].numel()))
    lm.loglikelihood(requests, disable_tqdm=True)
    alone = len(lm.encoder.text(context))
    assert alone <= sum(fed) <= alone + 4 * 10
    assert isinstance(engine.model, torch.nn.Module)


def test_choices_that_lost_different_parts_of_their_context(tiny: Path) -> None:
    """They begin with different tokens, so there is no prompt to share."""
    lm = ours(tiny, max_length=24)
    context, choices = "The quick brown fox jumps over the lazy dog. " * 4, [" dog", " mind the quick fox", " a"]
    requests = instances([(f"{i} {context}", choice) for i in range(3) for choice in choices])
    check(lm, harness_model(tiny, max_length=24), requests, lm.encoder)


def test_contexts_that_were_cut_are_counted(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm = ours(tiny, max_length=30)
    found = evaluate(lm, write_tasks(tmp_path / "tasks", ["own_choice"]), ["own_choice"])
    told = found["config"]["scoremode"]
    assert told["requests"]["truncated"] > 0
    assert told["requests"]["loglikelihood"] == sum(len(row["choices"]) for row in CHOICES)
    assert told["model"] == lm.subject.fingerprint
    assert told["head"] == "exact-fp32"
    assert "the context was cut on its left" in capsys.readouterr().err


def test_a_token_over_the_border_is_told(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lm = ours(tiny)
    text = "The quick brown fox"
    whole = lm.subject.tokenizer.encode(text, special=False)
    inside = next(i for i, (a, b) in enumerate(zip(whole.char_start, whole.char_end, strict=True)) if b - a > 2 and i)
    cut = int(whole.char_start[inside]) + 2
    lm.loglikelihood(instances([(text[:cut], text[cut:]), ("The quick", " brown")]), disable_tqdm=True)
    told = capsys.readouterr().err
    assert "in 1 of 2 requests a token spans the end of the context" in told
    assert lm.get_model_info()["scoremode"]["requests"]["spanning"] == 1


# ── the cache of answers ─────────────────────────────────────────────────────────────────────────────────────────────
def test_answers_of_two_models_are_never_mixed(tiny: Path, tiny_bos: Path, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks", ["own_choice"])
    cache = str(tmp_path / "answers")
    first = evaluate(ours(tiny), tasks, ["own_choice"], use_cache=cache)
    again = ours(tiny)
    found = evaluate(again, tasks, ["own_choice"], use_cache=cache)
    assert found["samples"]["own_choice"][0]["resps"] == first["samples"]["own_choice"][0]["resps"]
    assert not again.held.is_open, "every answer was there: no weight was loaded"
    for other in (ours(tiny_bos), ours(tiny, max_length=50), ours(tiny, head="as-served")):
        with pytest.raises(RunError, match="another model or other settings"):
            evaluate(other, tasks, ["own_choice"], use_cache=cache)
        assert not other.held.is_open
    evaluate(harness_model(tiny), tasks, ["own_choice"], use_cache=f"{cache}-unknown")
    with pytest.raises(RunError, match="another model or other settings"):
        evaluate(ours(tiny), tasks, ["own_choice"], use_cache=f"{cache}-unknown")


# ── chats ────────────────────────────────────────────────────────────────────────────────────────────────────────────
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.mark.parametrize("which", ["tiny", "tiny_bos"])
def test_chat_templates(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(request.getfixturevalue(which), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tasks = write_tasks(tmp_path / "tasks", ["own_choice"])
    settings = {"apply_chat_template": True, "system_instruction": "Be brief.", "fewshot_as_multiturn": True}
    theirs = evaluate(harness_model(folder), tasks, ["own_choice"], **settings)
    found = evaluate(ours(folder), tasks, ["own_choice"], **settings)
    for a, b in zip(theirs["samples"]["own_choice"], found["samples"]["own_choice"], strict=True):
        assert a["arguments"] == b["arguments"]
        assert "[system] Be brief." in b["arguments"][0][0]
        _same_answers(a["resps"], b["resps"], a["arguments"])


def test_a_model_without_a_template_is_refused(tiny: Path) -> None:
    lm = ours(tiny)
    lm.tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        lm.apply_chat_template([{"role": "user", "content": "hi"}])


# ── what cannot be answered ──────────────────────────────────────────────────────────────────────────────────────────
def test_an_engine_without_ranks_must_be_told_what_to_say() -> None:
    requests = instances([("ab", "cd")])
    silent = ScoremodeLM(model="table:uniform", engine=PartialEngine())
    with pytest.raises(EngineError, match="does not measure ranks"):
        silent.loglikelihood(requests, disable_tqdm=True)
    named = ScoremodeLM(model="table:uniform", engine=PartialEngine(), greedy="unknown-is-false")
    ((log_prob, greedy),) = named.loglikelihood(requests, disable_tqdm=True)
    assert greedy is False
    assert math.isfinite(log_prob)


def test_a_whole_text_needs_no_ranks_and_none_is_generated() -> None:
    from lm_eval.api.instance import Instance

    lm = ScoremodeLM(model="table:uniform", engine=PartialEngine(), prefix_token_id=0, max_length=4)
    texts = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in ("abcdefghij", "", "ab")]
    found = lm.loglikelihood_rolling(texts, disable_tqdm=True)
    assert found[0] < found[2] < found[1] == 0
    with pytest.raises(OptionError, match=r"generates none, which own_writing needs"):
        lm.generate_until([Instance("generate_until", {}, ("a", {}), 0, ("own_writing", 0, 1))])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "table:uniform", "pretrained": "table:uniform"}, "given twice"),
        ({"model": "table:uniform", "token": "hf_x"}, "access token"),
        ({"model": "table:uniform", "load_in_4bit": True}, "there is no argument load_in_4bit"),
        ({"model": "table:uniform", "max_length": "long"}, "Expected `int . null`, got `str`"),
        ({"model": "table:uniform", "add_bos_token": 1}, "add_bos_token"),
        ({"model": "table:uniform", "add_bos_token": True}, "has no BOS"),
        ({"model": "table:uniform", "chat_template_args": 3}, "chat_template_args"),
        ({"model": "table:uniform", "enable_thinking": True}, "enable_thinking"),
        ({"model": "table:uniform", "device": "cpu"}, "--device cpu is not for scoremode"),
    ],
)
def test_arguments_that_cannot_work_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words) as refused:
        ScoremodeLM(**given)
    assert refused.value.fix
    assert "hf_x" not in str(refused.value)


def test_a_length_beyond_the_model_is_refused(tiny: Path) -> None:
    with pytest.raises(OptionError, match="max_length 129 is more than the 128 tokens"):
        ours(tiny, max_length=129)


def test_an_empty_continuation_is_named(tiny: Path, tmp_path: Path) -> None:
    rows = [*CHOICES, {"question": "Empty", "choices": ["", "x"], "answer": 0}]
    (tmp_path / "tasks").mkdir()
    write_task(tmp_path / "tasks", "own_empty", {**CHOICE, "target_delimiter": ""}, rows)
    lm = ours(tiny)
    with pytest.raises(InputError, match="document 4 of own_empty: a continuation has 0 tokens"):
        evaluate(lm, tmp_path / "tasks", ["own_empty"])
    assert not lm.held.is_open
