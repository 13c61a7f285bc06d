"""Who gets which batches, without Ray: nothing is lost, nothing counts twice, whatever happens in between."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from scoremode.cluster.ledger import ASSIGNED_SECONDS, MOST_DEATHS, Batches, Ledger, Pace
from scoremode.cluster.replica import subset_of
from scoremode.engines.batching import prompt_groups
from scoremode.scores.answers import Answers, Window, WindowList
from scoremode.scores.packing import AnswerPacker


def source_of(count: int, groups: list[int] | None = None) -> WindowList:
    rng = np.random.default_rng(count)
    windows = []
    for _ in range(count):
        length, width = int(rng.integers(1, 9)), int(rng.integers(1, 4))
        rows = np.sort(rng.choice(length, int(rng.integers(0, length + 1)), replace=False)).astype(np.int32)
        targets = rng.integers(0, 50, (len(rows), width)).astype(np.int32)
        windows.append(Window(rng.integers(0, 50, length).astype(np.int32), rows, targets))
    return WindowList(tuple(windows), None if groups is None else np.array(groups), 50)


def test_windows_travel_unchanged_with_their_batches() -> None:
    source = source_of(9, [0, 1, 0, 2, 1, 1, 3, 3, 0])
    batches = prompt_groups(source)
    subset = subset_of(source, batches[::-1])
    assert subset.indices.tolist() == np.concatenate(batches[::-1]).tolist()
    assert subset.prefix_group is not None
    for place, index in enumerate(subset.indices.tolist()):
        for name in ("ids", "rows", "targets"):
            np.testing.assert_array_equal(getattr(subset.window(place), name), getattr(source.window(index), name))
        assert source.prefix_group is not None
        assert subset.prefix_group[place] == source.prefix_group[index]
    assert subset.batches is not None
    assert [subset.indices[batch].tolist() for batch in subset.batches] == [batch.tolist() for batch in batches[::-1]]


@pytest.mark.parametrize("columns", [("rank",), ("entropy", "top", "top_logprob", "states", "kl", "records"), ()])
def test_answers_travel_unchanged(columns: tuple[str, ...]) -> None:
    rng, waiting, sent = np.random.default_rng(3), AnswerPacker(), {}
    shapes = {"rank": (2,), "states": (1, 4), "records": (1, 7)}
    for window, (rows, width) in enumerate([(3, 1), (0, 2), (5, 4), (1, 1)]):
        made: dict[str, Any] = {"logprob": rng.normal(size=(rows, width))}
        for name in columns:
            shape = (rows, width) if name in ("logprob", "rank") else (rows, *shapes.get(name, (1,))[1:])
            whole = name in ("rank", "top")
            made[name] = rng.integers(0, 1 << 30, shape) if whole else rng.normal(size=shape)
        sent[window] = Answers(**made)
        waiting.add(window, sent[window])
    got = dict(waiting.take().answers())
    assert list(got) == list(sent)
    for window, answers in sent.items():
        assert got[window].columns == answers.columns
        for name in ("logprob", *columns):
            np.testing.assert_array_equal(getattr(got[window], name), getattr(answers, name))


def test_without_batches_windows_of_a_prompt_stay_together() -> None:
    source = source_of(7, [5, 1, 5, 0, 1, 1, 9])
    ours = Batches.of(source, None)
    expected = [batch.tolist() for batch in prompt_groups(source)]
    assert [ours.windows(batch).tolist() for batch in range(len(ours))] == expected
    alone = Batches.of(source_of(5), None)
    assert [alone.windows(batch).tolist() for batch in range(len(alone))] == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_comes_back_and_nothing_counts_twice(seed: int) -> None:
    """Replicas that finish, die in the middle of a lease, or answer what somebody else has answered."""
    rng = random.Random(seed)
    source = source_of(60)
    done = np.array([rng.random() < 0.3 for _ in range(60)])
    batches = Batches.of(
        source, [np.array(part) for part in np.array_split(np.random.default_rng(seed).permutation(60), 17)]
    )
    ledger, accepted, leased = Ledger(batches, done), [], []
    paces = [Pace(), Pace(), Pace()]
    while not ledger.finished:
        taken = ledger.take(rng.choice(paces), 3)
        if taken:
            leased.append(taken)
        assert leased, "nothing waits, nobody works, and something is missing"
        lease = leased.pop(rng.randrange(len(leased)))
        windows = [int(w) for b in lease for w in batches.windows(b) if not done[w]]
        answered = windows if rng.random() < 0.6 else windows[: rng.randrange(len(windows) + 1)]
        accepted += [w for w in answered if ledger.received(w)]
        if rng.random() < 0.2:
            leased.append(ledger.unfinished(lease))  # a copy
            leased = [one for one in leased if one]
        ledger.give_back(lease)
        rng.choice(paces).measured(ledger.tokens(lease), 0.01)
    assert sorted(accepted) == np.flatnonzero(~done).tolist()


def test_an_assignment_is_some_seconds_of_work_and_shrinks_towards_the_end() -> None:
    windows = tuple(
        Window(np.zeros(100, np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int32)) for _ in range(3000)
    )
    ledger = Ledger(Batches.of(WindowList(windows), None), np.zeros(3000, bool))
    pace = Pace(rate=1000.0, last=10**6)
    sizes = []
    while taken := ledger.take(pace, 2):
        sizes.append(ledger.tokens(taken))
        pace.last = 10**6
    assert sizes[0] == 1000 * ASSIGNED_SECONDS
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 500
    assert sum(sizes) == 300_000


def test_a_batch_that_kills_is_assigned_alone_and_named() -> None:
    ledger = Ledger(Batches.of(source_of(6), None), np.zeros(6, bool))
    named = None
    for _ in range(10):
        lease = ledger.take(Pace(rate=1e9, last=10**9), 1)
        while lease and 3 not in lease:  # others are answered
            for batch in lease:
                ledger.received(batch)
            lease = ledger.take(Pace(rate=1e9, last=10**9), 1)
        left = ledger.give_back(lease)
        named = ledger.died(left)
        if named is not None:
            break
    assert named == 3
    assert ledger.deaths[3] == MOST_DEATHS
