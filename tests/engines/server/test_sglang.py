"""SGLang: its own form of scores, on a small server that speaks it, and on answers that a real one gave.

``tests/data/sglang.json`` has answers of SGLang 0.5.23 (its CPU engine, stories260K, float32, 2026-11-18), without the
fields that nobody reads. Its kernels for CPUs have no wheel, so no test here starts it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.engine.base import Wanted
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.scores.answers import WindowList
from scoremode.engines.server import link
from scoremode.engines.server.engine import ServerEngine
from scoremode.engines.server.forms import FORMS, WrongAnswerError
from scoremode.engines.server.served import ServerFacts
from scoremode.engines.server.subject import ServedSubject
from scoremode.errors import EngineError
from tests.conftest import DATA
from tests.engines.server.small_server import SmallServer
from tests.engines.server.test_small_server import ask, assert_exact

GENERATE = next(form for form in FORMS if form.name == "generate")
REAL = json.loads((DATA / "sglang.json").read_text())
ANSWERS = {tuple(one["input_ids"]): {"text": "", "meta_info": one["meta_info"]} for one in REAL["/generate"]}
SENT, RECORDED = list(ANSWERS.items())[-1]  # 1, 2, 3, 511, 7, 511; and 511 is the last of the vocabulary
INFO = {"version": "0.5.16", "dtype": "bfloat16", "enable_fp32_lm_head": False, "tp_size": 2, "port": 30000}
Edit = Callable[[list[list[Any]], list[Any]], object]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallServer]:
    monkeypatch.setattr(link, "FIRST_DELAY", 0.02)
    with SmallServer(forms=("generate",), version=None, fingerprint=None, more={"/server_info": INFO.copy()}) as server:
        yield server


def test_scores_are_those_of_the_table_and_the_run_says_what_served_them(served: SmallServer) -> None:
    run = ask(served)
    assert_exact(run, served)
    known = run.manifest["engine_settings"]
    assert known["form"] == "generate"
    assert known["settings"] == {"dtype": "bfloat16", "enable_fp32_lm_head": False, "tp_size": 2}
    assert run.manifest["versions"]["server"] == "0.5.16"
    assert any("logits in the served type (--enable-fp32-lm-head" in note for note in run.manifest["notes"])
    assert {path for path, _ in served.requests if path.startswith("/generate")} == {"/generate"}


@pytest.mark.parametrize("info", [None, [1], {"version": "0.5.16"}])
def test_a_server_that_does_not_say_its_dtype(served: SmallServer, info: Any) -> None:
    served.more = {"/server_info": info}
    assert facts_of(served).notes == ("the server does not say its dtype",)


def test_settings_that_may_move_numbers_are_part_of_what_a_run_is(served: SmallServer) -> None:
    served.more = {
        "/get_server_info": {**INFO, "tp_size": 1, "torchao_config": "int4wo-128"}
    }  # an older version's name
    settings = {"dtype": "bfloat16", "enable_fp32_lm_head": False, "tp_size": 1, "torchao_config": "int4wo-128"}
    assert facts_of(served).facts()["settings"] == settings


def facts_of(server: SmallServer) -> ServerFacts:
    subject = choose("small", server.address).subject
    assert isinstance(subject, ServedSubject)
    return subject.served


def test_windows_of_a_real_one_are_those_of_transformers(stories: Path) -> None:
    """Its recorded answers are sent again; prompts that were not recorded are computed by Transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32).requires_grad_(False)

    class Replaying(SmallServer):
        def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
            known = ANSWERS.get(tuple(asked["input_ids"]))
            replayed.append(known is not None)
            return super().generate(asked) if known is None else known

        def rows(self, ids: list[int]) -> Any:
            return model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1).numpy()

    replayed, text = list[bool](), (DATA / "wiki.test.part.raw").read_text()[: REAL["characters"]]
    question: Any = {"text": text, "context_length": REAL["context_length"], "fresh": True}
    more, (entry,) = {name: REAL[name] for name in ("/v1/models", "/server_info")}, REAL["/v1/models"]["data"]
    with Replaying(
        forms=("generate",), version=None, fingerprint=None, weights="default", ids=512, tokenizes=False, more=more
    ) as server:
        found = sm.ppl(entry["id"], engine=server.address, tokenizer=str(stories), **question)
    assert sum(replayed) == len(ANSWERS) - 1
    wanted = sm.ppl(str(stories), dtype="float32", **question)
    assert np.abs(found.scores.logprob - wanted.scores.logprob).max() < 1e-4


def test_an_answer_of_a_real_one_is_read() -> None:
    logprob = GENERATE.read(None, RECORDED, SENT).logprob  # type: ignore[arg-type]
    assert logprob.tolist() == [one[0] for one in RECORDED["meta_info"]["input_token_logprobs"][1:]]
    assert GENERATE.body("any", SENT, 0) == {
        "input_ids": list(SENT),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
    }


