"""Plans without a model: published counts, drawings checked by hand, and properties over random texts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremode.core.plan.build import make_plan, plan_of_pairs
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.recipes import METHODS, Span, find_method
from scoremode.core.text.tokenizer import TokenizerFacts
from scoremode.core.text.tokens import Tokens
from scoremode.errors import CorpusError, MethodError, ModelError

FACTS = TokenizerFacts(fingerprint="f", size=1000, bos=7, eos=8, adds_bos=True)


def tokens_of(*lengths: int, facts: TokenizerFacts = FACTS) -> Tokens:
    n = sum(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ones = np.ones(n, np.int32)
    counts = np.array(lengths, dtype=np.int64)
    ends = np.arange(1, n + 1, dtype=np.int64)
    ids = (np.arange(n) % 900 + 10).astype(np.int32)
    return Tokens(ids, starts, ends, ones, ones, counts, counts, facts)


def plan_for(name: str, *lengths: int, context: int, stride: int | None = None, **more: Any) -> Plan:
    return make_plan(find_method(name), tokens_of(*lengths), context_length=context, stride=stride, **more)


def drawn(plan: Plan) -> list[tuple[list[int], list[int]]]:
    """Each window as (stream indices fed, stream indices scored); -1 is a lead."""
    found = []
    for w in range(len(plan)):
        lead = [-1] if plan.lead[w] >= 0 else []
        fed = lead + list(range(int(plan.start[w]), int(plan.stop[w])))
        found.append((fed, list(range(int(plan.first[w]), int(plan.last[w])))))
    return found


def test_the_counts_that_the_field_knows() -> None:
    once = plan_for("sliding-once", 39_217, context=2048, stride=512)
    assert (len(once), once.targets) == (74, 39_216)
    assert once.lengths[-1] < 2048
    again = plan_for("exl3-2025", 39_217, context=2048, stride=512)
    assert (len(again), again.targets, again.forward_tokens) == (73, 149_431, 73 * 2048)


def test_exl3_2025_stops_at_a_hundred_windows_by_default() -> None:
    plan = plan_for("exl3-2025", 80_000, context=2048, stride=512)
    assert len(plan) == 100
    assert int(plan.stop.max()) == 52_736
    assert "100 of 153 windows scored" in plan.notes
    assert len(plan_for("exl3-2025", 80_000, context=2048, stride=512, max_windows=0)) == 153
    assert len(plan_for("exl3-2025", 80_000, context=2048, stride=512, max_windows=20)) == 20


DRAWINGS: dict[str, tuple[tuple[int, ...], int, int | None, list[tuple[list[int], list[int]]]]] = {
    "sliding-once": ((7,), 4, 2, [([0, 1, 2, 3], [1, 2, 3]), ([2, 3, 4, 5], [4, 5]), ([4, 5, 6], [6])]),
    "exl3-2025": ((7,), 4, 2, [([0, 1, 2, 3], [1, 2, 3]), ([2, 3, 4, 5], [3, 4, 5])]),
    "exl3-2026": ((9,), 4, None, [([0, 1, 2, 3], [1, 2, 3]), ([4, 5, 6, 7], [5, 6, 7])]),
    "gptq": ((9,), 4, None, [([0, 1, 2, 3], [1, 2, 3]), ([4, 5, 6, 7], [5, 6, 7])]),
    "llamacpp": ((9,), 4, None, [([-1, 1, 2, 3], [3]), ([-1, 5, 6, 7], [7])]),
    "hf-stride": ((7,), 4, 2, [([0, 1, 2, 3], [1, 2, 3]), ([2, 3, 4, 5], [4, 5]), ([4, 5, 6], [6])]),
    "lm-eval-rolling": ((7,), 4, None, [([-1, 0, 1, 2], [0, 1, 2, 3]), ([2, 3, 4, 5], [4, 5, 6])]),
    "mean-of-texts": ((3, 2), 4, None, [([-1, 0, 1, 2], [0, 1, 2]), ([-1, 3, 4], [3, 4])]),
}


@pytest.mark.parametrize("name", METHODS)
def test_windows_are_as_drawn_in_the_docstring(name: str) -> None:
    lengths, context, stride, expected = DRAWINGS[name]
    assert drawn(plan_for(name, *lengths, context=context, stride=stride)) == expected


def test_a_window_asks_the_row_before_each_target_and_llamacpp_puts_a_bos_in_front_if_the_tokenizer_does() -> None:
    plan = plan_for("lm-eval-rolling", 7, context=4)
    first, second = plan.window(0), plan.window(1)
    assert first.ids.tolist() == [FACTS.bos, 10, 11, 12]
    assert (first.rows.tolist(), first.targets[:, 0].tolist()) == ([0, 1, 2, 3], [10, 11, 12, 13])
    assert (second.rows.tolist(), second.targets[:, 0].tolist()) == ([1, 2, 3], [14, 15, 16])
    plan = plan_for("llamacpp", 1024, context=512)
    assert (plan.target_counts.tolist(), plan.window(0).ids[0]) == ([255, 255], FACTS.bos)
    assert plan.window(0).rows[[0, -1]].tolist() == [256, 510]
    none = tokens_of(9, facts=replace(FACTS, adds_bos=False))
    assert drawn(make_plan(find_method("llamacpp"), none, context_length=4)) == [
        ([0, 1, 2, 3], [3]),
        ([4, 5, 6, 7], [7]),
    ]


lengths_of_documents = st.lists(st.integers(0, 60), min_size=1, max_size=5)
contexts = st.integers(2, 24)


def any_plan(name: str, lengths: list[int], context: int, stride: int | None) -> Plan | None:
    try:
        return plan_for(name, *lengths, context=context, stride=stride, max_windows=0)
    except (CorpusError, MethodError):  # too short for full windows, or a context that has no second half
        return None


@pytest.mark.parametrize("name", METHODS)
@given(lengths=lengths_of_documents, context=contexts, step=st.floats(0, 1))
@settings(max_examples=60)
def test_every_target_has_context_and_nothing_is_out_of_range(
    name: str, lengths: list[int], context: int, step: float
) -> None:
    stride = max(1, round(step * context)) if METHODS[name].stride else None
    plan = any_plan(name, lengths, context, stride)
    if plan is None:
        return
    n = sum(lengths)
    assert plan.targets > 0
    for w in range(len(plan)):
        window = plan.window(w)
        assert 1 <= len(window.ids) <= context
        assert window.rows.min() >= 0
        assert window.rows.max() < len(window.ids)
        positions = plan.target_token[plan.target_offsets[w] : plan.target_offsets[w + 1]]
        assert positions.min() >= 0
        assert positions.max() < n
        assert window.targets[:, 0].tolist() == plan.ids[positions].tolist()
        inside = np.searchsorted(plan.doc_starts, [plan.start[w], plan.last[w] - 1], side="right")
        assert inside[0] == inside[1], "a window crosses from one document into the next"


@pytest.mark.parametrize("name", ["sliding-once", "lm-eval-rolling"])
@given(lengths=lengths_of_documents, context=contexts, step=st.floats(0, 1))
@settings(max_examples=100)
def test_each_token_is_scored_exactly_once(name: str, lengths: list[int], context: int, step: float) -> None:
    stride = max(1, round(step * context)) if METHODS[name].stride else None
    plan = any_plan(name, lengths, context, stride)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    expected = [
        i
        for a, b in pairwise(starts)
        for i in range(a + (name == "sliding-once"), b)  # after a prefix token even the first token has context
    ]
    assert sorted(plan.target_token.tolist() if plan else []) == expected


@given(
    lengths=st.tuples(st.integers(8, 40), st.integers(8, 40)),
    contexts=st.tuples(st.integers(2, 8), st.integers(2, 8)),
    strides=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
@settings(max_examples=100)
def test_digests_are_equal_if_and_only_if_the_plans_are(
    lengths: tuple[int, int], contexts: tuple[int, int], strides: tuple[int, int]
) -> None:
    a, b = (
        plan_for("sliding-once", n, context=c, stride=s) for n, c, s in zip(lengths, contexts, strides, strict=True)
    )
    same = (lengths[0], contexts[0], strides[0]) == (lengths[1], contexts[1], strides[1])
    assert (a.digest == b.digest) == same
    assert (a == b) == same
    assert not same or hash(a) == hash(b)


def test_a_mask_leaves_only_the_allowed_targets_and_makes_another_digest() -> None:
    mask, other = np.zeros(10, dtype=np.bool_), tokens_of(10).ids.copy()
    mask[[0, 4, 9]] = True
    other[3] += 1
    given = [tokens_of(10), replace(tokens_of(10), target_mask=mask), replace(tokens_of(10), ids=other)]
    plans = [make_plan(find_method("sliding-once"), tokens, context_length=4, stride=2) for tokens in given]
    assert plans[1].target_token.tolist() == [4, 9]
    assert [plans[1].window(w).targets.tolist() for w in range(len(plans[1]))] == [[[14]], [[19]]]
    made = [*plans, plan_for("gptq", 10, context=4), plan_for("exl3-2026", 10, context=4)]
    assert len({plan.digest for plan in made}) == 5
    assert replace(plans[0], notes=("another note",)).digest == plans[0].digest
    assert (made[-1].vocabulary, made[-2].vocabulary) == (FACTS.size, None), "padding logits are left out"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("sliding-once", {"context_length": 8, "stride": 0}, "--stride 0"),
        ("sliding-once", {"context_length": 8, "stride": 9}, "larger than the context"),
        ("sliding-once", {"context_length": 1}, "no room"),
        ("gptq", {"context_length": 8, "stride": 4}, "no stride"),
        ("gptq", {"context_length": 99, "model_context": 64}, "longer than the model's 64"),
        ("gptq", {"model_context": 64}, "longer than the model's 64"),
        ("hf-stride", {}, "does not say"),
        ("gptq", {"context_length": 8, "max_windows": -1}, "negative"),
    ],
)
def test_settings_that_a_method_refuses(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=message) as caught:
        make_plan(find_method(name), tokens_of(40), **arguments)
    assert caught.value.fix


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("context", [None, 1, 8])
def test_a_model_with_a_context_of_one_is_refused(name: str, context: int | None) -> None:
    with pytest.raises(ModelError, match="context of 1 token leaves no room for a target"):
        make_plan(find_method(name), tokens_of(40), context_length=context, model_context=1)


def test_windows_without_a_target_are_refused() -> None:
    """Not by an assertion: ``python -O`` would save a run with no score."""
    none = replace(find_method("gptq"), windows=lambda tokens, sizes: iter([Span(0, 4, 4, 4), Span(4, 8, 8, 8)]))
    with pytest.raises(MethodError, match="no target in windows of 4 tokens"):
        make_plan(none, tokens_of(40), context_length=4)


@pytest.mark.parametrize(
    ("name", "tokens", "words"),
    [("sliding-once", 1, "at least two tokens"), ("gptq", 3, "sliding-once"), ("llamacpp", 7, "two contexts")],
)
def test_a_text_too_short_for_a_method_says_what_would_do(name: str, tokens: int, words: str) -> None:
    with pytest.raises(CorpusError, match=words):
        plan_for(name, tokens, context=4)


def test_pairs_share_a_group_and_need_not_feed_their_last_token() -> None:
    a = np.array([1, 2, 3, 4], dtype=np.int32)
    b = np.array([1, 2, 9], dtype=np.int32)
    plan = plan_of_pairs([(a, 2), (b, 2)], np.array([0, 0]))
    assert plan.window(0).ids.tolist() == [1, 2, 3]
    assert plan.window(0).targets[:, 0].tolist() == [3, 4]
    assert plan.window(1).ids.tolist() == [1, 2]
    assert plan.window(1).rows.tolist() == [1]
