"""The events and the work of a model's replicas: logged when they happen, and stored in the manifest."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from scoremode.core.statistics.estimate import finite_or_none
from scoremode.values import Floats, change

logger = logging.getLogger(__name__)

FAR = 1e-3  # nats per token, on average over the probe window
"""Replicas further away are named in the notes. Rounding in float32 moves the mean by about 1e-6. At this distance a
perplexity moves by a thousandth, a tenth of what a good quantization does. Other GPUs in 16 bits may be further off."""


@dataclass(slots=True)
class Probe:
    """The scores of one window, which every replica computes when it starts."""

    window: int
    scores: list[Floats] = field(default_factory=list)  # one array per replica

    def add(self, logprob: Floats) -> float:
        """Adds the scores of one replica; returns their mean distance from the first replica's, in nats per token."""
        self.scores.append(np.array(logprob, np.float64).reshape(-1))
        if len(self.scores) == 1 or not self.scores[0].size:
            return 0.0
        return float(np.abs(change(self.scores[-1], self.scores[0])).mean())

    @property
    def spread(self) -> float | None:
        """The largest difference between the scores of two replicas, in nats; None if fewer than two answered."""
        if len(self.scores) < 2:
            return None
        return float(change(np.max(self.scores, axis=0), np.min(self.scores, axis=0)).max(initial=0.0))

    def as_json(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "targets": len(self.scores[0]) if self.scores else 0,
            "replicas": len(self.scores),
            "largest_difference": finite_or_none(self.spread),
        }

    def agreement(self) -> str:
        """Describes how far the replicas agree on the window, as the end of a sentence."""
        if self.spread is None:
            return ""
        agree = "give the same bits" if self.spread == 0 else f"agree to {self.spread:.2g} nats"
        return f"; they {agree} on a probe window"


@dataclass(slots=True)
class ReplicaStats:
    """The work of one replica. The fields and their order are those of the manifest."""

    name: str
    host: str = ""
    device: str = ""
    starts: int = 0
    seconds_to_start: float = 0.0
    windows: int = 0
    tokens: int = 0
    seconds: float = 0.0  # time spent on pieces of work
    probe_distance: float | None = None

    def as_json(self) -> dict[str, Any]:
        rounded = {name: round(getattr(self, name), 3) for name in ("seconds_to_start", "seconds")}
        return {**asdict(self), **rounded, "probe_distance": finite_or_none(self.probe_distance)}


@dataclass(slots=True)
class ReplicaLog:
    """All facts about the replicas that a reader of the numbers should know."""

    wanted: int
    address: str | None
    say: Callable[[str], None] = logger.warning
    replicas: list[ReplicaStats] = field(init=False)
    events: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    unit: str = "window"  # what the replicas give
    probe: Probe | None = None

    def __post_init__(self) -> None:
        self.replicas = [ReplicaStats(f"replica {number + 1}") for number in range(self.wanted)]

    def event(self, line: str, *, is_detail: bool = False) -> None:
        """Stores an event and shows it to the user; details are shown only with --verbose."""
        self.events.append(line)
        (logger.debug if is_detail else self.say)(line)

    def new_question(self) -> None:
        """Clears the events and the work of the last question, but not the hosts, the starts and the probe."""
        self.events = []
        self.counts.clear()
        for stats in self.replicas:
            stats.windows = stats.tokens = 0
            stats.seconds = 0.0

    @property
    def started(self) -> list[ReplicaStats]:
        return [stats for stats in self.replicas if stats.starts]

    def as_json(self) -> dict[str, Any]:
        return {
            "wanted": self.wanted,
            "started": len(self.started),
            "nodes": dict(Counter(stats.host for stats in self.started)),
            "cluster": self.address or "local",
            "deaths": self.counts["deaths"],
            "left_out": self.counts["left out"],
            "windows_again": self.counts["again"],
            "events": self.events,
            "probe": None if self.probe is None else self.probe.as_json(),
            "members": [stats.as_json() for stats in self.started],
        }

    def notes(self) -> list[str]:
        """Summarizes the log in a few lines, for tables and reports."""
        agreement = "" if self.probe is None else self.probe.agreement()
        hosts = {stats.host for stats in self.started}
        found = [f"scored by {_many(len(self.started), 'replica')} on {_many(len(hosts), 'node')}{agreement}"]
        found += [
            f"{one.name} ({one.host}, {one.device}) differs from the others by {one.probe_distance:.2g} nats per token "
            "on the probe window"
            for one in self.started
            if one.probe_distance is not None and not one.probe_distance <= FAR
        ]
        if self.counts["deaths"]:
            again = _many(self.counts["again"], self.unit)
            found.append(f"{_many(self.counts['deaths'], 'replica')} died; {again} went to others")
        if self.counts["left out"]:
            reason = next((line for line in reversed(self.events) if "left out" in line), "see the manifest")
            found.append(f"{_many(self.counts['left out'], 'replica')} left out: {reason}")
        return found


def _many(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
