"""How far a served model's hidden states are from the baseline's, layer by layer, and which layer is out of line.

A place is where states are looked at: place 0 is what enters the first decoder layer (the embedding), place i what
leaves layer i - 1. The last place is before the final norm. States are sums of everything that the layers so far added
(the residual stream), in float32, of every token that is fed.

    embedding ──▶ layer 0 ──▶ layer 1 ──▶ … ──▶ layer L-1 ──▶ final norm ──▶ head
        └ place 0      └ place 1                     └ place L

a_i are the candidate's states at place i, b_i the baseline's, and f_i(a_{i-1}) is what the baseline's own layer makes
of the states that entered the candidate's layer.

    error        √(Σ|a_i - b_i|² / Σ|b_i|²)                    everything that went wrong up to here
    cosine       mean of cos(a_i, b_i) over tokens
    own error    mean of |a_i - f_i(a_{i-1})| / |f_i(a_{i-1}) - a_{i-1}| over tokens: what this layer itself adds

The own error does not contain what came in, so a broken layer stands out and the layers after it do not. Tokens whose
states are far larger than what a layer adds to them (the first of a text, in many models) would only measure rounding:
the divisor is at least SMALLEST of the state. For place 0 the own error is the mean of |a_0 - b_0| / |b_0|.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from scoremode.core.engine.base import EngineFacts
from scoremode.core.scores.answers import Window
from scoremode.core.statistics.estimate import GroupSums, square_root
from scoremode.studies.attribution.result import fields_of
from scoremode.values import Bools, Estimate, Floats, Ints

SMALLEST = 1 / 64  # of the length of a state: the shortest update that errors are measured by
OUT_OF_LINE = 2.0  # times the own error of the other places, at their UPPER quantile
UPPER = 0.9
HARMLESS = 1e-3  # own errors below are those of 16-bit rounding, and are never out of line
COMPARED = "hidden states after each decoder layer, before the final norm"

States = npt.NDArray[np.float32]
"""(places, tokens, width)"""


class LayerStates(ABC):
    """An open model that gives its hidden states between layers."""

    facts: EngineFacts
    layers: int  # decoder layers
    width: int  # numbers of one state

    @abstractmethod
    def states(self, windows: Sequence[Window]) -> Iterator[States]:
        """Yields the states (layers + 1, tokens, width) of each window, in order.

        The engine may compute windows of one call together. All of them are in memory at once.
        """

    def close(self) -> None:  # noqa: B027 - some engines have nothing to release
        """Releases the memory and processes that the engine holds."""


def fed_tokens(window: Window) -> int:
    """The tokens of a window that are fed: those up to the last requested row."""
    return int(window.rows[-1]) + 1


@dataclass(frozen=True, slots=True)
class DepthPoint:
    """One place between the layers of a model, with the errors of the states there."""

    name: str  # "embedding" or "layer 7"
    error: Estimate  # relative, of the states
    cosine: Estimate
    own_error: Estimate  # of what this layer adds, given the states that entered it
    not_finite: int = 0  # tokens whose states have NaN or infinity; they are in no mean


@dataclass(frozen=True, slots=True)
class DepthProfile:
    """The errors at every place, from the embedding to the last layer, before the final norm."""

    names: tuple[str, str]  # of baseline and candidate
    engines: tuple[str, str]  # which computed them, in words
    places: tuple[DepthPoint, ...]
    tokens: int
    windows: int
    groups: str  # what the errors are computed over, in words
    notes: tuple[str, ...] = ()

    @property
    def out_of_line(self) -> tuple[DepthPoint, ...]:
        """The places whose own error does not fit the others: a broken kernel, a wrong scale, a wrong config."""
        marked = out_of_line([p.own_error.value for p in self.places], [p.not_finite for p in self.places])
        return tuple(place for place, is_out in zip(self.places, marked, strict=True) if is_out)

    @property
    def verdict(self) -> str:
        if not (out := self.out_of_line):
            return "no layer is out of line"
        first = out[0]
        words = f"its own error is {first.own_error.value:.3g}"
        if first.not_finite:
            words = f"its states are not finite in {first.not_finite:,} tokens"
        others = f"; so are {', '.join(p.name for p in out[1:])}" if len(out) > 1 else ""
        return f"{first.name} is out of line: {words}{others}"

    def as_json(self) -> dict[str, Any]:
        return {
            "baseline": self.names[0],
            "candidate": self.names[1],
            "engines": list(self.engines),
            "compared": COMPARED,
            "verdict": self.verdict,
            "out_of_line": [place.name for place in self.out_of_line],
            "tokens": self.tokens,
            "windows": self.windows,
            "stderr_groups": self.groups,
            "places": [
                {
                    "place": place.name,
                    **fields_of({name: getattr(place, name) for name in ("error", "cosine", "own_error")}),
                    "not_finite": place.not_finite,
                }
                for place in self.places
            ],
            "notes": list(self.notes),
        }


def out_of_line(own: Sequence[float] | Floats, not_finite: Sequence[int]) -> Bools:
    """Which places have own errors that do not fit those of the other places.

    >>> out_of_line([0.001, 0.011, 0.013, 0.061, 0.012], [0] * 5).tolist()
    [False, False, False, True, False]
    """
    values = np.where(np.asarray(not_finite) > 0, np.nan, np.asarray(own, np.float64))
    found: Bools = np.isnan(values)
    # states that are not finite spread to all later layers: only the first place is named
    found[np.flatnonzero(found)[1:]] = False
    for index in np.flatnonzero(~np.isnan(values)):
        others = np.delete(values, index)
        others = others[~np.isnan(others)]
        usual = float(np.quantile(others, UPPER)) if len(others) else math.inf
        found[index] = values[index] > max(HARMLESS, OUT_OF_LINE * usual)
    return found


class ProfileSums:
    """Adds up the errors of windows as they come, for each place and group of tokens."""

    def __init__(self, layers: int, groups: int) -> None:
        self._sums = [{name: GroupSums(groups) for name in ("error", "cosine", "own")} for _ in range(layers + 1)]
        self._not_finite = [0] * (layers + 1)
        self.tokens = self.windows = 0

    def add(self, groups: Ints, candidate: States, baseline: States, replayed: States) -> None:
        """Adds the tokens of one window: states (places, tokens, width), and (layers, tokens, width) of the replay."""
        self.tokens, self.windows = self.tokens + len(groups), self.windows + 1
        before: Floats | None = None
        for index, sums in enumerate(self._sums):
            a, b = candidate[index].astype(np.float64), baseline[index].astype(np.float64)
            finite = np.isfinite(a).all(axis=1)
            self._not_finite[index] += int((~finite).sum())
            expected = b if before is None else replayed[index - 1].astype(np.float64)
            update = length(b) if before is None else np.maximum(length(expected - before), SMALLEST * length(expected))
            with np.errstate(all="ignore"):  # rows that are not finite are left out below
                own = _divided(length(a - expected), update)
                cosine = _divided((a * b).sum(axis=1), length(a) * length(b))
            cosine[length(a - b) == 0] = 1.0  # also of two states that are zero
            kept = finite & np.isfinite(own)  # what enters a layer may already be not finite
            ones = np.ones(int(kept.sum()))
            sums["error"].add(groups[finite], length(a - b)[finite] ** 2, length(b)[finite] ** 2)
            sums["cosine"].add(groups[kept], cosine[kept], ones)
            sums["own"].add(groups[kept], own[kept], ones)
            before = a

    def places(self) -> tuple[DepthPoint, ...]:
        found = []
        for index, (sums, not_finite) in enumerate(zip(self._sums, self._not_finite, strict=True)):
            error = sums["error"].estimate("positive")
            error = error if math.isnan(error.value) else square_root(error)
            name, own = f"layer {index - 1}" if index else "embedding", sums["own"].estimate("positive")
            found.append(DepthPoint(name, error, sums["cosine"].estimate(), own, not_finite))
        return tuple(found)


def length(rows: Floats) -> Floats:
    found: Floats = np.sqrt((rows**2).sum(axis=1))
    return found


def _divided(part: Floats, whole: Floats) -> Floats:
    """Quotients; 0 / 0 is 0, because nothing differs from nothing."""
    return np.where(part == 0, 0.0, part / np.where(whole == 0, np.nan, whole))