def _changed(edit: Edit) -> dict[str, Any]:
    value: dict[str, Any] = deepcopy(RECORDED)
    edit(value["meta_info"]["input_token_logprobs"], value["meta_info"]["input_top_logprobs"])
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (_changed(lambda own, _: own.pop()), "5 positions for 6 tokens"),
        (_changed(lambda own, _: own[2].__setitem__(1, 4)), "not about the tokens that were sent"),
        (_changed(lambda own, _: own[1].__setitem__(1, 0)), "not about the tokens that were sent"),
        (_changed(lambda own, _: own[0].__setitem__(0, -1.0)), "the first token has a score"),
        (_changed(lambda own, _: own[3].__setitem__(0, None)), "not a number"),
        (_changed(lambda own, _: own[2].__setitem__(1, 3.0)), "another form: .*input_token_logprobs"),
        (_changed(lambda _, top: top.pop()), "5 positions for 6 tokens"),
        (_changed(lambda _, top: top.__setitem__(0, top[1])), "the first token has a score"),
        (_changed(lambda _, top: top[1].clear()), "no likeliest tokens"),
        (_changed(lambda _, top: top.__setitem__(1, None)), "no likeliest tokens"),
        ({"text": ""}, "another form: .*meta_info"),
    ],
)
def test_what_does_not_fit_is_refused(value: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongAnswerError, match=said):
        GENERATE.read(None, value, SENT)  # type: ignore[arg-type]


def test_only_the_last_id_of_a_vocabulary_is_called_0() -> None:
    with pytest.raises(WrongAnswerError, match="not about the tokens that were sent"):
        replace(GENERATE, last=512).read(None, RECORDED, SENT)  # type: ignore[arg-type]


# ── numbers that are no scores of their tokens ───────────────────────────────────────────────────────────────────────
def _moved(own: list[list[Any]], numbers: list[float]) -> None:
    for one, number in zip(own[1:], numbers, strict=True):
        one[0] = number


def _left(own: list[list[Any]], _top: object) -> None:
    _moved(own, [*(one[0] for one in own[2:]), -1.0])


def _right(own: list[list[Any]], _top: object, first: float = -1.0) -> None:
    _moved(own, [first, *(one[0] for one in own[1:-1])])


def _right_with_the_likeliest(own: list[list[Any]], top: list[Any]) -> None:
    _right(own, top, first=-20.0)
    top[2:] = top[1:-1]


def _right_in_long_prompts(own: list[list[Any]], top: list[Any]) -> None:
    if len(own) > 32:
        _right_with_the_likeliest(own, top)


def _again(own: list[list[Any]], top: list[Any]) -> None:
    if len(own) > 32:
        for one, entries in zip(own[1:], top[1:], strict=True):
            entries.append([one[0] - 1.0, one[1], None])


TRICKS: dict[str, tuple[Edit, str]] = {
    "left": (_left, "change with the tokens that follow"),
    "left, of an unsure model": (_left, "does not change with the last token|not the one that it has"),
    "right": (_right, "does not change with the last token|not the one that it has"),
    "right, with the likeliest": (
        _right_with_the_likeliest,
        "does not change with the last token|not the one that it has",
    ),
    "right, in long prompts": (_right_in_long_prompts, "change with the tokens that follow|not the one that it has"),
    "five less": (lambda own, _: _moved(own, [one[0] - 5 for one in own[1:]]), "not the one that it has"),
    "listed twice, in long prompts": (_again, "not the one that it has"),
    "five more": (lambda own, _: _moved(own, [5.0 for _ in own[1:]]), "it gives 5 as a log-probability"),
}


@pytest.mark.parametrize("name", TRICKS)
def test_numbers_of_other_tokens_are_refused(served: SmallServer, name: str) -> None:
    honest, (edit, said) = served.generate, TRICKS[name]
    served.logits /= 40 if "unsure" in name else 1

    def spoiled(asked: dict[str, Any]) -> dict[str, Any]:
        found = honest(asked)
        edit(found["meta_info"]["input_token_logprobs"], found["meta_info"]["input_top_logprobs"])
        return found

    served.generate = spoiled  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=said) as caught:
        ask(served)
    assert "logprobs-mode" not in caught.value.fix, "a flag of vLLM"


def test_other_weights_and_hidden_states_are_refused(served: SmallServer) -> None:
    served.weights = "v1"
    engine = open_engine(choose("small", served.address), Work())
    with pytest.raises(
        EngineError, match="SGLang sends hidden states as JSON text, of a prompt in chunks only the last"
    ):
        next(engine.score(WindowList(()), np.zeros(0, np.bool_), Wanted(states=True)))
    served.weights = "v2"
    assert isinstance(engine, ServerEngine)
    with pytest.raises(EngineError, match="was weight_version v1 and is weight_version v2"):
        engine.require_same()


def test_probability_zero_of_the_table_is_kept(served: SmallServer) -> None:
    served.logits[:, ord("E")] = -np.inf
    assert np.isneginf(ask(served, text="Every byte. " * 40).scores.logprob).any()
