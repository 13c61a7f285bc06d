"""``sm.routing``: which tokens a quantized mixture of experts sends to other experts, and the KL of those tokens.

Both models are loaded by Transformers, so the candidate is emulated: its de-quantized weights, not its kernels. A
token's route in a layer is the set of experts that its row is sent to there. It is changed if the sets differ; their
order and weights do not matter. A target belongs to the row that predicts it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from scoremode.core.engine.plugin import Work
from scoremode.core.plan.plan import Plan
from scoremode.core.statistics.estimate import ratio, with_error_fields
from scoremode.core.statistics.statistic import Statistic, estimates
from scoremode.core.verbs.arguments import AllArguments, spelled_out, split_arguments
from scoremode.core.verbs.compare import compare
from scoremode.core.verbs.compared_models import short
from scoremode.core.verbs.model import GivenTokenizer, LazyModel
from scoremode.core.verbs.progress import Progress, announce, shows_progress
from scoremode.errors import OptionError
from scoremode.values import Bools, Estimate, Floats, Ints

ENGINE = "transformers"
EMULATED = "both models were computed by Transformers: a served model may route otherwise"
Routes = npt.NDArray[np.int16]
"""(layers, targets, experts of a token), ascending in the last axis"""


@spelled_out(AllArguments)
@shows_progress
def routing(
    baseline: str,
    candidate: str,
    *,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> Routing:
    """The share of tokens that a candidate sends to other experts than the baseline, by layer, and the KL of each kind.

    >>> sm.routing("org/moe", "org/moe-W4A16", corpus="wikitext2").any_changed    # doctest: +SKIP
    0.412 ± 0.013
    """
    if engine not in (None, ENGINE):
        raise OptionError("routes of experts are read in Transformers", fix="leave --engine out")
    question, options = split_arguments(arguments, needs_text=True)
    found, names, of_experts = list[Routes](), tuple[str, ...](), 0
    for model in (baseline, candidate):  # first: a dense model is refused before anything is scored
        with closing(LazyModel.named(model, ENGINE, options, tokenizer)) as lazy:
            plan = lazy.ask(question, progress).plan
            routes, names, of_experts = _routes(lazy, plan, progress)
            found.append(routes)
    (both,) = compare(baseline, candidate, engine=ENGINE, tokenizer=tokenizer, progress=progress, **arguments)
    assert both.kl is not None, "two models of Transformers have a KL"
    return routing_of(
        (short(baseline), short(candidate)),
        names,
        (found[0], found[1]),
        np.asarray(both.kl),
        np.asarray(both.groups),
        of_experts=of_experts,
    )


def _routes(model: LazyModel, plan: Plan, progress: Progress | None) -> tuple[Routes, tuple[str, ...], int]:
    """The routes of all targets of a plan, the names of the layers, and how many experts there are."""
    from scoremode.engines.transformers.engine import TransformersEngine
    from scoremode.studies.attribution.engines.transformers_layers import RouterHooks

    engine = model.engine(Work(longest=int(plan.lengths.max())), progress)
    assert isinstance(engine, TransformersEngine), "no other engine was asked for"
    hooks = RouterHooks(engine)
    announce(progress, f"reading the routes of {model.subject.name}")
    parts = [hooks.routes(plan.window(index)) for index in range(len(plan)) if plan.target_counts[index]]
    return np.concatenate(parts, axis=1), tuple(hooks.names), hooks.of_experts


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    kl: Floats  # (targets,) nats
    groups: Ints
    changed: Bools  # (layers, targets) has the token other experts there?

    @cached_property
    def anywhere(self) -> Bools:
        return np.asarray(self.changed.any(axis=0))

    @property
    def on_changed(self) -> RoutedTokens:
        return self._some(self.anywhere)

    @property
    def on_same(self) -> RoutedTokens:
        return self._some(~self.anywhere)

    def _some(self, which: Bools) -> RoutedTokens:
        return RoutedTokens(self.kl[which], self.groups[which], self.changed[:, which])


STATISTICS = (
    Statistic("any_changed", "share with other experts in at least one layer", lambda t: t.anywhere, range="share"),
    Statistic("kl", "nats per token, of all tokens", lambda t: t.kl, range="positive"),
    Statistic("kl_changed", "of tokens with a changed route", lambda t: t.kl, rows="on_changed", range="positive"),
    Statistic("kl_same", "of tokens without", lambda t: t.kl, rows="on_same", range="positive"),
    Statistic(
        "share_of_kl",
        "of all KL, the part on tokens with a changed route",
        lambda t: np.where(t.anywhere, t.kl, 0.0),
        per=lambda t: t.kl,
        range="share",
    ),
)


@dataclass(frozen=True, slots=True)
class Routing:
    """The routes of a candidate against those of its baseline. STATISTICS says what the estimates are."""

    names: tuple[str, str]  # of baseline and candidate
    changed: tuple[tuple[str, Estimate], ...]  # by layer: the share of tokens with other experts
    any_changed: Estimate
    kl: Estimate
    kl_changed: Estimate
    kl_same: Estimate
    share_of_kl: Estimate
    experts: int  # that a token is sent to
    of_experts: int
    notes: tuple[str, ...] = (EMULATED,)

    def as_json(self) -> dict[str, Any]:
        numbers = [one.as_fields(getattr(self, one.name)) for one in STATISTICS]
        return {
            "baseline": self.names[0],
            "candidate": self.names[1],
            "experts": self.experts,
            "of_experts": self.of_experts,
            "tokens": self.kl.n,
            "tokens_changed": self.kl_changed.n,
            **dict(pair for own in numbers for pair in own.items()),
            "layers": [{"layer": name, **with_error_fields("changed", share)} for name, share in self.changed],
            "notes": list(self.notes),
        }


def changed_routes(baseline: Routes, candidate: Routes) -> Bools:
    """Whether each target's set of experts differs, (layers, targets)."""
    found: Bools = (np.sort(baseline, axis=2) != np.sort(candidate, axis=2)).any(axis=2)
    return found


def routing_of(
    names: tuple[str, str],
    layers: tuple[str, ...],
    routes: tuple[Routes, Routes],
    kl: Floats,
    groups: Ints,
    *,
    of_experts: int,
) -> Routing:
    """The agreement of two models' routes, and the KL (targets,) of tokens with and without a changed route."""
    tokens, ones = RoutedTokens(kl, groups, changed_routes(*routes)), np.ones(len(kl))
    by_layer = ((name, ratio(own, ones, groups, "share")) for name, own in zip(layers, tokens.changed, strict=True))
    found = estimates(STATISTICS, tokens)
    return Routing(names, tuple(by_layer), **found, experts=routes[0].shape[2], of_experts=of_experts)
