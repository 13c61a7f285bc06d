"""Windows that are fed as a conversation is fed: turn by turn, each request beginning in the prefix cache.

window   ├──────── 700 tokens ────────┤        turns of 256 tokens
turn 0   ├────────┤                            nothing is cached yet
turn 1   ├ cached ┼────────┤                   its rows attend to keys and values of the cache
turn 2   ├ cached ┼ cached ┼──────┤

The rows of a window are those of its turns. Tokens before the first requested row are a turn of their own, whose answer
is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from scoremode.core.engine.base import SCORES, Engine, Wanted
from scoremode.core.engine.baseline import StoredBaseline
from scoremode.core.scores.answers import Answers, Window, WindowList, WindowSource
from scoremode.errors import EngineError
from scoremode.values import Bools, Ints

SMALLEST_BLOCK = 16  # tokens: fewer are not worth a turn, because no cache keeps them


def cut_into_turns(source: WindowSource, windows: Ints, tokens: int) -> tuple[WindowList, list[slice]]:
    """Cuts windows into turns of ``tokens`` tokens, grouped by window. With each come the rows that it answers.

    They are numbered as in the window, and empty if a turn only fills the cache.
    """
    turns, owners, answered = list[Window](), list[int](), list[slice]()
    for index in windows.tolist():
        whole = source.window(index)
        rows = whole.rows
        first = int(rows[0]) if len(rows) and rows[0] >= SMALLEST_BLOCK else 0
        last = int(rows[-1]) + 1 if len(rows) else 1
        ends = [*([first] if first else []), *range(first + tokens, last, tokens), last]
        reached = [0, *np.searchsorted(rows, ends).tolist()]
        for begin, end, stop in zip(reached, reached[1:], ends, strict=False):
            if begin < end:
                turns.append(Window(whole.ids[:stop], rows[begin:end], whole.targets[begin:end]))
            elif stop == first or not len(rows):  # a request needs a row; its answer is dropped
                nothing = np.zeros((1, whole.targets.shape[1]), np.int32)
                turns.append(Window(whole.ids[:stop], np.array([stop - 1], np.int32), nothing))
            else:
                continue
            owners.append(index)
            answered.append(slice(begin, end))
    return WindowList(tuple(turns), np.array(owners, np.int64), source.vocabulary), answered


class TurnsEngine(Engine):
    """Scores windows with another engine, turn by turn. That engine must have a prefix cache."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self.engine, self.tokens = engine, tokens
        self.facts = replace(engine.facts, settings={**engine.facts.settings, "turn_tokens": tokens})
        self.longest = engine.longest
        self._rows = self._after_hits = 0

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        turns, rows = cut_into_turns(source, np.flatnonzero(~done), self.tokens)
        assert turns.prefix_group is not None, "turns are grouped by window"
        owners = turns.prefix_group.tolist()
        if want.against is not None:
            assert isinstance(want.against, StoredBaseline), "a baseline whose rows can be found by turn"
            usual = want.against.offsets
            begin = [int(usual[owner]) + its.start for owner, its in zip(owners, rows, strict=True)]
            offsets = np.array([*begin, int(usual[-1])], np.int64)
            want = replace(want, against=StoredBaseline(want.against.stored, offsets=offsets))
        parts, turns_of = dict[int, dict[int, Answers]](), Counter(owners)
        self.engine.forget_prompts()
        before = self.engine.rows_after_hits
        for number, answers in self.engine.score(turns, np.zeros(len(turns), np.bool_), want):
            owner, count = owners[number], rows[number].stop - rows[number].start
            own = parts.setdefault(owner, {})
            own[number] = Answers(**{name: column[:count] for name, column in answers.arrays()})
            self._rows += count
            if len(own) == turns_of[owner]:
                yield owner, _joined([own[key] for key in sorted(parts.pop(owner))])
        self._after_hits += self.engine.rows_after_hits - before

    def account(self) -> dict[str, Any]:
        """Says how many targets followed a cached prefix; EngineError if none did: then nothing was measured."""
        rows, hits, self._rows, self._after_hits = self._rows, self._after_hits, 0, 0
        if rows and not hits:
            raise EngineError(
                f"no turn of {self.tokens} tokens found the turns before it in the prefix cache",
                fix="give a larger --chunk-tokens and --context-length: only whole blocks of tokens are cached",
            )
        account = self.engine.account()
        said = f"turns of {self.tokens} tokens: {hits:,} of {rows:,} targets were computed after a cached prefix"
        return {**account, "notes": [*account.get("notes", ()), said]}


def _joined(parts: list[Answers]) -> Answers:
    """The rows of several answers, one after the other."""
    arrays = [dict(part.arrays()) for part in parts]
    return Answers(**{name: np.concatenate([own[name] for own in arrays]) for name in arrays[0]})
