"""Two checks of a server: does it return log-probabilities of the tokens that were sent, and is it still the same?

The first check is made once, on a probe:

one two three one two three …     repeated text becomes likely: sums of probabilities come near 1, never above it
one two three one                 the same scores as inside the longer text: no score depends on later tokens
one two three one two three … X   another last token: no other score changes

The sum of the k largest of V probabilities is at least k / V. Logits would pass as log-probabilities only if they met
both bounds at every position.

The second check is made whenever another process may have answered, so that a run never mixes scores of two models.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
ALMOST_ONE = 1.001
PEAKED = 0.5
LARGEST_VOCABULARY = 1 << 20
TRIES = 8  # requests that are sent to find the one of several servers that gave an answer


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
    other = next((i for i in ids if i != ids[-1]), None)  # as the last token, it must change no other score
    if other is not None:
        _require_same(link, whole[:-1], scores([*ids[:-1], other])[:-1])
    largest = _largest(link, form, model, ids)
    mass = None if largest is None else _mass(link, largest)
    return ProbeResult(tuple(ids), whole, mass, tuple(_notes(form, mass)))


def _require_same(link: Link, one: Floats, other: Floats) -> None:
    if not (moved := distance(one, other)) <= SAME:
        raise EngineError(
            f"scores of {link.root} change with the tokens that follow (by {moved:.2g} nats on average)",
            fix="it does not score prompts left to right, or not the tokens that it is sent: use another server",
        )


def distance(one: Floats, other: Floats) -> float:
    """Returns the mean absolute difference of two sequences of scores; equal infinities differ by 0."""
    return float(np.abs(change(one, other)).mean()) if len(one) else 0.0


def _largest(link: Link, form: Form, model: str, ids: Sequence[int]) -> list[list[float]] | None:
    """Returns the probabilities of the likeliest tokens per position, as many as the server gives; None if none."""
    for most in (MOST, 5, 1):
        try:
            found = ask(link, form, model, ids, most, largest=64 << 20).largest
        except RefusedError:
            continue
        except WrongAnswerError:
            return None
        likely = [sorted(map(math.exp, one), reverse=True) for one in found or ()]
        return [one[:most] for one in likely] if found is not None else None
    return None


def _mass(link: Link, largest: list[list[float]]) -> tuple[float, float]:
    sums = [sum(found) for found in largest]
    if max(sums) > ALMOST_ONE:
        raise not_logprobs(link, f"the probabilities of {len(largest[0])} tokens sum to {max(sums):.4g}")
    too_little = [s for s, found in zip(sums, largest, strict=True) if s < len(found) / LARGEST_VOCABULARY]
    if too_little:
        raise not_logprobs(link, f"the largest probabilities sum to only {min(too_little):.2g}")
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
