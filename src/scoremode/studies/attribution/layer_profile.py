"""``sm.layer_profile``: a served model's hidden states after each layer against the baseline's, on the same tokens.

candidate, as it is served ──▶ states between its layers, in memory
baseline, by Transformers  ──▶ the same places; its layers on the candidate's states
                                                 └──▶ sums per layer and group, window by window ──▶ DepthProfile

One model is open at a time.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Unpack, cast

import numpy as np

from scoremode.core.arguments import whole_number
from scoremode.core.cache.units import size_words
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import open_for, require
from scoremode.core.free_memory import available
from scoremode.core.plan.plan import Plan
from scoremode.core.scores.answers import Window
from scoremode.core.statistics.groups import grouping
from scoremode.core.verbs.arguments import AllArguments, EngineOptionArguments, spelled_out, split_arguments
from scoremode.core.verbs.baselines import comparable_facts, require_same_question
from scoremode.core.verbs.compared_models import CompareRequest, assign_engines, name_of
from scoremode.core.verbs.model import GivenTokenizer, LazyModel
from scoremode.core.verbs.progress import Progress, announce, shows_progress
from scoremode.core.verbs.scoring import check_fits
from scoremode.errors import EngineError, InputError, OptionError
from scoremode.studies.attribution.depth_profile import DepthProfile, LayerStates, ProfileSums, States, fed_tokens
from scoremode.values import Ints

if TYPE_CHECKING:
    from scoremode.studies.attribution.engines.transformers_layers import TransformersLayers

TOKENS = 4096  # tokens of a profile: a layer's error needs few


@spelled_out(AllArguments)
@shows_progress
def layer_profile(
    baseline: str,
    candidate: str,
    *,
    tokens: int = TOKENS,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
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
    question, options = split_arguments(arguments, needs_text=True)
    if question.get("path") not in (None, "prefill"):
        raise OptionError("hidden states between layers are computed by prefill", fix="leave --path out")
    if (whole_number("tokens", tokens) or 0) < 1:
        raise OptionError(f"tokens={tokens} leaves nothing to compare", fix="give a number of at least 1")
    wanted = CompareRequest(engine, options, "transformers", baseline_options, tokenizer)
    its, candidates = assign_engines(baseline, [candidate], wanted, divergence=False)
    if its is None or not candidates or its.plugin.name != "transformers":
        which = candidate if its is not None and its.plugin.name == "transformers" else baseline
        raise InputError(
            f"a profile of layers needs two models, the baseline in a format of Transformers, and {which} is not one",
            fix="give a checkpoint as the baseline",
        )
    with closing(its.prepare()) as first, closing(candidates[candidate].prepare()) as second:
        for model in (first, second):
            require(model.plugin, "layer_states", "give hidden states between layers")
            if model.spread is not None:
                raise OptionError("hidden states between layers come from one engine", fix="leave --replicas out")
        asked = first.ask(question, progress)
        require_same_question(comparable_facts(asked), second.ask(question, progress), asked.tokens.ids)
        check_fits(asked.plan, asked.subject.vocabulary, asked.subject.context_length)
        return _profile(first, second, asked.plan, tokens, progress)


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
    with closing(_open_layers(candidate, longest, progress)) as served:
        _require_room(int(done[-1]) * (served.layers + 1) * served.width * 4)
        for index, states in enumerate(served.states(windows)):
            served_states.append(states)
            tell(int(done[index]))
    with closing(cast("TransformersLayers", _open_layers(baseline, longest, progress))) as layers:
        sizes = [f"{own.layers:,} decoder layers of {own.width:,} numbers" for own in (layers, served)]
        if sizes[0] != sizes[1]:
            what = f"the baseline has {sizes[0]}, and the candidate {sizes[1]}"
            raise EngineError(what, fix="compare models of one architecture")
        sums = ProfileSums(layers.layers, kinds.count)
        for index, (window, states) in enumerate(zip(windows, served_states, strict=True)):
            (own,), rows = layers.states([window]), window.rows
            sums.add(groups[index], states[:, rows], own[:, rows], layers.replayed(window, states)[:, rows])
            tell(int(done[-1] + done[index]))
    return DepthProfile(
        names=(name_of(baseline), name_of(candidate)),
        engines=(_served_by(layers), _served_by(served)),
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


def _open_layers(model: LazyModel, longest: int, progress: Progress | None) -> LayerStates:
    """Opens a model to give hidden states between its layers (the ability "layer_states")."""
    announce(progress, f"loading {model.subject.name} with {model.engine_name}")
    layers: LayerStates = open_for(model.chosen, "layer_states", Work(longest=longest))
    return layers


def _require_room(size: int) -> None:
    free = available()
    if free is not None and size > free:
        raise EngineError(
            f"the states between layers take {size_words(size)}, and {size_words(free)} of memory are free",
            fix="give a smaller --max-windows or --context-length",
        )


def _served_by(layers: LayerStates) -> str:
    return f"{layers.facts.engine}, {layers.facts.dtype}, {layers.facts.device}"
