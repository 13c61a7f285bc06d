"""What is said of a vLLM that is running: its self-test, unread caches, rows for the noise floor. No engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scoremode.core.scores.answers import Window
from scoremode.engines.vllm.engine import rows_in_other_steps, shortened
from scoremode.engines.vllm.self_test import TEST_TARGETS, SelfTestVerdict, judge_answers, unread_cache_note
from scoremode.engines.vllm.wire import Words, line_words, pack_words

VOCABULARY = 50


def said(logprob: float, top: float, apart: float = 0.0, **facts: str) -> Words:
    """Two rows of a self-test: our line, vLLM's own, the largest logit, exact, vocabulary, kernel."""

    def line(value: float) -> Words:
        floats = np.array([value] * TEST_TARGETS, np.float32).view(np.int32)
        ends = np.array([np.log(VOCABULARY), 0, top + value - logprob], np.float32).view(np.int32)
        return np.concatenate([floats, np.ones(TEST_TARGETS, np.int32), ends])

    assert len(line(0.0)) == line_words(TEST_TARGETS)
    largest = np.array([20.0], np.float32).view(np.int32)
    rest = np.array([1, VOCABULARY, *pack_words({"head_kernel": "plain", **facts})], np.int32)
    row = np.concatenate([line(logprob + apart), line(logprob), largest, rest])
    return np.stack([row, row])


def test_a_model_without_preferences_is_noted() -> None:
    even = -np.log(VOCABULARY)
    (note,) = judge_answers(said(even, even), "bfloat16").notes("bfloat16")
    assert note.startswith("all logits are equal")
    assert judge_answers(said(-7.0, -0.5), "bfloat16").notes("bfloat16") == []


@pytest.mark.parametrize(
    ("dtype", "products", "noted"), [("float32", "tf32", 1), ("float32", "ieee", 0), ("bfloat16", "tf32", 0)]
)
def test_layers_in_float32_that_are_multiplied_in_less_are_noted(dtype: str, products: str, noted: int) -> None:
    verdict = SelfTestVerdict(0.0, 1.0, True, VOCABULARY, {"head_kernel": "rows", "float32_products": products})
    assert len(verdict.notes(dtype)) == noted
    assert all("float32 matrices in tf32" in note for note in verdict.notes(dtype))


def test_served_logits_of_a_float32_head_may_be_off_by_what_tf32_rounds() -> None:
    """Our own head does not round: if vLLM rounds its logits, the two differ, and nothing is wrong."""
    rounded = judge_answers(said(-7.0, -0.5, apart=0.02, float32_products="tf32"), "float32")
    assert rounded.error <= rounded.allowed
    exact = judge_answers(said(-7.0, -0.5, apart=0.02, float32_products="ieee"), "float32")
    assert exact.error > exact.allowed


def config(cache: str, *, mla: bool = False, sparse: bool = False) -> Any:
    text = SimpleNamespace(index_topk=2048) if sparse else SimpleNamespace()
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cache),
        model_config=SimpleNamespace(use_mla=mla, hf_text_config=text),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
    )


@pytest.mark.parametrize("given", [config("turboquant_3bit_nc"), config("ultraquant_4bit"), config("fp8", mla=True)])
def test_a_cache_that_prefill_does_not_read_gets_its_line(given: Any) -> None:
    (line,) = unread_cache_note(given)
    assert "is hardly measured" in line
    assert "up to 2048 tokens" in line
    assert given.cache_config.cache_dtype in line
    assert line.endswith("measure it with --path decode")


# the prefill of the last one reads the cache
@pytest.mark.parametrize(
    "given", [config("fp8"), config("auto", mla=True), config("fp8_ds_mla", mla=True, sparse=True)]
)
def test_other_caches_get_none(given: Any) -> None:
    assert unread_cache_note(given) == []


def window(tokens: int, first: int = 0) -> Window:
    ids = np.arange(tokens, dtype=np.int32)
    return Window(ids, np.arange(first, tokens - 1, dtype=np.int32), ids[first + 1 :, None])


@pytest.mark.parametrize(("tokens", "first"), [(48, 0), (48, 23), (2048, 0), (2048, 1535), (300, 200)])
@pytest.mark.parametrize("step", [64, 512, 2048, 8192])
def test_rows_of_the_last_step_are_counted_and_it_is_shorter_than_any_usual_one(
    tokens: int, first: int, step: int
) -> None:
    whole = window(tokens, first)
    short = shortened(whole, step)
    counted = rows_in_other_steps(whole, short, step)
    last = len(short.ids) - (len(short.ids) - 1) // step * step  # tokens of the last step, alone in flight
    assert 0 < last < min(step, tokens)
    assert counted.any()
    rows = short.rows[counted]
    assert rows.min() >= len(short.ids) - last
    assert rows.max() < len(short.ids) < tokens
    assert np.array_equal(short.ids, np.arange(len(short.ids)))
    assert np.array_equal(short.targets[:, 0], short.rows + 1)


@pytest.mark.parametrize("item", [window(2), window(9), window(48, 40), window(400, 380)])
def test_what_is_too_short_to_be_cut_is_not_counted(item: Window) -> None:
    """A step with only a few tokens less might be padded to the same size."""
    assert not rows_in_other_steps(item, shortened(item, 512), 512).any()


def test_a_window_that_asks_nothing_stays_empty() -> None:
    empty = Window(np.arange(9, dtype=np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32))
    short = shortened(empty, 512)
    assert len(short.rows) == len(rows_in_other_steps(empty, short, 512)) == 0
