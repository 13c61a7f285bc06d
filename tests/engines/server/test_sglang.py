"""SGLang: its own form of scores, on a small server that speaks it, and on answers that a real one gave.

``RECORDED`` are answers of SGLang 0.5.16 on an H200 (SmolLM2-135M, bfloat16, ``--enable-fp32-lm-head``), without the
fields that nobody reads. No CPU runs SGLang as it is released, so no test here starts it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from scoremode.engines.server import link
from scoremode.engines.server.forms import FORMS, WrongAnswerError
from scoremode.errors import EngineError
from tests.engines.server.small_server import SmallServer
from tests.engines.server.test_small_server import ask, assert_exact

GENERATE = next(form for form in FORMS if form.name == "generate")
SENT = [1, 2, 3, 49151, 7]
RECORDED = {
    "text": "",
    "output_ids": [],
    "meta_info": {
        "prompt_tokens": 5,
        "weight_version": "default",
        "input_token_logprobs": [
            [None, 1, None],
            [-18.294471740722656, 2, None],
            [-27.043689727783203, 3, None],
            [-23.603515625, 0, None],  # id 49151, the last of the vocabulary
            [-20.988967895507812, 7, None],
        ],
    },
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallServer]:
    monkeypatch.setattr(link, "FIRST_DELAY", 0.02)
    info = {"version": "0.5.16", "dtype": "bfloat16", "enable_fp32_lm_head": False, "tp_size": 2, "port": 30000}
    with SmallServer(forms=("generate",), version=None, fingerprint=None, more={"/server_info": info}) as server:
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


def test_a_server_that_is_started_again_otherwise_is_another_one(served: SmallServer) -> None:
    first = ask(served).manifest["engine_settings"]["settings"]
    served.more["/server_info"]["tp_size"] = 1
    assert ask(served).manifest["engine_settings"]["settings"] == {**first, "tp_size": 1}


def test_an_answer_of_a_real_one_is_read() -> None:
    value = json.loads(json.dumps(RECORDED))
    logprob = GENERATE.read(None, value, SENT).logprob  # type: ignore[arg-type]
    assert logprob.tolist() == [-18.294471740722656, -27.043689727783203, -23.603515625, -20.988967895507812]
    assert GENERATE.body("any", SENT, 0) == {
        "input_ids": SENT,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def _changed(edit: Callable[[list[list[Any]]], object]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(json.dumps(RECORDED))
    edit(value["meta_info"]["input_token_logprobs"])
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (_changed(lambda listed: listed.pop()), "4 positions for 5 tokens"),
        (_changed(lambda listed: listed[2].__setitem__(1, 4)), "not about the tokens that were sent"),
        (_changed(lambda listed: listed[1].__setitem__(1, 0)), "not about the tokens that were sent"),
        (_changed(lambda listed: listed[0].__setitem__(0, -1.0)), "the first token has a score"),
        (_changed(lambda listed: listed[3].__setitem__(0, None)), "not a number"),
        (_changed(lambda listed: listed.__setitem__(2, [])), "no input_token_logprobs"),
        ({"meta_info": None}, "no input_token_logprobs"),
        ({"text": ""}, "no input_token_logprobs"),
    ],
)
def test_what_does_not_fit_is_refused(value: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongAnswerError, match=said):
        GENERATE.read(None, value, SENT)  # type: ignore[arg-type]


def test_scores_shifted_by_one_are_refused(served: SmallServer) -> None:
    honest = served.generate

    def shifted(asked: dict[str, Any]) -> dict[str, Any]:
        found = honest(asked)
        listed = found["meta_info"]["input_token_logprobs"]
        numbers = [one[0] for one in listed]
        for one, number in zip(listed[1:], [*numbers[2:], -1.0], strict=True):
            one[0] = number
        return found

    served.generate = shifted  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="change with the tokens that follow"):
        ask(served)


def test_probability_zero_of_the_table_is_kept(served: SmallServer) -> None:
    served.logits[:, ord("E")] = -np.inf
    assert np.isneginf(ask(served, text="Every byte. " * 40).scores.logprob).any()
