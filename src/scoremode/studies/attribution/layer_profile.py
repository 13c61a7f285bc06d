"""``sm.layer_profile``: how far a served model's hidden states are from the baseline's, and which layer is out of line.

candidate, as it is served ──▶ states between its layers, in memory
baseline, by Transformers  ──▶ the same places; its layers on the candidate's states
                                                 └──▶ sums per layer and group, window by window ──▶ DepthProfile

One model is open at a time.

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
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from scoremode.core.cache.units import size_words
from scoremode.core.engine.base import EngineFacts
from scoremode.core.engine.registry import can, require
from scoremode.core.free_memory import available
from scoremode.core.plan.plan import Plan
from scoremode.core.scores.answers import Window
from scoremode.core.statistics.estimate import GroupSums, square_root
from scoremode.core.statistics.groups import grouping
from scoremode.core.text.corpus import Spec
from scoremode.core.verbs.argument_types import EngineOptionArguments
from scoremode.core.verbs.arguments import AllArguments, read_arguments, spelled_out
from scoremode.core.verbs.baselines import comparable_facts, require_same_question
from scoremode.core.verbs.compared_models import CompareRequest, assign_engines, name_of
from scoremode.core.verbs.model import LazyModel, tokenizer_name
from scoremode.core.verbs.progress import Progress, shows_progress
from scoremode.core.verbs.scoring import check_fits
from scoremode.errors import EngineError, InputError, OptionError
from scoremode.studies.attribution.abilities import REPLAY, STATES, engine_with, opened
from scoremode.studies.attribution.result import fields_of
from scoremode.values import Bools, Estimate, Floats, Ints

TOKENS = 4096  # tokens of a profile: a layer's error needs few
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

    def replayed(self, window: Window, states: States) -> States:
        """What every layer makes of another model's states: (layers, tokens, width). Only a baseline can do this."""
        raise NotImplementedError

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
        reason = f"its own error is {first.own_error.value:.3g}"
        if first.not_finite:
            reason = f"its states are not finite in {first.not_finite:,} tokens"
        others = f"; so are {', '.join(p.name for p in out[1:])}" if len(out) > 1 else ""
        return f"{first.name} is out of line: {reason}{others}"

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


def out_of_line(own_errors: Sequence[float] | Floats, not_finite: Sequence[int]) -> Bools:
    """Which places have own errors that do not fit those of the other places.

    >>> out_of_line([0.001, 0.011, 0.013, 0.061, 0.012], [0] * 5).tolist()
    [False, False, False, True, False]
    """
    values = np.where(np.asarray(not_finite) > 0, np.nan, np.asarray(own_errors, np.float64))
    outliers: Bools = np.isnan(values)
    # states that are not finite spread to all later layers: only the first place is named
    outliers[np.flatnonzero(outliers)[1:]] = False
    for index in np.flatnonzero(~np.isnan(values)):
        others = np.delete(values, index)
        others = others[~np.isnan(others)]
        usual = float(np.quantile(others, UPPER)) if len(others) else math.inf
        outliers[index] = values[index] > max(HARMLESS, OUT_OF_LINE * usual)
    return outliers


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
                own_error = _divided(length(a - expected), update)
                cosine = _divided((a * b).sum(axis=1), length(a) * length(b))
            cosine[length(a - b) == 0] = 1.0  # also of two states that are zero
            mask = finite & np.isfinite(own_error)  # what enters a layer may already be not finite
            ones = np.ones(int(mask.sum()))
            sums["error"].add(groups[finite], length(a - b)[finite] ** 2, length(b)[finite] ** 2)
            sums["cosine"].add(groups[mask], cosine[mask], ones)
            sums["own"].add(groups[mask], own_error[mask], ones)
            before = a

    def places(self) -> tuple[DepthPoint, ...]:
        points = []
        for index, (sums, not_finite) in enumerate(zip(self._sums, self._not_finite, strict=True)):
            error = sums["error"].estimate("positive")
            error = error if math.isnan(error.value) else square_root(error)
            name, own_error = f"layer {index - 1}" if index else "embedding", sums["own"].estimate("positive")
            points.append(DepthPoint(name, error, sums["cosine"].estimate(), own_error, not_finite))
        return tuple(points)


def length(rows: Floats) -> Floats:
    lengths: Floats = np.sqrt((rows**2).sum(axis=1))
    return lengths


def _divided(part: Floats, whole: Floats) -> Floats:
    """Quotients; 0 / 0 is 0, because nothing differs from nothing."""
    return np.where(part == 0, 0.0, part / np.where(whole == 0, np.nan, whole))


