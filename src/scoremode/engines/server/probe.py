"""The start-up check: are the answers of a server log-probabilities of the tokens that were sent?

one two three one two three …     what repeats becomes likely: sums of probabilities come near 1, and are never above
one two three one                 the same scores as inside the longer text: no score depends on what follows
one two three one two three … X   another last token: its own score changes, and no other

The sum of the k largest of V probabilities is at least k / V. Logits that pass for log-probabilities here would have
to obey both bounds at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.engines.server.forms import FORMS, MOST, Form, LogitsError, Scored, WrongAnswerError, probabilities
from scoremode.engines.server.link import Link
from scoremode.engines.server.served import COMPLETIONS, not_logprobs, score
from scoremode.errors import EngineError
from scoremode.text.tokenizer import TextTokenizer
from scoremode.values import Floats

TEXT = "one two three one two three one two three one two three one two three one two three " * 2
LENGTH, SHORTEST = 32, 4
SAME = 0.1  # nats, mean of |d|: what another length of the prompt may move; a shift by one moves scores by several
UNCHANGED = 0.03  # nats, mean of |d|: what another batch may move
ALMOST_ONE = 1.001
PEAKED = 0.5
LARGEST_VOCABULARY = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """What the check found; ``scores`` are compared later, to see whether the server is still the same."""

    ids: tuple[int, ...]
    scores: Floats
    mass: tuple[float, float] | None  # smallest and largest sum of the likeliest tokens' probabilities
    notes: tuple[str, ...] = ()


def probe_ids(tokenizer: TextTokenizer, longest: int | None) -> tuple[int, ...]:
    """Tokens that repeat, as many as fit."""
    ids = tokenizer.encode(TEXT, special=True).ids.tolist()
    length = LENGTH if longest is None else min(LENGTH, longest)
    if min(len(ids), length) < SHORTEST:
        raise EngineError(
            f"the server takes prompts of {longest} tokens, which is too short to check it",
            fix="start it with a larger --max-model-len",
        )
    return tuple(ids[:length])


def probe(link: Link, form: Form, model: str, ids: Sequence[int]) -> Probe:
    """Check a server; EngineError if its answers are not what they must be."""

    def ask(prompt: Sequence[int]) -> Floats:
        return score(link, form, model, prompt).logprob

    whole, half = ask(ids), len(ids) // 2
    _require_same(link, whole[: half - 1], ask(ids[:half]))
    last_decides = _last_token(link, ids, whole, ask)
    if not form.names_ids and not last_decides:
        raise EngineError(
            f"{link.root} does not say which tokens its scores are about, and another last token changes no score",
            fix="use a server that has prompt_logprobs",
        )
    largest = _largest(link, form, model, ids)
    mass = None if largest is None else _mass(link, form, largest)
    return Probe(tuple(ids), whole, mass, tuple(_notes(form, mass)))


def _last_token(link: Link, ids: Sequence[int], whole: Floats, ask: Callable[[Sequence[int]], Floats]) -> bool:
    """Does another last token change its own score? That it changes no other is required."""
    others = [i for i in dict.fromkeys(ids) if i != ids[-1]][:3]
    for other in others:
        changed = ask([*ids[:-1], other])
        _require_same(link, whole[:-1], changed[:-1])
        if not _same(whole[-1:], changed[-1:], SAME):
            return True
    return False


def _require_same(link: Link, one: Floats, other: Floats) -> None:
    if not _same(one, other, SAME):
        raise EngineError(
            f"scores of {link.root} change with the tokens that follow (by {distance(one, other):.2g} nats on average)",
            fix="it does not score prompts left to right, or not the tokens that it is sent: use another server",
        )


def _same(one: Floats, other: Floats, allowed: float) -> bool:
    return distance(one, other) <= allowed


def distance(one: Floats, other: Floats) -> float:
    """Mean of |d|; where both are minus infinity they agree."""
    with np.errstate(invalid="ignore"):
        d = np.where(one == other, 0.0, np.abs(one - other))
    return float(d.mean()) if len(d) else 0.0


def _largest(link: Link, form: Form, model: str, ids: Sequence[int]) -> list[list[float]] | None:
    """For each token the probabilities of the most likely ones, as many as the server gives."""
    for most in (MOST, 5, 1):
        reply = link.post(COMPLETIONS, form.body(model, ids, most), largest=64 << 20)
        if not reply.good:
            continue
        try:
            found: Scored = form.read(reply.value, ids, most)
            return None if found.largest is None else [p[:most] for p in probabilities(found.largest)]
        except LogitsError as wrong:
            raise not_logprobs(link, str(wrong)) from None
        except WrongAnswerError:
            return None
    return None


def _mass(link: Link, form: Form, largest: list[list[float]]) -> tuple[float, float]:
    sums = [sum(found) for found in largest]
    if max(sums) > ALMOST_ONE:
        raise not_logprobs(link, f"the probabilities of {len(largest[0])} tokens sum to {max(sums):.4g}")
    if form.names_ids:  # else tokens with one text are counted once
        too_little = [s for s, found in zip(sums, largest, strict=True) if s < len(found) / LARGEST_VOCABULARY]
        if too_little:
            raise not_logprobs(link, f"the largest probabilities sum to only {min(too_little):.2g}")
    return min(sums), max(sums)


def _notes(form: Form, mass: tuple[float, float] | None) -> list[str]:
    found = []
    if form is not FORMS[0]:
        found.append("the server has no prompt_logprobs: scored by echo")
    if not form.names_ids:
        found.append("the server does not repeat the ids of tokens: that scores belong to them was checked on a probe")
    if mass is None:
        found.append("the server gives one probability a token: that its numbers are log-probabilities is unproven")
    elif mass[1] < PEAKED:
        found.append(
            f"the server was sure of nothing in the probe (sums of probabilities up to {mass[1]:.2g}): that its "
            "numbers are log-probabilities is likely, not proven"
        )
    return found


def as_settings(found: Probe) -> dict[str, Any]:
    """For the manifest."""
    return {} if found.mass is None else {"probe_mass": [round(m, 6) for m in found.mass]}
