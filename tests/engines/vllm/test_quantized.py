"""Quantized checkpoints as served, and the API that was asked for, on engines that both use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoremode.errors import InputError, OptionError
from scoremode.types import Answers, Ids, Window
from tests.engines.vllm.conftest import engine_of, ordinary, own, score

ASKED_FOR = """
from scoremode.vllm import LLM, SamplingParams, TokensPrompt
llm = LLM(model="…-W4A16", quantization="compressed-tensors")
token_ids = llm.get_tokenizer().encode("Your text here")
params = SamplingParams(score_mode=True, temperature=0.0)
out = llm.generate(prompts=[TokensPrompt(prompt_token_ids=token_ids, target_token_ids=token_ids[1:])], sampling_params=params)[0]
nll = -sum(out.prompt_logprobs[i][token_ids[i]].logprob for i in range(1, len(token_ids)))
"""  # noqa: E501  # word for word


@pytest.fixture(scope="module")
def w8a8(smollm2: Path, quantize: Callable[[str, Path, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(str(smollm2), tmp_path_factory.mktemp("w8a8"), "w8a8")


@pytest.fixture(scope="module")
def ran(w8a8: Path) -> Iterator[dict[str, Any]]:
    """The code of the issue; only the name of the model is filled in (int4 weights need a GPU here)."""
    names: dict[str, Any] = {}
    exec(ASKED_FOR.replace("…-W4A16", str(w8a8)), names)
    yield names
    names["llm"].close()


def test_the_code_that_was_asked_for_runs_word_for_word(ran: dict[str, Any]) -> None:
    out, ids = ran["out"], ran["token_ids"]
    assert ran["nll"] > 0
    assert np.isfinite(ran["nll"])
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == len(ids)
    assert [list(entry) for entry in out.prompt_logprobs[1:]] == [[i] for i in ids[1:]]
    assert not out.outputs, "nothing is generated"


def test_other_targets_than_the_prompts_own(ran: dict[str, Any]) -> None:
    ids = ran["token_ids"]
    other = [(i + 1) % 1000 for i in ids[1:]]
    prompt = ran["TokensPrompt"](prompt_token_ids=ids, target_token_ids=other)
    (out,) = ran["llm"].generate([prompt], ran["params"])
    assert [list(e) for e in out.prompt_logprobs[1:]] == [[i] for i in other]
    assert out.logprob < ran["out"].logprob


def test_a_wrong_number_of_targets_names_both_lengths(ran: dict[str, Any]) -> None:
    prompt = ran["TokensPrompt"](prompt_token_ids=[1, 2, 3], target_token_ids=[1, 2, 3])
    with pytest.raises(InputError, match="3 tokens and 3 targets, it needs 2"):
        ran["llm"].generate([prompt], ran["params"])


def test_max_tokens_is_zero_in_score_mode_and_zero_without_it_is_an_error() -> None:
    from scoremode.vllm import SamplingParams

    assert SamplingParams(score_mode=True).max_tokens == 0
    assert SamplingParams(score_mode=True, max_tokens=0).max_tokens == 0
    with pytest.raises(OptionError, match="max_tokens=0 without score mode"):
        SamplingParams(max_tokens=0)
    with pytest.raises(OptionError, match="max_tokens=5"):
        SamplingParams(score_mode=True, max_tokens=5)


def gaps(found: list[Answers], windows: list[Window], llm: Any) -> Any:
    """|ours - prompt_logprobs| of every target, from an ordinary engine."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outs = llm.generate([{"prompt_token_ids": w.ids.tolist()} for w in windows], params, use_tqdm=False)
    return np.concatenate(
        [
            np.abs(
                answers.logprob[:, 0]
                - [out.prompt_logprobs[i + 1][int(t)].logprob for i, t in enumerate(window.targets[:, 0])]
            )
            for window, answers, out in zip(windows, found, outs, strict=True)
        ]
    )


def test_w8a8_int8_as_served(ran: dict[str, Any], w8a8: Path, real_ids: Ids) -> None:
    engine = ran["llm"].engine
    assert engine.facts.settings["quantization"] == "compressed-tensors"
    windows = [own(real_ids[a : a + 150]) for a in (0, 500)]
    found = score(engine, windows)
    dtype = engine.facts.dtype
    with ordinary(w8a8, dtype=dtype, max_model_len=512, skip_tokenizer_init=True) as llm:
        gap = gaps(found, windows, llm)
    # in bfloat16 stock rounds its logits (about 0.02 nats a token), and the batch a row lies in decides how its
    # activations round; a shift by one would be off by whole nats
    assert gap.mean() <= (4e-2 if dtype == "bfloat16" else 1e-4)
    assert gap.max() <= (0.5 if dtype == "bfloat16" else 2e-3)
    shifted = np.abs(found[0].logprob[1:, 0] - found[0].logprob[:-1, 0])
    assert shifted.mean() > 1


def test_fp8_dynamic_as_served(small_llama: Path, quantize: Callable[[str, Path, str], Path], tmp_path: Path) -> None:
    """A small model and a short text: CPUs without FP8 of their own take 0.1 s a token and matrix."""
    folder, windows = quantize(str(small_llama), tmp_path / "fp8", "fp8"), [own(np.arange(5, 30) * 31 % 1003)]
    with engine_of(folder, head="as-served") as engine:
        assert engine.facts.head == "as-served"
        assert engine.facts.dtype == "float32"
        found = score(engine, windows)
    with ordinary(folder, dtype="float32", max_model_len=512, skip_tokenizer_init=True) as llm:
        assert gaps(found, windows, llm).max() <= 2e-3
