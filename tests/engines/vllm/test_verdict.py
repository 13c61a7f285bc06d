"""The verdict of the self-test at the start, read from its answer. Needs no vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from scoremode.core.scores.packing import Words, line_words
from scoremode.engines.vllm.self_test import TEST_TARGETS, Verdict, judge_answers
from scoremode.engines.vllm.wire import pack_words

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
    verdict = Verdict(0.0, 1.0, True, VOCABULARY, {"head_kernel": "rows", "float32_products": products})
    assert len(verdict.notes(dtype)) == noted
    assert all("float32 matrices in tf32" in note for note in verdict.notes(dtype))


def test_served_logits_of_a_float32_head_may_be_off_by_what_tf32_rounds() -> None:
    """Our own head does not round: if vLLM rounds its logits, the two differ, and nothing is wrong."""
    rounded = judge_answers(said(-7.0, -0.5, apart=0.02, float32_products="tf32"), "float32")
    assert rounded.error <= rounded.allowed
    exact = judge_answers(said(-7.0, -0.5, apart=0.02, float32_products="ieee"), "float32")
    assert exact.error > exact.allowed
