"""What is sent to replicas, without Ray: windows, answers, and the pieces that a source is cut into."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.engine.baseline import stored_states
from scoremode.core.engine.batching import prompt_groups
from scoremode.core.references.reader import Reference, open_reference
from scoremode.core.scores.answers import Answers, Window, WindowList
from scoremode.errors import RunError
from scoremode.remote.ray.engine import MOST_TOKENS, Batches
from scoremode.remote.ray.packing import AnswerPacker
from scoremode.remote.ray.replica import SealedPath, subset_of
from tests.s3 import Bucket


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


@pytest.mark.parametrize(
    "columns",
    [("rank",), ("entropy", "top", "top_logprob", "states", "kl", "records"), ("kl", "kl_reverse", "same_first"), ()],
)
def test_answers_travel_unchanged(columns: tuple[str, ...]) -> None:
    rng, waiting, sent = np.random.default_rng(3), AnswerPacker(), {}
    shapes = {"rank": (2,), "states": (1, 4), "records": (1, 7)}
    for window, (rows, width) in enumerate([(3, 1), (0, 2), (5, 4), (1, 1)]):
        made: dict[str, Any] = {"logprob": rng.normal(size=(rows, width))}
        for name in columns:
            shape = (rows, width) if name in ("logprob", "rank") else (rows, *shapes.get(name, (1,))[1:])
            whole = name in ("rank", "top", "same_first")
            made[name] = rng.integers(0, 1 << 30, shape) if whole else rng.normal(size=shape)
        sent[window] = Answers(**made)
        waiting.add(window, sent[window])
    got = dict(waiting.take().answers())
    assert list(got) == list(sent)
    for window, answers in sent.items():
        assert got[window].columns == answers.columns
        assert got[window].divergences == answers.divergences
        for name in ("logprob", *columns):
            np.testing.assert_array_equal(getattr(got[window], name), getattr(answers, name))


def test_without_batches_windows_of_a_prompt_stay_together() -> None:
    source = source_of(7, [5, 1, 5, 0, 1, 1, 9])
    ours = Batches.of(source, None)
    expected = [batch.tolist() for batch in prompt_groups(source)]
    assert [batch.tolist() for batch in ours.each()] == expected
    alone = Batches.of(source_of(5), None)
    assert [batch.tolist() for batch in alone.each()] == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sharers", [0, 1, 3, 100])
def test_pieces_have_each_batch_once_and_leave_out_what_is_done(seed: int, sharers: int) -> None:
    rng = np.random.default_rng(seed)
    source, done = source_of(60), rng.random(60) < 0.1 * seed
    batches = Batches.of(source, np.array_split(rng.permutation(60), 17))
    pieces = list(batches.pieces(done, sharers))
    assert [one.start for one in pieces[1:]] == [one.stop for one in pieces[:-1]]
    unfinished = {batch for batch, windows in enumerate(batches.each()) if not done[windows].all()}
    assert unfinished <= {batch for piece in pieces for batch in piece}
    assert all(unfinished & set(piece) for piece in pieces), "no piece without work"
    assert not list(batches.pieces(np.ones(60, bool), sharers))


def test_pieces_shrink_towards_the_end() -> None:
    none = np.zeros(0, np.int32)
    windows = (Window(np.zeros(1000, np.int32), none, np.zeros((0, 1), np.int32)),) * 20_000
    batches = Batches.of(WindowList(windows), None)
    sizes = [len(piece) * 1000 for piece in batches.pieces(np.zeros(20_000, bool), 2)]
    assert sum(sizes) == 20_000_000
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert MOST_TOKENS <= sizes[0] <= MOST_TOKENS + 1000, "not more than can be sent at once"
    assert sizes[-1] <= 20_000_000 / 2 / 120, "so that no replica is alone for long"


def test_a_reference_behind_a_uri_is_opened_by_each_node(bucket: Bucket, elsewhere: Callable[[], Path]) -> None:
    asked: dict[str, Any] = {"text": "the cat sat on the mat. " * 20, "context_length": 48}
    sm.reference("table:successor", bucket.uri("ref"), **asked)
    sent = SealedPath.of(stored_states(open_reference(bucket.uri("ref")), np.zeros(1, np.int64)))
    node = elsewhere()
    found = sent.open()
    assert isinstance(found, Reference)
    assert found.folder.is_relative_to(node)
    sm.reference("table:uniform", bucket.uri("ref"), **asked, fresh=True)
    with pytest.raises(RunError, match="this node has another reference"):
        sent.open()
