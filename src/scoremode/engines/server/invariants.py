"""What holds for every model that scores prompts, and does not hold for a server that alters its scores.

Each function asks one server about a few short prompts, and raises UntrustedError if what must hold does not:

first tokens   a prompt's first tokens score the same alone: no score depends on later tokens, or on the length
last token     another last token changes the last score, and no other. Else scores are shifted
listed         a token that is listed as likely has that score when it is sent
mass           probabilities of the likeliest tokens sum to at most 1, and to almost 1 where the model is almost sure
sum            probabilities of all tokens sum to 1, where the server lists them all

Two cannot be required, because honest models differ in them. They are measured, and a run notes what they show:

floor          different tokens do not share the lowest score
end alone      the last tokens of a prompt score otherwise, and on average worse, without the tokens before them
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from scoremode.engines.server.forms import Likely, PromptScores
from scoremode.errors import UntrustedError
from scoremode.values import Floats, Ids, change

SAME, LARGEST = 0.1, 1.0  # nats, mean of |d|, and largest |d|, that another batch or prompt length may move scores by
ERRORS, FEW = 4.0, 16  # standard errors of a mean; twice as many of so few numbers
SENT = 0.2  # nats, mean of |d| over few tokens; a nat added to the token that is sent moves them by 0.5 or more
MOVED = 1e-4  # nats; the last score moves by more with another last token
CLEARLY = 3.0  # × what another batch moves any other score
ALMOST_ONE, ALMOST_ALL = 1.001, 0.999
SUM_ERROR = 0.005
SURE = 0.999  # where a token is likelier, rounding hides how probable the others are
LARGEST_VOCABULARY = 1 << 20
TRIES = 8  # other tokens, of which one must have another score
ANOTHER_SERVER = "it does not score the tokens that it is sent, or not all prompts alike: use another server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(ABC):
    """Asks one server for the scores of a prompt."""

    root: str  # its address
    fix: str  # what to do if its numbers are no log-probabilities
    most: int  # the likeliest tokens that it lists at a position; 0: it lists none

    @abstractmethod
    def __call__(self, ids: Sequence[int], *, likely: bool = False) -> PromptScores: ...

    @abstractmethod
    def every(self, ids: Sequence[int]) -> Floats | None:
        """The log-probabilities of all tokens after a prompt; None if the server does not list them."""


def altered(ask: Ask, why: str) -> UntrustedError:
    return UntrustedError(f"{ask.root} does not answer with log-probabilities ({why})", fix=ask.fix)


# ── what must hold ───────────────────────────────────────────────────────────────────────────────────────────────────
def limit(count: int) -> float:
    """Returns the most nats, as mean of |d|, that so many scores may move: one of few may move far."""
    return SAME + LARGEST / count


def require_same(ask: Ask, scores: Floats, again: Floats) -> Floats:
    """Requires that tokens have the same scores again, and returns how far they moved. NaN: a token was not scored."""
    moved: Floats = change(scores, again)[~np.isnan(scores)]
    if len(moved) and not (mean := float(np.abs(moved).mean())) <= limit(len(moved)):
        raise UntrustedError(
            f"scores of {ask.root} change with the tokens that follow (by {mean:.2g} nats on average)",
            fix=ANOTHER_SERVER,
        )
    return moved


def require_last_token(ask: Ask, ids: Sequence[int], scores: Floats) -> None:
    """Requires that the last score changes with the last token, and no other does."""
    others = [i for i in dict.fromkeys(ids) if i != ids[-1]]
    for other in others[:TRIES]:
        again = ask([*ids[:-1], other]).logprob
        require_same(ask, scores[:-1], again[:-1])
        moved = np.abs(change(scores, again))
        if moved[-1] > MOVED + CLEARLY * moved[:-1].max(initial=0.0):
            return
    if others and len(set(scores.tolist())) > 1:  # a shift of equal scores would change nothing
        raise UntrustedError(
            f"the last score of {ask.root} does not change with the last token, or not it alone",
            fix="it shifts its scores, or does not score the tokens that it is sent: use another server",
        )


def require_listed(ask: Ask, ids: Sequence[int], likely: Likely) -> None:
    """Requires that likely tokens have the scores with which they are listed when they are sent."""
    moved = []
    for end in range(1, len(ids), max(1, len(ids) // TRIES)):
        others = {token: x for token, x in likely[end - 1].items() if token.isdigit() and int(token) != ids[end]}
        if others:
            other, listed = max(others.items(), key=itemgetter(1))
            moved.append(abs(float(ask([*ids[:end], int(other)]).logprob[-1]) - listed))
    if moved and not np.mean(moved) <= SENT:
        raise altered(ask, "a likely token has another score when it is sent")


def require_mass(ask: Ask, likely: Likely) -> float:
    """Requires possible sums of the likeliest tokens' probabilities. Returns the largest exponent with a sum of 1.

    With the probabilities p at one position and Σ p^x = 1, all scores may be too low by the factor 1/x, and by no more.
    Where a model is almost sure, the listed tokens have almost all of the probability, and x is almost 1.
    """
    best = 0.0
    for listed in likely:
        logprob = np.sort([x for x in listed.values() if x > -np.inf])[::-1]
        total = float(np.exp(logprob).sum())
        if total > ALMOST_ONE:
            raise altered(ask, f"the probabilities of {len(logprob)} tokens sum to {total:.4g}")
        least = np.exp(logprob[: ask.most][-1]) if len(logprob) else 0.0  # no token that is not listed is likelier
        if total + LARGEST_VOCABULARY * least < ALMOST_ALL and len(listed) >= ask.most > 1:
            raise altered(ask, f"the largest probabilities sum to only {total:.2g}")
        if len(logprob) > 1 and np.exp(logprob[0]) <= SURE:
            best = max(best, _exponent(logprob))
    return best


def _exponent(logprob: Floats) -> float:
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if np.exp(middle * logprob).sum() > 1 else (low, middle)
    return high


def require_sum(ask: Ask, ids: Sequence[int]) -> bool:
    """Requires that the probabilities of all tokens after a prompt sum to 1. Returns False if they are not listed."""
    every = ask.every(ids)
    if every is not None and not abs((total := float(np.exp(every).sum())) - 1) <= SUM_ERROR:
        raise altered(ask, f"the probabilities of all {len(every)} tokens sum to {total:.4g}")
    return every is not None


# ── what is measured ─────────────────────────────────────────────────────────────────────────────────────────────────
class Moves:
    """How far scores moved, from several comparisons. Infinite moves do not count."""

    def __init__(self) -> None:
        self._sums: Floats = np.zeros(4)  # of 1, d, |d| and d²

    def add(self, moved: Floats) -> None:
        d = moved[np.isfinite(moved)]
        self._sums += np.stack([d**0, d, np.abs(d), d**2]).sum(axis=1)

    @property
    def count(self) -> int:
        return int(self._sums[0])

    @property
    def size(self) -> float:
        """The mean size of a move."""
        return float(self._sums[2]) / max(1, self.count)

    def surely(self, least: float) -> float:
        """Returns the mean of all moves if it is surely more than ``least`` away from 0, else 0."""
        count, mean, _, square = (self._sums / max(1, self.count)).tolist()
        error = (max(0.0, square - mean**2) / max(1, self.count)) ** 0.5
        return mean if count and abs(mean) > least + ERRORS * (1 + FEW / self.count) * error else 0.0


def end_alone(ask: Ask, ids: Ids, scores: Floats, part: slice, front: Sequence[int] = ()) -> Floats:
    """Returns how much higher tokens score in a prompt than in a part of it that is scored alone, after ``front``.

    Only the second half of the part is compared: it has a context in both.
    """
    half = (part.stop - part.start) // 2
    alone = ask([*front, *ids[part].tolist()]).logprob
    whole = scores[part.start + half - 1 : part.stop - 1]
    gains: Floats = change(whole, alone[len(front) + half - 1 :])[~np.isnan(whole)]
    return gains
