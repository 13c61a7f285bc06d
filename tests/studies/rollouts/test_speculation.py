"""Speculative decoding: against a simulation of the algorithm itself, longhand sums and closed forms."""

from __future__ import annotations

import bisect
import itertools
import json
from random import Random

import numpy as np
import pytest

from scoremode.errors import RunError
from scoremode.studies.rollouts import speculation as module
from scoremode.studies.rollouts.speculation import acceptances, expected_steps, speculation
from scoremode.studies.rollouts.tables import speculation_blocks
from scoremode.values import Floats
from tests.reports.test_table import drawn

V = 5  # ids of the tables; the last one ends a text
LONGEST = 40


def tables(seed: int) -> tuple[Floats, Floats]:
    """Two models whose next token depends on the one before it; some rows agree and some do not."""
    random = np.random.default_rng(seed)
    p, noise = random.dirichlet(np.full(V, 0.7), V), random.dirichlet(np.full(V, 0.7), V)
    p[:, -1] = 0.04
    p = p / p.sum(axis=1, keepdims=True)
    mixed = np.linspace(0, 0.9, V)[:, None]
    q = (1 - mixed) * p + mixed * noise
    return p, q / q.sum(axis=1, keepdims=True)


def draw(weights: list[float], random: Random) -> int:
    """An id, in proportion to its weight."""
    edges = list(itertools.accumulate(weights))
    return bisect.bisect(edges, random.random() * edges[-1], hi=V - 1)


def speculate(p: Floats, q: Floats, draft: int, random: Random) -> tuple[list[int], int]:
    """Writes one text as the algorithm does: the text, and its steps."""
    p_of, q_of = p.tolist(), q.tolist()
    text, steps = [0], 0
    while len(text) <= LONGEST and text[-1] != V - 1:
        steps += 1
        drafted, last = [], text[-1]
        for _ in range(draft):
            last = draw(q_of[last], random)
            drafted.append(last)
        for token in drafted:
            target, drafter = p_of[text[-1]], q_of[text[-1]]
            if random.random() >= min(1.0, target[token] / drafter[token]):
                text.append(draw([max(0.0, a - b) for a, b in zip(target, drafter, strict=True)], random))
                break
            text.append(token)
            if token == V - 1 or len(text) > LONGEST:
                break
        else:
            text.append(draw(p_of[text[-1]], random))
    return text[1:], steps


@pytest.mark.parametrize("draft", [1, 3])
def test_the_algorithm_needs_as_many_steps_as_expected(draft: int) -> None:
    p, q = tables(1)
    random = Random(draft)
    written = [speculate(p, q, draft, random) for _ in range(3000)]
    tokens, steps = (sum(row) for row in zip(*((len(text), n) for text, n in written), strict=True))

    text = []  # other texts, which the target wrote alone, and both models read
    for _ in range(3000):
        one = [0]
        while len(one) <= LONGEST and one[-1] != V - 1:
            one.append(draw(p[one[-1]].tolist(), random))
        text.append(one[1:])
    found = _read(p, q, text, draft)
    per_step = found.tokens_per_step[draft]
    counted = np.array([[len(t), n] for t, n in written], np.float64)
    spread = np.sqrt(((counted[:, 0] - tokens / steps * counted[:, 1]) ** 2).sum()) / steps
    assert per_step.stderr is not None
    assert abs(per_step.value - tokens / steps) < 3 * np.hypot(per_step.stderr, spread)


def _read(p: Floats, q: Floats, texts: list[list[int]], draft: int) -> module.Speculation:
    before = np.concatenate([[0, *text[:-1]] for text in texts])
    token = np.concatenate(texts)
    number = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    overlap = np.minimum(p, q).sum(axis=1)[before]
    accept = acceptances(np.log(p)[before, token], np.log(q)[before, token])
    return speculation(number, number, overlap, accept, drafts=[draft])


def test_acceptance_given_the_token_has_the_overlap_as_its_mean() -> None:
    p, q = tables(2)
    accept = acceptances(np.log(p).ravel(), np.log(q).ravel()).reshape(V, V)
    assert (p * accept).sum(axis=1) == pytest.approx(np.minimum(p, q).sum(axis=1), rel=1e-12)


def test_expected_steps_are_those_of_all_outcomes() -> None:
    """Every pattern of accepted and rejected tokens of a short text, with its probability."""
    accept, draft = np.array([0.9, 0.2, 0.7, 1.0, 0.4]), 2
    steps = 0.0
    for outcome in itertools.product([False, True], repeat=5):
        chance = float(np.prod([a if yes else 1 - a for a, yes in zip(accept, outcome, strict=True)]))
        t = count = 0
        while t < 5:
            count += 1
            k = 0
            while k < draft and t + k < 5 and outcome[t + k]:
                k += 1
            t += k + 1
        steps += chance * count
    assert expected_steps(accept, np.array([0]), np.array([5]), draft) == pytest.approx([steps])


def test_texts_are_worked_on_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    length = random.integers(1, 30, 50)
    starts = np.concatenate([[0], np.cumsum(length)[:-1]])
    accept = random.random(length.sum())
    whole = expected_steps(accept, starts, length, 4)
    monkeypatch.setattr(module, "CELLS", 64)
    assert np.allclose(whole, expected_steps(accept, starts, length, 4), rtol=1e-12, atol=0)


def test_closed_forms() -> None:
    text = np.repeat(np.arange(6), 1200)
    for rate in (0.0, 0.6, 1.0):
        found = speculation(text, text, np.full(len(text), rate))
        assert list(found.tokens_per_step) == list(range(1, 9))
        for draft, steps in found.tokens_per_step.items():  # but for the end of a text
            assert steps.value == pytest.approx(sum(rate**k for k in range(draft + 1)), rel=5e-3)


def test_greedy_targets_take_the_tokens_up_to_the_first_other_choice() -> None:
    same = np.array([1, 1, 0, 1, 1, 1, 1, 0, 0, 1], np.float64)
    steps = expected_steps(same, np.array([0]), np.array([10]), 3)
    assert steps.tolist() == [5.0]  # 1 1 0 | 1 1 1 1 | 0 | 0 | 1


def test_odd_inputs() -> None:
    nothing = np.zeros(0, np.int64)
    none = speculation(nothing, nothing, np.zeros(0)).statistics()
    assert (none["targets"], none["acceptance"], none["drafts"][0]["tokens_per_step"]) == (0, None, None)
    one = speculation(np.arange(6), np.arange(6), np.full(6, 0.5), drafts=[2])
    assert one.tokens_per_step[2].value == 1  # texts of one token take a step each
    for wrong in (1.1, -0.1, np.nan):
        with pytest.raises(RunError, match="not a probability"):
            speculation(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([wrong]))
    with pytest.raises(RunError, match="probability zero"):
        acceptances(np.array([-np.inf]), np.array([-1.0]))
    assert acceptances(np.array([-1.0]), np.array([-np.inf])).tolist() == [0.0]


def test_it_is_shown_and_fit_for_json() -> None:
    text = np.repeat(np.arange(6), 100)
    found = speculation(text, text, np.random.default_rng(5).random(600)).statistics()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    shown = drawn(speculation_blocks("small-model", found))
    assert "small-model as a draft model" in shown
    assert "8 drafted" in shown
    assert "64 to 99" in shown
