"""A plan as a value: its windows and targets, and its digest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scoremode.core.plan.build import make_plan, plan_of_pairs
from scoremode.core.plan.path import DecodePath
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.recipes import METHODS, find_method
from tests.core.plan.streams import FACTS, plan_for, tokens_of


@pytest.mark.parametrize("bos", [0, 7])
def test_a_window_asks_the_row_before_each_target(bos: int) -> None:
    tokens = tokens_of(7, facts=replace(FACTS, bos=bos))
    plan = make_plan(find_method("lm-eval-rolling"), tokens, context_length=4, path=DecodePath(1, 3))
    assert plan.notes == ("5 of 7 targets are predicted by prefill, the others by decode",)
    first, second = plan.window(0), plan.window(1)
    assert first.ids.tolist() == [bos, 10, 11, 12]
    assert (first.rows.tolist(), first.targets[:, 0].tolist()) == ([0, 1, 2, 3], [10, 11, 12, 13])
    assert (second.rows.tolist(), second.targets[:, 0].tolist()) == ([1, 2, 3], [14, 15, 16])
    assert (plan.forward_tokens, plan.targets, len(plan), plan.largest_id) == (8, 7, 2, 16)
    assert repr(plan).startswith("Plan(lm-eval-rolling: context_length=4, max_windows=0, path=decode, prefill_tokens=3")
    assert "; 2 windows, 7 targets, 8 forward tokens, " in repr(plan)


def plans() -> list[Plan]:
    one, several = tokens_of(90), tokens_of(40, 1, 25, 33)
    masked = replace(tokens_of(40, 30), target_mask=np.random.default_rng(0).random(70) < 0.4)
    sizes: dict[str, Any] = {name: {"stride": 5} if m.stride else {} for name, m in METHODS.items()}
    return [
        make_plan(find_method(name), tokens, context_length=16, **sizes[name])
        for name in METHODS
        for tokens in (one, several, masked)
        if name != "llamacpp" or tokens is one
    ]


@pytest.mark.parametrize("plan", plans(), ids=repr)
def test_targets_are_those_of_the_windows(plan: Plan) -> None:
    windows = [plan.window(index) for index in range(len(plan))]
    ids = np.concatenate([window.targets[:, 0] for window in windows])
    assert np.array_equal(plan.ids[plan.target_token], ids)
    assert np.array_equal(plan.target_window, np.repeat(np.arange(len(plan)), [len(w.rows) for w in windows]))
    assert (plan.doc_starts[plan.target_document] <= plan.target_token).all()
    assert (plan.target_token < plan.doc_starts[plan.target_document + 1]).all()
    assert plan.covered == len(np.unique(plan.target_token)) == round(plan.coverage * len(plan.ids))
    for window in windows:
        assert 0 <= window.rows.min() <= window.rows.max() < len(window.ids) <= 16


@pytest.mark.parametrize(
    ("window", "reason"),
    [
        ((2, 5, 2, 5, -1), "a target without context"),
        ((2, 5, 1, 5, 7), "a target without context"),
        ((2, 5, 3, 7, -1), "beyond what its window predicts"),
        ((-1, 3, 0, 3, -1), "outside the stream"),
        ((7, 9, 8, 10, -1), "outside the stream"),
    ],
)
def test_a_window_that_cannot_be_scored_is_our_own_bug(window: tuple[int, ...], reason: str) -> None:
    def with_window(start: int, stop: int, first: int, last: int, lead: int) -> Plan:
        numbers = {"start": start, "stop": stop, "first": first, "last": last, "lead": lead}
        columns: dict[str, Any] = {name: np.array([number]) for name, number in numbers.items()}
        return replace(plan_for("gptq", 9, context=9), **columns)

    with pytest.raises(AssertionError, match=reason):
        with_window(*window)
    assert with_window(2, 5, 2, 6, 7).targets == 4
    assert with_window(0, 9, 1, 9, -1).targets == 8


# ── digests ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_digests_are_equal_if_and_only_if_the_plans_are() -> None:
    """Each of these differs from the others in one thing; what only a reader sees is not in the digest."""
    tokens, once = tokens_of(10), find_method("sliding-once")
    other_ids, mask = tokens.ids.copy(), np.arange(10) % 5 == 4
    other_ids[3] += 1
    made = [
        *(make_plan(once, tokens, context_length=c, stride=s) for c, s in ((4, 2), (5, 2), (4, 1))),
        make_plan(once, replace(tokens, ids=other_ids), context_length=4, stride=2),
        make_plan(once, replace(tokens, target_mask=mask), context_length=4, stride=2),
        make_plan(once, replace(tokens, joined_at=np.array([5])), context_length=4, stride=2),
        make_plan(once, replace(tokens, doc_group=np.array([0])), context_length=4, stride=2),
        make_plan(once, tokens, context_length=4, stride=2, max_windows=2),
        *(plan_for(name, 10, context=4) for name in ("gptq", "exl3-2026", "mean-of-texts")),
        plan_for("hf-stride", 10, context=4, stride=2),
    ]
    assert len({plan.digest for plan in made}) == len(set(made)) == len(made)
    again = make_plan(once, tokens_of(10), context_length=4, stride=2, max_windows=99)
    assert (again, hash(again)) == (made[0], hash(made[0]))
    assert replace(again, notes=("another note",)) == again != "another thing"
    assert (made[-3].vocabulary, made[0].vocabulary) == (FACTS.size, None), "padding logits are left out"


def test_a_mask_leaves_only_the_allowed_targets() -> None:
    mask = np.zeros(10, dtype=np.bool_)
    mask[[0, 4, 9]] = True
    plan = plan_for("sliding-once", 10, context=4, stride=2, target_mask=mask)
    assert plan.target_token.tolist() == [4, 9]
    assert [plan.window(w).targets.tolist() for w in range(len(plan))] == [[[14]], [[19]]]


def test_unrelated_texts_begin_at_documents_and_where_texts_were_joined() -> None:
    assert plan_for("gptq", 8, 4, context=4, joined_at=np.array([3, 8])).piece_starts.tolist() == [0, 3, 8]
    assert plan_for("gptq", 8, 4, context=4).piece_starts.tolist() == [0, 8]


def test_pairs_share_a_group_and_need_not_feed_their_last_token() -> None:
    plan = plan_of_pairs([(np.array([1, 2, 3, 4]), 2), (np.array([1, 2, 9]), 2)], np.array([0, 0]))
    windows = [plan.window(0), plan.window(1)]
    assert [window.ids.tolist() for window in windows] == [[1, 2, 3], [1, 2]]
    assert [window.rows.tolist() for window in windows] == [[1, 2], [1]]
    assert [window.targets[:, 0].tolist() for window in windows] == [[3, 4], [9]]
    assert plan.doc_starts.tolist() == [0, 4, 7]
