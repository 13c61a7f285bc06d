"""``sm.routing``: which tokens a quantized mixture of experts sends to other experts, and the KL of those tokens.

Both models are loaded by Transformers, so the candidate is emulated: its de-quantized weights, not its kernels. A
token's route in a layer is the set of experts that its row is sent to there. It is changed if the sets differ; their
order and weights do not matter. A target belongs to the row that predicts it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from scoremode.core.plan.plan import Plan
from scoremode.core.statistics.estimate import ratio, with_error_fields
from scoremode.core.verbs.arguments import AllArguments, read_arguments, spelled_out
from scoremode.core.verbs.compare import compare
from scoremode.core.verbs.compared_models import short
from scoremode.core.verbs.model import GivenTokenizer, LazyModel
from scoremode.core.verbs.progress import Progress, announce, shows_progress
from scoremode.errors import OptionError
from scoremode.studies.attribution.abilities import ROUTES, engine_with, opened
from scoremode.studies.attribution.result import fields_of
from scoremode.values import Bools, Estimate, Floats, Ints

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
    reader = engine_with(ROUTES)
    if engine not in (None, reader):
        raise OptionError("routes of experts are read in Transformers", fix="leave --engine out")
    question, options = read_arguments(arguments)
    question = question.with_text()
    all_routes, names, of_experts = list[Routes](), tuple[str, ...](), 0
    for model in (baseline, candidate):  # first: a dense model is refused before anything is scored
        with closing(LazyModel.named(model, reader, options, tokenizer)) as lazy:
            plan = lazy.ask(question, progress).plan
            routes, names, of_experts = _routes(lazy, plan, progress)
            all_routes.append(routes)
    (both,) = compare(baseline, candidate, engine=reader, tokenizer=tokenizer, progress=progress, **arguments)
    assert both.kl is not None, "two models of Transformers have a KL"
    return routing_of(
        (short(baseline), short(candidate)),
        names,
        (all_routes[0], all_routes[1]),
        np.asarray(both.kl),
        np.asarray(both.groups),
        of_experts=of_experts,
    )


def _routes(model: LazyModel, plan: Plan, progress: Progress | None) -> tuple[Routes, tuple[str, ...], int]:
    """The routes of all targets of a plan, the names of the layers, and how many experts there are."""
    with closing(opened(model, ROUTES, int(plan.lengths.max()), progress)) as hooks:
        announce(progress, f"reading the routes of {model.subject.name}")
        parts = [hooks.routes(plan.window(index)) for index in range(len(plan)) if plan.target_counts[index]]
        return np.concatenate(parts, axis=1), tuple(hooks.names), hooks.of_experts


@dataclass(frozen=True, slots=True)
class Routing:
    """The routes of a candidate against those of its baseline."""

    names: tuple[str, str]  # of baseline and candidate
    changed: tuple[tuple[str, Estimate], ...]  # by layer: the share of tokens with other experts
    any_changed: Estimate  # the share with other experts in at least one layer
    kl: Estimate  # nats per token, of all tokens
    kl_changed: Estimate  # of tokens with a changed route
    kl_same: Estimate  # of tokens without
    share_of_kl: Estimate  # of all KL, the part on tokens with a changed route
    experts: int  # that a token is sent to
    of_experts: int
    notes: tuple[str, ...] = (EMULATED,)

    def as_json(self) -> dict[str, Any]:
        estimates = ("any_changed", "kl", "kl_changed", "kl_same", "share_of_kl")
        return {
            "baseline": self.names[0],
            "candidate": self.names[1],
            "experts": self.experts,
            "of_experts": self.of_experts,
            "tokens": self.kl.n,
            "tokens_changed": self.kl_changed.n,
            **fields_of({name: getattr(self, name) for name in estimates}),
            "layers": [{"layer": name, **with_error_fields("changed", share)} for name, share in self.changed],
            "notes": list(self.notes),
        }


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
    changed: Bools = np.asarray((routes[0] != routes[1]).any(axis=2))  # (layers, targets)
    moved, ones = np.asarray(changed.any(axis=0)), np.ones(len(kl))
    return Routing(
        names,
        tuple((name, ratio(row, ones, groups, "share")) for name, row in zip(layers, changed, strict=True)),
        any_changed=ratio(moved, ones, groups, "share"),
        kl=ratio(kl, ones, groups, "positive"),
        kl_changed=ratio(kl[moved], ones[moved], groups[moved], "positive"),
        kl_same=ratio(kl[~moved], ones[~moved], groups[~moved], "positive"),
        share_of_kl=ratio(np.where(moved, kl, 0.0), kl, groups, "share"),
        experts=routes[0].shape[2],
        of_experts=of_experts,
    )
