"""``sm.routing``: which tokens a quantized mixture of experts sends to other experts, and the KL of those tokens.

Both models are loaded by Transformers, so the candidate is emulated: its de-quantized weights, not its kernels.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Unpack

import numpy as np

from scoremode.core.engine.plugin import Work
from scoremode.core.plan.plan import Plan
from scoremode.core.verbs.arguments import AllArguments, spelled_out, split_arguments
from scoremode.core.verbs.compare import compare
from scoremode.core.verbs.model import GivenTokenizer, LazyModel
from scoremode.core.verbs.progress import Progress, announce
from scoremode.core.verbs.progress_display import shows_progress
from scoremode.core.verbs.sides import short
from scoremode.errors import OptionError
from scoremode.studies.attribution.routing_statistics import Routes, Routing, routing_of

ENGINE = "transformers"
EMULATED = "both models were computed by Transformers: a served model may route otherwise"


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
    result = routing_of(
        (short(baseline), short(candidate)),
        names,
        (found[0], found[1]),
        np.asarray(both.kl),
        np.asarray(both.groups),
        of_experts=of_experts,
    )
    return replace(result, notes=(EMULATED,))


def _routes(model: LazyModel, plan: Plan, progress: Progress | None) -> tuple[Routes, tuple[str, ...], int]:
    """The routes of all targets of a plan, the names of the layers, and how many experts there are."""
    from scoremode.engines.transformers.engine import TransformersEngine
    from scoremode.studies.attribution.engines.transformers_routing import RouterHooks

    engine = model.engine(Work(longest=int(plan.lengths.max())), progress)
    assert isinstance(engine, TransformersEngine), "no other engine was asked for"
    hooks = RouterHooks(engine)
    announce(progress, f"reading the routes of {model.subject.name}")
    parts = list(hooks.routes(plan.window(index) for index in range(len(plan)) if plan.target_counts[index]))
    return np.concatenate(parts, axis=1), tuple(hooks.names), hooks.of_experts
