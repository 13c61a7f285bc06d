"""What happened to replicas: told when it happens, kept with the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scoremode.errors import print_line
from scoremode.values import Floats

MOST_EVENTS = 100  # that are kept word by word
FAR = 1e-3  # nats per token, on average over the probe window
"""Above this a replica is named. Rounding in float32 moves the mean by about 1e-6; a perplexity would move by a
thousandth, which is a tenth of what a good quantization does. Another kind of GPU in 16 bits may be above it."""


def say_on_standard_error(line: str) -> None:
    print_line(f"scoremode: {line}")


@dataclass(slots=True)
class Probe:
    """One window as every replica scored it."""

    window: int
    first: Floats | None = None
    low: Floats | None = None
    high: Floats | None = None
    replicas: int = 0
    in_run: Floats | None = None  # the same window among others, as the result has it

    def add(self, logprob: Floats) -> float:
        """Note an answer; its mean distance from the first one, in nats per token."""
        flat = np.array(logprob, np.float64).reshape(-1)
        self.replicas += 1
        if self.first is None or self.low is None or self.high is None:
            self.first = self.low = self.high = flat
            return 0.0
        self.low, self.high = np.minimum(self.low, flat), np.maximum(self.high, flat)
        return float(_distance(flat, self.first).mean()) if flat.size else 0.0

    @property
    def rerun(self) -> tuple[float, float] | None:
        """How far the window alone is from itself among others: the mean and the largest difference, in nats."""
        if self.first is None or self.in_run is None or self.first.shape != self.in_run.shape or not self.first.size:
            return None
        distance = _distance(self.in_run, self.first)
        return float(distance.mean()), float(distance.max())

    @property
    def spread(self) -> float | None:
        """The largest difference between two replicas, in nats; None: fewer than two answered."""
        if self.replicas < 2 or self.low is None or self.high is None:
            return None
        return float(_distance(self.high, self.low).max(initial=0.0))


def _distance(one: Floats, other: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        found: Floats = np.where(one == other, 0.0, np.abs(one - other))
    return found


@dataclass(slots=True)
class Member:
    """What one replica did, under its name."""

    name: str
    host: str = ""
    device: str = ""
    seconds_to_start: float = 0.0
    windows: int = 0
    tokens: int = 0
    seconds: float = 0.0  # spent on leases
    starts: int = 0
    probe_distance: float | None = None


@dataclass(slots=True)
class Account:
    """Everything that a reader of the numbers should know of the replicas."""

    wanted: int
    address: str | None
    say: Callable[[str], None] = say_on_standard_error
    members: dict[int, Member] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    more_events: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    probe: Probe | None = None

    def event(self, line: str, *, aloud: bool = True) -> None:
        """Something that a user should see now, and a reader later."""
        if len(self.events) < MOST_EVENTS:
            self.events.append(line)
        else:
            self.more_events += 1
        if aloud:
            self.say(line)

    def new_question(self) -> None:
        """Forget what belongs to the last question; who the replicas are, and how they agree, stays."""
        self.events, self.more_events = [], 0
        self.counts.clear()
        for member in self.members.values():
            member.windows = member.tokens = 0
            member.seconds = 0.0

    # ── for the manifest ─────────────────────────────────────────────────────────────────────────────────────────────
    def as_json(self) -> dict[str, Any]:
        started = self._started()
        probe = self.probe
        return {
            "wanted": self.wanted,
            "started": len(started),
            "nodes": dict(Counter(m.host for m in started)),
            "cluster": self.address or "local",
            "deaths": self.counts["deaths"],
            "left_out": self.counts["left out"],
            "windows_again": self.counts["windows again"],
            "copies": self.counts["copies"],
            "answers_dropped": self.counts["dropped"],
            "events": [*self.events, *([f"and {self.more_events} more"] if self.more_events else [])],
            "probe": None
            if probe is None
            else {
                "window": probe.window,
                "targets": 0 if probe.first is None else len(probe.first),
                "replicas": probe.replicas,
                "largest_difference": _finite(probe.spread),
                "mean_and_largest_difference_in_the_run": None if probe.rerun is None else [*map(_finite, probe.rerun)],
            },
            "members": [
                {
                    "name": m.name,
                    "host": m.host,
                    "device": m.device,
                    "starts": m.starts,
                    "seconds_to_start": round(m.seconds_to_start, 3),
                    "windows": m.windows,
                    "tokens": m.tokens,
                    "seconds": round(m.seconds, 3),
                    "probe_distance": _finite(m.probe_distance),
                }
                for m in started
            ],
        }

    def notes(self) -> list[str]:
        """The same in a few lines."""
        started = self._started()
        hosts = {m.host for m in started}
        found = [f"scored by {_many(len(started), 'replica')} on {_many(len(hosts), 'node')}{self._agreement()}"]
        found += [
            f"{m.name} ({m.host}, {m.device}) differs from the others by {m.probe_distance:.2g} nats per token on the "
            "probe window"
            for m in started
            if m.probe_distance is not None and not m.probe_distance <= FAR
        ]
        if self.counts["deaths"]:
            again = _many(self.counts["windows again"], "window")
            found.append(f"{_many(self.counts['deaths'], 'replica')} died; {again} went to others")
        if self.counts["left out"]:
            found.append(f"{_many(self.counts['left out'], 'replica')} left out: {self._last_reason()}")
        return found

    def _started(self) -> list[Member]:
        """In the order of their names, not of who was open first."""
        return [self.members[number] for number in sorted(self.members) if self.members[number].starts]

    def _last_reason(self) -> str:
        return next((line for line in reversed(self.events) if "left out" in line), "see the manifest")

    def _agreement(self) -> str:
        spread = None if self.probe is None else self.probe.spread
        words = ""
        if spread is not None:
            agree = "give the same bits" if spread == 0 else f"agree to {spread:.2g} nats"
            words = f"; they {agree} on a probe window"
        if self.probe is None or self.probe.rerun is None or self.probe.rerun[1] == 0:
            return words
        mean, largest = self.probe.rerun
        alone = "among others it" if words else "; a probe window"
        return f"{words}{', and ' if words else ''}{alone} moves by {mean:.2g} on average and {largest:.2g} at most"


def _many(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None
