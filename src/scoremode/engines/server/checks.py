"""Two checks of a server: does it return log-probabilities of the tokens that were sent, and is it still the same?

The first check is made once, on a probe:

one two three one two three …     repeated text becomes likely: sums of probabilities come near 1, never above it
one two three one                 the same scores as inside the longer text: no score depends on later tokens
one two three one two three … X   another last token: its score changes, and no other. Else they are shifted

The sum of the k largest of V probabilities is at least k / V. Logits would pass as log-probabilities only if they met
both bounds at every position.

The last step is repeated on windows of the run, for a server may feed long prompts otherwise than short ones.

The second check is made whenever another process may have answered, so that a run never mixes scores of two models.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from scoremode.core.text.tokenizer import TextTokenizer
from scoremode.engines.server.forms import Form, WrongAnswerError, not_logprobs
from scoremode.engines.server.link import Link
from scoremode.engines.server.served import MOST, RefusedError, ask, score
from scoremode.errors import EngineError
from scoremode.values import Floats, change

TEXT = "one two three one two three one two three one two three one two three one two three " * 2
LENGTH, SHORTEST = 32, 4
SAME = 0.1  # nats, mean of |d|: the limit for another prompt length; a shift by one token moves scores by several nats
UNCHANGED = 0.03  # nats, mean of |d|: the limit for another batch
MOVED = 1e-4  # nats; the last score moves by more with another last token
CLEARLY = 3.0  # × what another batch moves any other score
ALMOST_ONE = 1.001
PEAKED = 0.5
LARGEST_VOCABULARY = 1 << 20
TRIES = 8  # requests: for the one of several servers that gave an answer, or for a token with another score


@dataclass(frozen=True, slots=True, eq=False)
class ProbeResult:
    """The result of the first check. ``scores`` are compared later, to see whether the server is still the same."""

    ids: tuple[int, ...]
    scores: Floats
    mass: tuple[float, float] | None  # smallest and largest sum of the likeliest tokens' probabilities
    notes: tuple[str, ...] = ()


def probe_ids(tokenizer: TextTokenizer, longest: int | None) -> tuple[int, ...]:
    """Returns the tokens of the probe: a text that repeats, cut to the longest prompt that the server accepts."""
    ids = tokenizer.encode(TEXT, special=True).ids.tolist()
    length = LENGTH if longest is None else min(LENGTH, longest)
    if min(len(ids), length) < SHORTEST:
        raise EngineError(
            f"the server takes prompts of {longest} tokens, which is too short to check it",
            fix="start it with a larger --max-model-len",
        )
    return tuple(ids[:length])


def probe(link: Link, form: Form, model: str, ids: Sequence[int]) -> ProbeResult:
    """Makes the first check of a server. Raises EngineError if it fails."""

    def scores(prompt: Sequence[int]) -> Floats:
        return score(link, form, model, prompt).logprob

    whole, half = scores(ids), len(ids) // 2
    _require_same(link, whole[: half - 1], scores(ids[:half]))
    require_own_scores(link, scores, ids, whole)
    mass, likely = None, _likely(link, form, model, ids)
    if likely is not None:
        mass = _mass(link, form, likely)
        best, said = max(likely[-1].items(), key=itemgetter(1))
        if best.isdigit() and not abs(scores([*ids[:-1], int(best)])[-1] - said) <= SAME:
            raise not_logprobs(link, form, "the likeliest token has another score when it is sent")
    return ProbeResult(tuple(ids), whole, mass, tuple(_notes(form, mass)))


def _require_same(link: Link, one: Floats, other: Floats) -> None:
    if not (moved := distance(one, other)) <= SAME:
        raise EngineError(
            f"scores of {link.root} change with the tokens that follow (by {moved:.2g} nats on average)",
            fix="it does not score prompts left to right, or not the tokens that it is sent: use another server",
        )


def require_own_scores(link: Link, ask: Callable[[Sequence[int]], Floats], ids: Sequence[int], scores: Floats) -> None:
    """Require of scores of a prompt that the last one changes with the last token, and no other does."""
    others = [i for i in dict.fromkeys(ids) if i != ids[-1]]
    for other in others[:TRIES]:
        found = ask([*ids[:-1], other])
        _require_same(link, scores[:-1], found[:-1])
        moved = np.abs(change(scores, found))
        if moved[-1] > MOVED + CLEARLY * moved[:-1].max(initial=0.0):
            return
    if others and len(set(scores.tolist())) > 1:  # a shift of equal scores would change nothing
        raise EngineError(
            f"the last score of {link.root} does not change with the last token, or not it alone",
            fix="it shifts its scores, or does not score the tokens that it is sent: use another server",
        )


def distance(one: Floats, other: Floats) -> float:
    """Returns the mean absolute difference of two sequences of scores; equal infinities differ by 0."""
    return float(np.abs(change(one, other)).mean()) if len(one) else 0.0


def _likely(link: Link, form: Form, model: str, ids: Sequence[int]) -> list[dict[str, float]] | None:
    """The log-probabilities of the likeliest tokens per position, as many as the server gives; None if none."""
    for most in (MOST, 5, 1):
        try:
            found = ask(link, form, model, ids, most, largest=64 << 20).likely
        except RefusedError:
            continue
        except WrongAnswerError:
            return None
        return found and [dict(sorted(one.items(), key=itemgetter(1), reverse=True)[:most]) for one in found]
    return None


def _mass(link: Link, form: Form, likely: list[dict[str, float]]) -> tuple[float, float]:
    sums = [sum(map(math.exp, found.values())) for found in likely]
    if max(sums) > ALMOST_ONE:
        raise not_logprobs(link, form, f"the probabilities of {len(likely[0])} tokens sum to {max(sums):.4g}")
    too_little = [s for s, found in zip(sums, likely, strict=True) if s < len(found) / LARGEST_VOCABULARY]
    if too_little:
        raise not_logprobs(link, form, f"the largest probabilities sum to only {min(too_little):.2g}")
    return min(sums), max(sums)


def _notes(form: Form, mass: tuple[float, float] | None) -> list[str]:
    found = [form.note] if form.note else []
    if mass is None:
        found.append("the server gives one probability a token: that its numbers are log-probabilities is unproven")
    elif mass[1] < PEAKED:
        found.append(
            f"the server was sure of nothing in the probe (sums of probabilities up to {mass[1]:.2g}): that its "
            "numbers are log-probabilities is likely, not proven"
        )
    return found


# ── the same server ──────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """A server at one moment: its facts, its scores of a fixed prompt, and the identity of its process."""

    facts: Mapping[str, Any]
    scores: Floats
    instance: str | None = None  # None: the server does not give one


class SameServer:
    def __init__(self, root: str, first: Description, describe: Callable[[], Description]) -> None:
        self.root, self.first, self.describe = root, first, describe
        self._known = {first.instance}
        self._lock = threading.Lock()

    def check(self) -> str | None:
        """Requests facts and scores again, and raises an error if they changed. Returns the instance that answered."""
        now = self.describe()
        for name, before in self.first.facts.items():
            if now.facts.get(name) != before:
                raise changed(self.root, f"its {name} was {str(before)[:200]} and is {str(now.facts.get(name))[:200]}")
        ours, theirs = self.first.scores, now.scores
        moved = distance(ours, theirs) if ours.shape == theirs.shape else float("inf")
        if not moved <= UNCHANGED:
            raise changed(self.root, f"it gives other scores than before (by {moved:.2g} nats a token on a probe)")
        return now.instance

    def confirm(self, instance: str) -> None:
        """Checks that an answer came from the first instance, or from one with the same facts and scores."""
        with self._lock:
            for _ in range(TRIES):
                if instance in self._known:
                    return
                self._known.add(self.check())
        raise changed(self.root, "an answer came from a server that is not found again")


def changed(root: str, why: str) -> EngineError:
    return EngineError(
        f"{root} changed: {why}",
        fix="start the server as it was and run the same command again to resume; "
        "to score the server as it is now, give --fresh or another --out",
    )
