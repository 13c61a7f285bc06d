"""One model in one of several settings: how its windows are fed, what it promises, and how far it lies from itself.

Windows may be fed as a conversation is fed: turn by turn, each request beginning in the prefix cache.

window   ├──────── 700 tokens ────────┤        turns of 256 tokens
turn 0   ├────────┤                            nothing is cached yet
turn 1   ├ cached ┼────────┤                   its rows attend to keys and values of the cache
turn 2   ├ cached ┼ cached ┼──────┤

The rows of a window are those of its turns. Tokens before the first requested row are a turn of their own, whose answer
is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from scoremode.core.engine.base import SCORES, Engine, Want
from scoremode.core.engine.baseline import StoredBaseline, few_windows
from scoremode.core.plan.plan import Plan
from scoremode.core.scores.answers import Answers, Window, WindowList, WindowSource
from scoremode.core.verbs.model import LazyModel
from scoremode.core.verbs.question import Question
from scoremode.core.verbs.scoring import answered
from scoremode.errors import EngineError
from scoremode.values import Bools, Floats, Ints, change

SHARE = 4  # one window in so many is computed again at most, but two at least


@dataclass(frozen=True, slots=True)
class Varied:
    """A model with the settings that its engine gets, and the question to it."""

    model: LazyModel
    asked: Question
    turn_tokens: int | None = None  # if windows are fed turn by turn, each from the prefix cache

    def fed(self, engine: Engine) -> Engine:
        """The open engine of the model, as it is fed."""
        return engine if self.turn_tokens is None else TurnsEngine(engine, self.turn_tokens)

    def kept_promise(self, d: Floats, what: str) -> str:
        """Says whether a promise of equal bits was kept, given differences ``d`` (targets,); '' if none was made."""
        promise = self.model.plugin.able().same_bits
        if not promise:
            return ""
        moved = int(np.count_nonzero(d))
        if not moved:
            return f"{promise} kept its promise: {what} has the same bits on all {len(d):,} targets"
        return (
            f"finding: {promise} promises the same bits in every batch, but {what} moved {moved:,} of {len(d):,} "
            f"targets, by up to {float(np.abs(d).max()):.2g} nats"
        )


def rerun(engine: Engine, plan: Plan, logprob: Floats) -> dict[str, Any]:
    """Computes a few windows of a plan again and returns a manifest's facts on how far their scores moved.

    ``logprob`` (targets,) are the scores of the whole plan. On the decode path, half as many windows as usual are side
    by side; on other paths each window is alone. A window that is always alone is computed in the same way again.
    """
    chosen = few_windows(plan)[: max(2, len(plan) // SHARE)]
    usual = min(plan.path.sequences, len(plan)) if plan.path else 1
    together = max(1, usual // 2)
    moved: list[Floats] = []
    for begin in range(0, len(chosen), together):
        some = chosen[begin : begin + together].tolist()
        windows = WindowList(tuple(plan.window(index) for index in some), vocabulary=plan.vocabulary)
        for place, answers in answered(engine, windows):
            first = int(plan.target_offsets[some[place]])
            before = logprob[first : first + len(answers.logprob)]
            moved.append(change(answers.logprob[:, 0], before))
    engine.account()  # belongs to this pass, which is not part of the run
    d = np.concatenate(moved)
    size = f"{len(chosen)} window{'s' if len(chosen) > 1 else ''}"
    company = f", {together} side by side instead of {usual}" if usual > 1 else ", one at a time"
    finite = bool(np.isfinite(d).all())
    return {
        "rms": float(np.sqrt(np.square(d).mean())) if finite else None,
        "largest": float(np.abs(d).max(initial=0.0)) if finite else None,
        "targets": len(d),
        "words": f"{size}{company}",
    }


NOT_RERUN = {"rms": None, "largest": None, "targets": 0, "words": "not measured with replicas"}


# ── turn by turn ─────────────────────────────────────────────────────────────────────────────────────────────────────
SMALLEST_BLOCK = 16  # tokens: fewer are not worth a turn, because no cache keeps them


@dataclass(frozen=True, slots=True)
class Turn:
    """The first ``end`` tokens of a window, and the rows that are requested with them."""

    window: int
    end: int
    rows: slice  # among the rows of the window; empty if the turn only fills the cache


@dataclass(frozen=True)
class TurnWindows:
    """The turns of some windows, as windows of their own."""

    source: WindowSource
    turns: list[Turn]

    @staticmethod
    def of(source: WindowSource, windows: Ints, tokens: int) -> TurnWindows:
        """Cuts windows into turns of ``tokens`` tokens."""
        found = []
        for index in windows.tolist():
            rows = source.window(index).rows
            if not len(rows):
                found.append(Turn(index, 1, slice(0, 0)))
                continue
            first, last = int(rows[0]) if rows[0] >= SMALLEST_BLOCK else 0, int(rows[-1]) + 1
            ends = [*([first] if first else []), *range(first + tokens, last, tokens), last]
            reached = [0, *np.searchsorted(rows, ends).tolist()]
            for begin, end, stop in zip(reached, reached[1:], ends, strict=False):
                if begin < end or stop == first:
                    found.append(Turn(index, stop, slice(begin, end)))
        return TurnWindows(source, found)

    def __len__(self) -> int:
        return len(self.turns)

    @cached_property
    def lengths(self) -> Ints:
        return np.array([turn.end for turn in self.turns], dtype=np.int64)

    @cached_property
    def prefix_group(self) -> Ints:
        return np.array([turn.window for turn in self.turns], dtype=np.int64)

    @property
    def vocabulary(self) -> int | None:
        return self.source.vocabulary

    def window(self, index: int) -> Window:
        turn = self.turns[index]
        whole = self.source.window(turn.window)
        if turn.rows.start == turn.rows.stop:  # a request needs a row; its answer is dropped
            last = np.array([turn.end - 1], np.int32)
            return Window(whole.ids[: turn.end], last, np.zeros((1, whole.targets.shape[1]), np.int32))
        return Window(whole.ids[: turn.end], whole.rows[turn.rows], whole.targets[turn.rows])

    def rows_in(self, offsets: Ints) -> Ints:
        """Where the rows of each turn begin in a reference, in which windows begin at ``offsets``; and its end."""
        begin = [int(offsets[turn.window]) + min(turn.rows.start, turn.rows.stop) for turn in self.turns]
        return np.array([*begin, int(offsets[-1])], dtype=np.int64)


class TurnsEngine(Engine):
    """Scores windows with another engine, turn by turn. That engine must have a prefix cache."""

    def __init__(self, engine: Engine, tokens: int) -> None:
        self.engine, self.tokens = engine, tokens
        self.facts = replace(engine.facts, settings={**engine.facts.settings, "turn_tokens": tokens})
        self.longest = engine.longest
        self._rows = self._after_hits = 0

    def score(self, source: WindowSource, done: Bools, want: Want = SCORES) -> Iterator[tuple[int, Answers]]:
        turns = TurnWindows.of(source, np.flatnonzero(~done), self.tokens)
        if want.against is not None:
            assert isinstance(want.against, StoredBaseline), "a baseline whose rows can be found by turn"
            offsets = turns.rows_in(want.against.offsets)
            want = replace(want, against=StoredBaseline(want.against.stored, offsets=offsets))
        waiting = dict(zip(*np.unique(turns.prefix_group, return_counts=True), strict=True))
        parts: dict[int, dict[int, Answers]] = {}
        self.engine.forget_prompts()
        before = self.engine.rows_after_hits
        for number, answers in self.engine.score(turns, np.zeros(len(turns), np.bool_), want):
            turn = turns.turns[number]
            own = parts.setdefault(turn.window, {})
            is_wanted = turn.rows.start < turn.rows.stop
            own[number] = answers if is_wanted else Answers(**{name: rows[:0] for name, rows in answers.arrays()})
            if len(own) == waiting[turn.window]:
                self._rows += sum(len(part.logprob) for part in own.values())
                yield turn.window, _joined([own[key] for key in sorted(parts.pop(turn.window))])
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
