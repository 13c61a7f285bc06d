"""Windows that are fed turn by turn: the same rows and targets, in the same order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from scoremode.core.engine.base import SCORES, Engine, Wanted
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.scores.answers import Answers, Window, WindowList, WindowSource
from scoremode.errors import EngineError
from scoremode.studies.paths.turns import TurnsEngine, cut_into_turns
from scoremode.values import Bools


def window(tokens: int, rows: range) -> Window:
    ids = np.arange(tokens, dtype=np.int32) % 200
    return Window(ids, np.array(rows, np.int32), (np.array(rows, np.int32) % 7)[:, None])


SOURCE = WindowList((window(70, range(69)), window(50, range(40, 50)), window(9, range(8)), window(30, range(0))))


class Remembering(Engine):
    """A table engine that answers in reverse order, and says that every second request of a window was a hit."""

    def __init__(self, hits: bool = True) -> None:
        self.table, self.hits, self.forgotten = open_engine(choose("table:successor"), Work()), hits, 0
        self.facts = self.table.facts
        self.seen: list[Window] = []

    def forget_prompts(self) -> None:
        self.forgotten += 1

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        self.seen = [source.window(index) for index in range(len(source))]
        if self.hits:
            self.rows_after_hits += 30
        yield from reversed(list(self.table.score(source, done, want)))


def test_a_window_is_joined_from_its_turns() -> None:
    inner = Remembering()
    engine = TurnsEngine(inner, 32)
    usual = dict(inner.table.score(SOURCE, np.zeros(4, np.bool_)))
    found = dict(engine.score(SOURCE, np.array([False, False, False, False])))
    assert sorted(found) == [0, 1, 2, 3]
    for index, answers in found.items():
        for name, column in usual[index].arrays():
            assert np.array_equal(getattr(answers, name), column), name
    assert [len(one.ids) for one in inner.seen] == [32, 64, 69, 40, 50, 8, 1]
    assert inner.forgotten == 1
    said = "turns of 32 tokens: 30 of 87 targets were computed after a cached prefix"
    assert engine.account() == {"notes": [said]}
    assert sorted(dict(engine.score(SOURCE, np.array([True, False, True, True])))) == [1]


def test_each_turn_answers_its_own_rows() -> None:
    turns, rows = cut_into_turns(SOURCE, np.arange(4), 32)
    assert turns.prefix_group is not None
    assert turns.prefix_group.tolist() == [0, 0, 0, 1, 1, 2, 3]
    assert turns.lengths.tolist() == [32, 64, 69, 40, 50, 8, 1]
    assert [(its.start, its.stop) for its in rows] == [(0, 32), (32, 64), (64, 69), (0, 0), (0, 10), (0, 8), (0, 0)]


def test_a_run_without_a_hit_is_refused() -> None:
    engine = TurnsEngine(Remembering(hits=False), 32)
    list(engine.score(SOURCE, np.zeros(4, np.bool_)))
    with pytest.raises(EngineError, match="no turn of 32 tokens found the turns before it in the prefix cache"):
        engine.account()