# ── of two models ────────────────────────────────────────────────────────────────────────────────────────────────────
@spelled_out(AllArguments)
@shows_progress
def layer_profile(
    baseline: str,
    candidate: str,
    *,
    tokens: int = TOKENS,
    engine: str | None = None,
    tokenizer: Spec | None = None,
    baseline_options: EngineOptionArguments | None = None,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> DepthProfile:
    """Compares hidden states after each layer of a served model with those of the baseline, and names a broken layer.

    ``baseline`` is a checkpoint that Transformers loads; ``engine`` serves the candidate. ``tokens`` bounds the tokens
    that are compared: whole windows, spread over the text. ``arguments`` are those of a question, and options of the
    candidate's engine; the baseline gets those that Transformers has, and ``baseline_options``.

    >>> sm.layer_profile("org/model", "model-Q4_K_M.gguf", corpus="wikitext2").verdict    # doctest: +SKIP
    'no layer is out of line'
    """
    question, options = read_arguments(arguments)
    question = question.with_text()
    if question.path not in (None, "prefill"):
        raise OptionError("hidden states between layers are computed by prefill", fix="leave --path out")
    if tokens < 1:
        raise OptionError(f"tokens={tokens} leaves nothing to compare", fix="give a number of at least 1")
    wanted = CompareRequest(engine, options, engine_with(REPLAY), baseline_options, tokenizer_name(tokenizer))
    first, candidates = assign_engines(baseline, [candidate], wanted, divergence=False)
    if first is None or not can(first.plugin, REPLAY):
        raise InputError(f"{baseline} has no layers that can be compared", fix="give a checkpoint as the baseline")
    if not candidates:
        raise InputError(f"{candidate} is a run, and a profile of layers needs a model", fix="give the model")
    with closing(first), closing(candidates[candidate]) as second:
        for model in (first, second):
            require(model.plugin, STATES, "give hidden states between layers")
            if model.spread is not None:
                raise OptionError("hidden states between layers come from one engine", fix="leave --replicas out")
        full_question = first.ask(question, progress)
        require_same_question(comparable_facts(full_question), second.ask(question, progress), full_question.tokens.ids)
        check_fits(full_question.plan, full_question.subject.vocabulary, full_question.subject.context_length)
        return _profile(first, second, full_question.plan, tokens, progress)


def _profile(
    baseline: LazyModel, candidate: LazyModel, plan: Plan, tokens: int, progress: Progress | None
) -> DepthProfile:
    """The profile of a candidate against a baseline; neither is open yet."""
    windows, groups = _chosen(plan, tokens)
    longest, fed = max(len(window.ids) for window in windows), [fed_tokens(window) for window in windows]
    kinds, done = grouping(plan), np.cumsum(fed)
    notes = [f"{len(windows):,} of {len(plan):,} windows are compared, spread over the text"]

    def tell(tokens: int) -> None:
        if progress is not None:
            progress(tokens, 2 * int(done[-1]))

    served_states: list[States] = []
    with closing(opened(candidate, STATES, longest, progress)) as served:
        _require_room(int(done[-1]) * (served.layers + 1) * served.width * 4)
        for index, states in enumerate(served.states(windows)):
            served_states.append(states)
            tell(int(done[index]))
    with closing(opened(baseline, REPLAY, longest, progress)) as layers:
        sizes = [f"{model.layers:,} decoder layers of {model.width:,} numbers" for model in (layers, served)]
        if sizes[0] != sizes[1]:
            message = f"the baseline has {sizes[0]}, and the candidate {sizes[1]}"
            raise EngineError(message, fix="compare models of one architecture")
        sums = ProfileSums(layers.layers, kinds.count)
        for index, (window, states) in enumerate(zip(windows, served_states, strict=True)):
            (baseline_states,), rows = layers.states([window]), window.rows
            sums.add(groups[index], states[:, rows], baseline_states[:, rows], layers.replayed(window, states)[:, rows])
            tell(int(done[-1] + done[index]))
    engines = [f"{model.facts.engine}, {model.facts.dtype}, {model.facts.device}" for model in (layers, served)]
    return DepthProfile(
        names=(name_of(baseline), name_of(candidate)),
        engines=(engines[0], engines[1]),
        places=sums.places(),
        tokens=sums.tokens,
        windows=sums.windows,
        groups=kinds.kind,
        notes=tuple(dict.fromkeys([*notes[: len(windows) < len(plan)], *layers.facts.notes, *served.facts.notes])),
    )


def _chosen(plan: Plan, tokens: int) -> tuple[list[Window], list[Ints]]:
    """Whole windows, spread over the plan, with at most ``tokens`` targets, and the group of each of their targets."""
    with_targets = np.flatnonzero(plan.target_counts > 0)
    count = max(1, int(tokens // max(1.0, plan.target_counts[with_targets].mean())))
    chosen = with_targets[np.unique(np.linspace(0, len(with_targets) - 1, min(count, len(with_targets))).astype(int))]
    numbers, offsets = grouping(plan).of_target, plan.target_offsets
    parts = [numbers[offsets[index] : offsets[index + 1]] for index in chosen]
    return [plan.window(int(index)) for index in chosen], parts


def _require_room(size: int) -> None:
    free = available()
    if free is not None and size > free:
        raise EngineError(
            f"the states between layers take {size_words(size)}, and {size_words(free)} of memory are free",
            fix="give a smaller --max-windows or --context-length",
        )
