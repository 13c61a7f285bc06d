"""Checks a run's own windows while a server scores them, for it may treat long prompts otherwise than short ones.

Of windows drawn by chance, the server scores again, in other requests:

the first tokens     the same scores alone                                          16 tokens
the whole window     the same scores with another last token                        a long window; then rarely
a part of it         other scores without the tokens before it, and worse ones      24 tokens, or half of the window

The server cannot predict which windows: the draws differ in each process, and they change no score.
"""

from __future__ import annotations

import random
import threading

import numpy as np

from scoremode.engines.server.invariants import (
    ANOTHER_SERVER,
    Ask,
    Moves,
    end_alone,
    limit,
    require_mass,
    require_same,
)
from scoremode.errors import UntrustedError
from scoremode.values import Floats, Ids

FIRST, PART, SHORTEST = 16, 24, 8  # tokens
BIAS = 0.01  # nats, mean of d over all that was asked again: 1 % of perplexity
PROVEN, LIKELY = 0.99, 0.95  # 1 / the largest factor by which all scores may be too low: of a run, and of two probes
UNKNOWN = 0.1  # a factor that says nothing: where it was asked, one token had all of the probability
SHARED = 3  # different tokens with the lowest score
NOISE, LEAST = 1.5, 1e-4  # × the noise, and nats: by more than both, scores depend on what was left out


class AuditBudget:
    """Tokens that checks of one kind may send: the first of them always, then by chance a share of those scored."""

    def __init__(self, free: int, share: float) -> None:
        self._free, self._share = free, share
        self._sent = self._spent = 0
        self._draw = random.SystemRandom()

    def take(self, cost: int, length: int) -> bool:
        """May so many tokens be sent, now that a window of ``length`` was scored?"""
        self._sent += length
        if self._spent and self._spent + cost > self._free:
            is_drawn = self._draw.random() * cost < self._share * length
            if not is_drawn or self._spent + cost > self._free + self._share * self._sent:
                return False
        self._spent += cost
        return True


class Audit:
    """May be used from several threads."""

    def __init__(self, bos: int | None, exponent: float = 1e-9) -> None:
        self._bos, self._lock, self._draw = bos, threading.Lock(), random.SystemRandom()
        self._first, self._part = AuditBudget(1024, 0.008), AuditBudget(512, 0.004)
        self._half, self._whole = AuditBudget(0, 0.004), AuditBudget(0, 0.004)
        self.alone, self.again, self.gain, self.reach = Moves(), Moves(), Moves(), Moves()
        self.longest = 0  # of the run's windows: whole ones and halves are drawn from those almost as long
        self.exponent, self.lists, self._reached = exponent, False, 0
        self.lowest, self.tokens = np.inf, frozenset[int]()  # the lowest score, and the tokens that have it
        self._counted = set[tuple[int, bytes]]()  # prompts that were asked again: each counts once

    def window(self, ask: Ask, ids: Ids, scores: Floats) -> None:
        """Checks the scores of tokens 1, 2, … of a window; NaN: not scored. Raises UntrustedError."""
        positions = np.flatnonzero(~np.isnan(scores))
        if not len(positions):
            return
        n, first = len(ids), int(positions[min(FIRST - 1, len(positions)) - 1]) + 2
        part, half = min(PART, n // 2), n // 2
        with self._lock:
            lowest = float(np.min(scores, initial=self.lowest, where=np.isfinite(scores)))
            same = self.tokens if lowest == self.lowest else frozenset()
            self.lowest, self.tokens = lowest, same | frozenset(ids[1:][scores == lowest].tolist())
            costs = {self._first: first, self._part: part + 1, self._whole: n, self._half: half + 1}
            is_long = 4 * n >= 3 * self.longest
            takes = [(is_long or i < 2) and budget.take(cost, n) for i, (budget, cost) in enumerate(costs.items())]
        if takes[0]:
            self._score_first(ask, ids[:first], scores[: first - 1])
        if takes[2]:
            other = ids[np.argmax(ids != ids[-1])]
            again = ask([*ids[:-1].tolist(), int(other)]).logprob
            self._add(self.again, require_same(ask, scores[:-1], again[:-1]), ids)
        if takes[1] and part >= SHORTEST:
            self._add(self.gain, self._score_part(ask, ids, scores, part), ids)
        if takes[3] and half >= SHORTEST:
            moved = self._score_part(ask, ids, scores, half)
            if half > self._reached:  # parts of shorter windows say less
                self._reached, self.reach = half, Moves()
            if half == self._reached:
                self._add(self.reach, moved, ids)
        self.judge(ask, least=8 * FIRST)

    def _score_first(self, ask: Ask, ids: Ids, scores: Floats) -> None:
        answer = ask(ids.tolist(), likely=True)
        exponent = require_mass(ask, answer.likely or [])
        self._add(self.alone, require_same(ask, scores, answer.logprob), ids)
        with self._lock:
            self.exponent, self.lists = max(self.exponent, exponent), self.lists or bool(answer.likely)

    def _score_part(self, ask: Ask, ids: Ids, scores: Floats, length: int) -> Floats:
        start = self._draw.randrange(max(2, len(ids) // 4), len(ids) - length + 1)
        front = [self._bos] if self._bos is not None and self._bos == ids[0] else []
        return end_alone(ask, ids, scores, slice(start, start + length), front)

    def _add(self, moves: Moves, moved: Floats, ids: Ids) -> None:
        with self._lock:
            if (key := (id(moves), ids.tobytes())) not in self._counted:
                self._counted.add(key)
                moves.add(moved)

    def judge(self, ask: Ask, least: int = FIRST // 2) -> None:
        """Requires of all windows together that they score the same again, if so many tokens were scored again."""
        for moves, where in ((self.alone, "the first tokens alone"), (self.again, "whole windows")):
            if moves.count >= least and (moves.size > limit(moves.count) or moves.surely(BIAS)):
                clause = f"{where} are asked again (by {moves.size:.2g} nats, {moves.surely(0):+.2g} on average)"
                raise UntrustedError(f"{ask.root} gives other scores when {clause}", fix=ANOTHER_SERVER)

    def notes(self, proven: float = PROVEN) -> list[str]:
        """What the checks found that a reader of the scores must know."""
        notes, noise = [], max(NOISE * max(self.alone.size, self.again.size), LEAST)
        if self.lists and self.exponent < UNKNOWN:
            notes.append("that its numbers are log-probabilities is unproven")
        elif self.lists and self.exponent < proven:
            notes.append(
                f"its probabilities would also fit scores that are {1 / self.exponent:.2f} times too low: "
                "that they are log-probabilities is likely, not proven"
            )
        for moves, shown in ((self.gain, f"{PART // 2} tokens"), (self.reach, "a quarter of a window")):
            if moves.count and moves.size <= noise:
                notes.append(f"scores do not depend on tokens more than {shown} before: it may cut the context")
                break
        if (gain := self.gain.surely(BIAS)) < 0:
            notes.append(f"tokens score worse after long contexts than after short ones (by {-gain:.2g} nats)")
        if len(self.tokens) >= SHARED:
            notes.append(f"different tokens have the lowest score ({self.lowest:.4g}): it may have a floor")
        return notes
