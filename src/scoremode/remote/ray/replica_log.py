"""The events and the work of a model's replicas: logged when they happen, and stored in the manifest."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from scoremode.core.statistics.estimate import finite_or_none
from scoremode.errors import ScoremodeError
from scoremode.values import Floats, change

logger = logging.getLogger(__name__)

FAR = 1e-3  # nats per token, on average over the probe window
"""Replicas further away are named in the notes. Rounding in float32 moves the mean by about 1e-6. At this distance a
perplexity moves by a thousandth, a tenth of what a good quantization does. Other GPUs in 16 bits may be further off."""


@dataclass(slots=True)
class ReplicaStats:
    """The work of one replica. The fields and their order are those of the manifest."""

    name: str
    host: str = ""
    device: str = ""
    starts: int = 0
    seconds_to_start: float = 0.0
    windows: int = 0
    seconds: float = 0.0  # time spent on pieces of work
    probe_distance: float | None = None

    def add_start(self, host: str, device: str, seconds: float) -> None:
        self.host, self.device, self.seconds_to_start = host, device, seconds
        self.starts += 1

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
    probe_window: int | None = None  # which every replica scores when it starts
    probes: list[Floats] = field(default_factory=list)  # its scores, by each replica

    def __post_init__(self) -> None:
        self.replicas = [ReplicaStats(f"replica {number + 1}") for number in range(self.wanted)]

    def event(self, line: str, *, is_detail: bool = False) -> None:
        """Stores an event and shows it to the user; details are shown only with --verbose."""
        self.events.append(line)
        (logger.debug if is_detail else self.say)(line)

    def add_probe(self, stats: ReplicaStats, scores: Floats | ScoremodeError) -> None:
        """Notes how far the scores of a replica are from the first one's, on average."""
        if isinstance(scores, ScoremodeError):
            self.event(f"{stats.name} could not score the probe window: {scores.message}", is_detail=True)
            stats.probe_distance = float("nan")
            return
        self.probes.append(np.array(scores, np.float64).reshape(-1))
        moved = np.abs(change(self.probes[-1], self.probes[0]))
        stats.probe_distance = float(moved.mean()) if moved.size else 0.0

    @property
    def _spread(self) -> float | None:
        """The largest difference between two replicas on the probe window; None if fewer than two scored it."""
        if len(self.probes) < 2:
            return None
        return float(change(np.max(self.probes, axis=0), np.min(self.probes, axis=0)).max(initial=0.0))

    def new_question(self) -> None:
        """Clears the events and the work of the last question, but not the hosts, the starts and the probe."""
        self.events = []
        self.counts.clear()
        for stats in self.replicas:
            stats.windows, stats.seconds = 0, 0.0

    @property
    def started(self) -> list[ReplicaStats]:
        return [stats for stats in self.replicas if stats.starts]

    def as_json(self) -> dict[str, Any]:
        probe = {
            "window": self.probe_window,
            "targets": len(self.probes[0]) if self.probes else 0,
            "replicas": len(self.probes),
            "largest_difference": finite_or_none(self._spread),
        }
        return {
            "wanted": self.wanted,
            "started": len(self.started),
            "nodes": dict(Counter(stats.host for stats in self.started)),
            "cluster": self.address or "local",
            "deaths": self.counts["deaths"],
            "left_out": self.counts["left out"],
            "windows_again": self.counts["again"],
            "events": self.events,
            "probe": None if self.probe_window is None else probe,
            "members": [stats.as_json() for stats in self.started],
        }

    def notes(self) -> list[str]:
        """Summarizes the log in a few lines, for tables and reports."""
        agreement = ""
        if (spread := self._spread) is not None:
            agree = "give the same bits" if spread == 0 else f"agree to {spread:.2g} nats"
            agreement = f"; they {agree} on a probe window"
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
