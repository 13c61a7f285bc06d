"""``scoremode.vllm`` refuses everything that it would otherwise silently ignore. Needs no engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scoremode.core.scores.answers import Answers
from scoremode.engines.vllm.llm import LLM, SamplingParams
from scoremode.errors import InputError, OptionError

IDS = [5, 6, 7]
PARAMS = SamplingParams(score_mode=True)


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]


class Engine:
    """Records its requests, and answers with zeros."""

    def score(self, source: Any, done: Any) -> Any:
        for i in range(len(source)):
            n = len(source.window(i).rows)
            yield i, Answers(np.zeros((n, 1)), np.ones((n, 1), np.int64), np.zeros(n), np.zeros(n, int), np.zeros(n))


@pytest.fixture
def llm() -> LLM:
    """An LLM without an engine: refusals come before anything is scored."""
    made = LLM.__new__(LLM)
    made.engine = Engine()  # type: ignore[assignment]
    made.get_tokenizer = Tokenizer  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize("name", ["lora_request", "priority", "mm_processor_kwargs", "tokenization_kwargs"])
def test_an_argument_that_is_not_honoured_is_refused_by_name(llm: LLM, name: str) -> None:
    with pytest.raises(OptionError, match=f"does not honour {name}; leave {name} out"):
        llm.generate([{"prompt_token_ids": IDS}], PARAMS, **{name: object()})
    assert len(llm.generate([{"prompt_token_ids": IDS}], PARAMS, **{name: None})) == 1, "None asks for nothing"
    assert len(llm.generate(["text"], PARAMS, use_tqdm=False)) == 1


@pytest.mark.parametrize("name", ["multi_modal_data", "mm_processor_kwargs", "cache_salt", "target_ids"])
def test_a_key_of_a_prompt_that_is_not_honoured_is_refused_by_name(llm: LLM, name: str) -> None:
    prompts: Any = ["text", {"prompt_token_ids": IDS, name: {"image": 1}}]
    with pytest.raises(InputError, match=f"prompt 1 cannot be scored: .*{name}"):
        llm.generate(prompts, PARAMS)


def test_texts_by_name_and_alone_are_the_same(llm: LLM) -> None:
    alone, named = llm.generate(["abc", {"prompt": "abc"}], PARAMS)
    assert alone.prompt_token_ids == named.prompt_token_ids == [97, 98, 99]
    (both,) = llm.generate({"prompt_token_ids": IDS, "prompt": "the text of these ids"}, PARAMS)
    assert both.prompt_token_ids == IDS


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"prompt": 5},
        {"prompt_token_ids": [1.5, 2.5]},
        {"prompt_token_ids": [[1, 2]]},
        {"prompt_token_ids": ["1", "2"]},
        {"prompt_token_ids": [1, -2]},
        {"prompt_token_ids": [1, 2**40]},
        {"prompt_token_ids": []},
        {"prompt_token_ids": IDS, "target_token_ids": [1.0, 2.0]},
        7,
        None,
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InputError, match="prompt 0"):
        llm.generate([prompt], PARAMS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {5: 1.0}),
        ("allowed_token_ids", [5]),
        ("bad_words", ["x"]),
        ("structured_outputs", object()),
        ("logits_processors", [print]),
        ("truncate_prompt_tokens", 5),
        ("prompt_logprobs", 5),
        ("prompt_logprob_token_ids", [5]),
        ("temprature", 0.0),
    ],
)
def test_sampling_params_that_change_what_a_score_means_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"does not honour {name}"):
        SamplingParams(score_mode=True, **{name: value})


def test_max_tokens_is_zero_in_score_mode_and_zero_without_it_is_an_error() -> None:
    assert SamplingParams(score_mode=True).max_tokens == SamplingParams(score_mode=True, max_tokens=0).max_tokens == 0
    with pytest.raises(OptionError, match="max_tokens=0 without score mode"):
        SamplingParams(max_tokens=0)
    with pytest.raises(OptionError, match="max_tokens is 5"):
        SamplingParams(score_mode=True, max_tokens=5)


def test_one_sampling_params_in_score_mode(llm: LLM) -> None:
    for wrong in (None, object(), [PARAMS, PARAMS]):
        with pytest.raises(OptionError, match="only scores"):
            llm.generate(["ab", "cd"], wrong)  # type: ignore[arg-type]
