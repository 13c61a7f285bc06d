"""Two checks of a server: does it return log-probabilities of the tokens that were sent, and is it still the same?

The first check is made once, by the invariants of ``invariants.py``, on two probes:

one two three one two three …     repeated text becomes likely: sums of probabilities come near 1
a text of odd words               rare tokens: their scores differ, and depend on what is far before them

The second check is made whenever another process may have answered, so that a run never mixes scores of two models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.core.text.tokenizer import TextTokenizer
from scoremode.engines.server.audit import LIKELY, Audit
from scoremode.engines.server.invariants import (
    Ask,
    require_last_token,
    require_listed,
    require_mass,
    require_same,
    require_sum,
)
from scoremode.errors import EngineError
from scoremode.values import Floats, Ids, change

TEXT = "one two three one two three one two three one two three one two three one two three " * 2
ODD_TEXT = (
    "Quixotic zephyrs; 7 jugs of {borax} vex Mr. Klymp? Øresund & 東京: why not §4, #fjord_9 or 'Nyx' (gnu @ 0x3F)!"
)
LENGTH, ODD_LENGTH, SHORTEST = 32, 48, 4
UNCHANGED = 0.08  # nats, mean of |d|: the limit for another batch, which moves a token by 0.05 (rms) in bfloat16
TRIES = 8  # requests for the one of several servers that gave an answer
WORD = "that it serves the model it names, at no other temperature and after no other prefix, no client can see"
UNPROVEN = "the server gives one probability a token: that its numbers are log-probabilities is unproven"


@dataclass(frozen=True, slots=True, eq=False)
class Probes:
    repeated: Ids
    odd: Ids


@dataclass(frozen=True, slots=True, eq=False)
class ProbeResult:
    """The result of the first check. ``scores`` are compared later, to see whether the server is still the same."""

    scores: Floats
    exponent: float  # see require_mass; 1 if the server lists all tokens
    notes: tuple[str, ...] = ()


def make_probes(tokenizer: TextTokenizer, longest: int | None) -> Probes:
    """Returns the tokens of two texts, cut to the longest prompt that the server accepts."""
    most = LENGTH if longest is None else longest
    repeated, odd = (tokenizer.encode(text, special=True).ids for text in (TEXT, ODD_TEXT))
    if min(len(repeated), most) < SHORTEST:
        raise EngineError(
            f"the server takes prompts of {longest} tokens, which is too short to check it",
            fix="start it with a larger --max-model-len",
        )
    return Probes(repeated[: min(LENGTH, most)], odd[: min(ODD_LENGTH, longest or ODD_LENGTH)])


def probe(ask: Ask, probes: Probes, bos: int | None = None) -> ProbeResult:
    """Makes the first check of a server. Raises UntrustedError if it fails."""
    ids = probes.repeated.tolist()
    whole, half, exponent = ask(ids).logprob, len(ids) // 2, 1e-9
    require_same(ask, whole[: half - 1], ask(ids[:half]).logprob)
    require_last_token(ask, ids, whole)
    listed = ask(ids, likely=True)
    require_same(ask, whole, listed.logprob)
    if listed.likely:
        exponent = require_mass(ask, listed.likely)
        require_listed(ask, ids, listed.likely)
    if require_sum(ask, ids[:1]):
        exponent = 1.0
    start = Audit(bos, exponent)
    start.window(ask, probes.odd, ask(probes.odd.tolist()).logprob)
    start.judge(ask)
    notes = [WORD, *([] if ask.most else [UNPROVEN]), *start.notes(LIKELY)]
    return ProbeResult(whole, start.exponent, tuple(notes))


def distance(first: Floats, second: Floats) -> float:
    """Returns the mean absolute difference of two sequences of scores; equal infinities differ by 0."""
    return float(np.abs(change(first, second)).mean()) if len(first) else 0.0


# ── the same server ──────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """A server at one moment: its facts, its scores of a fixed prompt, and the identity of its process."""

    facts: Mapping[str, Any]
    scores: Floats
    instance: str | None = None  # None: the server does not name its process


class SameServer:
    """Has a server described again whenever an answer may have come from another process.

    An *instance* stands for a process: the name that it gives itself in each answer, or else the connections to it.
    """

    def __init__(self, root: str, first: Description, describe: Callable[[], Description]) -> None:
        self.root, self.first, self.describe = root, first, describe
        self._known: set[Hashable] = {first.instance}
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

    def confirm(self, instance: Hashable) -> None:
        """Checks that an answer came from the first instance, or from one with the same facts and scores."""
        with self._lock:
            for _ in range(TRIES):
                if instance in self._known:
                    return
                answered = self.check()
                self._known.add(instance if answered is None else answered)
        raise changed(self.root, "an answer came from a server that is not found again")


def changed(root: str, why: str) -> EngineError:
    return EngineError(
        f"{root} changed: {why}",
        fix="start the server as it was and run the same command again to resume; "
        "to score the server as it is now, give --fresh or another --out",
    )
