"""``scoremode attribute``: which layers and matrices of a candidate do the damage.

Each unit of the candidate's weights is put into the baseline, alone, and compared with the baseline over the whole
vocabulary. The sum of these parts, all weights together, and the candidate as it is served make up the account.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import numpy as np

from scoremode.core.disk.folders import entry_folder
from scoremode.core.disk.uri import RemotePath, located
from scoremode.core.engine.base import EngineFacts
from scoremode.core.engine.baseline import noise_floor
from scoremode.core.engine.options import CheckpointOptions
from scoremode.core.engine.registry import can
from scoremode.core.plan.path import DECODE
from scoremode.core.plan.question import Question
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.text.corpus import Spec
from scoremode.core.verbs.arguments import AllArguments, read_arguments, spelled_out
from scoremode.core.verbs.compare import compare
from scoremode.core.verbs.compared_models import CompareRequest, assign_engines, short
from scoremode.core.verbs.model import LazyModel, tokenizer_name
from scoremode.core.verbs.planned import PlannedQuestion
from scoremode.core.verbs.progress import Progress, announce, shows_progress
from scoremode.core.verbs.run_contents import describe_engine
from scoremode.core.verbs.scoring import check_fits
from scoremode.errors import InputError, OptionError, did_you_mean
from scoremode.studies.attribution.abilities import SWAPS, engine_with, opened
from scoremode.studies.attribution.recipe import Budget, Choices, make_recipe, write_tools
from scoremode.studies.attribution.result import Attribution, CandidateDamage, Cells, UnitDamage
from scoremode.studies.attribution.swap_loop import (
    AttributionFolder,
    Candidate,
    SwapMeasurement,
    formats_of,
    open_candidates,
    stored_bits,
)
from scoremode.studies.attribution.units import BY, Unit, units_of
from scoremode.studies.attribution.weight_formats.round_to_nearest import PREFIX as MADE
from scoremode.studies.attribution.weight_formats.round_to_nearest import read_name
from scoremode.studies.attribution.weight_formats.stored import Stored
from scoremode.studies.attribution.weights import candidate_fingerprint

KEPT_AS = "KL of parts and of the whole is of weights alone: activations are computed as the baseline computes them"


@spelled_out(AllArguments)
@shows_progress
def attribute(
    baseline: str,
    *candidates: str,
    by: str = "layer",
    engine: str | None = None,
    tokenizer: Spec | None = None,
    bits_budget: float | None = None,
    kl_budget: float | None = None,
    write_recipe: str | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> Attribution:
    """Measures what each unit of a candidate's weights does to the baseline; ``by`` says what a unit is, as a layer.

    A candidate is another version of the baseline: quantized (compressed-tensors, GPTQ, AWQ, GGUF), fine-tuned, or
    ``rtn:BITS:GROUP``, the baseline rounded to nearest. ``engine`` serves the candidate as well, and the result says
    how much of the damage is not in the weights. ``arguments`` are those of a question, and options of Transformers,
    which computes the baseline, and of ``engine``.

    With ``bits_budget`` (mean bits per weight, embedding and head included) or ``kl_budget``, a mixture of candidates
    and baseline is chosen on the first half of the windows, built, and measured on the second half. ``write_recipe`` is
    the beginning of the names of files that tools read.

    Every finished unit is kept at once, in ``out`` or in the cache, and the same call resumes.

    >>> sm.attribute("org/model", "rtn:4:32", corpus="wikitext2")[0].units[3].name     # doctest: +SKIP
    'layer 2'
    """
    names, budget = tuple(map(str, candidates)), Budget(bits_budget, kl_budget)
    question, options = read_arguments(arguments)
    question = question.with_text()
    _check(names, by, question)
    budget.check(write_recipe)
    where = located(out) if out is not None else None
    if isinstance(where, RemotePath):
        raise OptionError("--out of attribute is a folder of this machine", fix="give a folder")
    served = [name for name in names if not name.startswith(MADE)] if engine else []
    if engine and not served:
        raise OptionError(f"--engine {engine} serves none of the candidates: rtn is emulated", fix="leave --engine out")
    wanted = CompareRequest(engine, options, engine_with(SWAPS), None, tokenizer_name(tokenizer))
    model, _ = assign_engines(str(baseline), served, wanted)
    if model is None or not can(model.plugin, SWAPS):  # a run, or a format that another engine opens
        raise InputError(f"{baseline} has no weights to swap", fix="give a checkpoint as the baseline")
    with closing(model):
        if model.spread is not None:
            raise OptionError("attribute measures units in one process", fix="leave --replicas out")
        full_question = model.ask(question, progress)
        check_fits(full_question.plan, full_question.subject.vocabulary, full_question.subject.context_length)
        prints = {name: candidate_fingerprint(name, _checkpoint_options(model).token) for name in names}
        identity, cells = model.identity(full_question), Cells.of(full_question.plan)
        with AttributionFolder(where or entry_folder("attributions", identity), identity, fresh=fresh) as folder:
            attribution = _swapped(
                model,
                full_question,
                cells,
                folder,
                prints=prints,
                by=by,
                budget=budget,
                progress=progress,
            )
            measured = list(attribution.candidates)
            for name in served:
                (compared,) = compare(
                    str(baseline),
                    name,
                    engine=engine,
                    baseline_engine=model.plugin.name,
                    tokenizer=tokenizer,
                    progress=progress,
                    **arguments,
                )
                at = names.index(name)
                measured[at] = _with_served(measured[at], compared, cells, full_question.plan.digest)
            attribution = replace(attribution, baseline=short(str(baseline)), candidates=tuple(measured))
            folder.finish({"identity": identity, **attribution.as_json()})
    if write_recipe is not None and attribution.recipe is not None:
        write_tools(attribution.recipe, write_recipe)
    return attribution


def _checkpoint_options(model: LazyModel) -> CheckpointOptions:
    options = model.chosen.options
    assert isinstance(options, CheckpointOptions), "its engine loads checkpoints"
    return options


def _with_served(candidate: CandidateDamage, compared: Comparison, cells: Cells, digest: str) -> CandidateDamage:
    """Adds the damage of a candidate as an engine serves it: a normal comparison with the baseline."""
    if compared.baseline.plan_digest != digest:
        raise InputError(f"{candidate.name} was served with other windows", fix="give --context-length")
    if compared.kl is None or compared.same_first_choice is None:
        raise InputError(f"the engine of {compared.name} gives no KL", fix="leave --engine out")
    damage = cells.sums(compared.kl, compared.moved, compared.same_first_choice)
    return replace(candidate, served=damage, served_by=compared.candidate.manifest["engine"])


def _check(candidates: Sequence[str], by: str, question: Question) -> None:
    """Refuses what cannot be, before anything is loaded."""
    if by not in BY:
        raise OptionError(f"--by {by} is not known", fix=did_you_mean(by, BY))
    if not candidates:
        raise InputError("there is no candidate", fix="name one after the baseline, as in rtn:4:32")
    for name in candidates:
        if name.startswith(MADE):
            read_name(name)
    if len({short(name) for name in candidates}) < len(candidates):
        raise InputError("two candidates have the same name", fix="rename one, so that tables can tell them apart")
    if question.path == DECODE:
        raise OptionError("attribute has the prefill path only", fix="leave --path out")


def _swapped(
    model: LazyModel,
    question: PlannedQuestion,
    cells: Cells,
    folder: AttributionFolder,
    *,
    prints: Mapping[str, str],
    by: str,
    budget: Budget,
    progress: Progress | None,
) -> Attribution:
    """Swaps all units of all candidates, whose names are given with their fingerprints."""
    plan, subject = question.plan, question.subject
    with opened(model, SWAPS, int(plan.lengths.max()), progress) as swaps:
        swaps.engine.show = getattr(progress, "detail", None)
        baseline_stored, candidates = open_candidates(swaps, subject, prints, _checkpoint_options(model))
        facts: EngineFacts = swaps.engine.facts
        check_fits(plan, facts.vocabulary, facts.context_length)
        units = units_of({name: weight.shape for name, weight in baseline_stored.items()}, by, swaps.layers_name)
        choices = Choices(candidates, baseline_stored, units, str(swaps.model.config.to_dict().get("model_type", "")))
        choices.check(budget)
        folder.begin({"baseline": short(subject.name), "corpus": question.corpus.name})
        measurement = SwapMeasurement(swaps, candidates, plan, cells=cells, folder=folder, progress=progress)
        measurement.measure([candidate.job(unit) for candidate in candidates for unit in (*units, None)])
        measured = tuple(_candidate(candidate, baseline_stored, units, measurement) for candidate in candidates)
        recipe = make_recipe(budget, choices, measured, measurement) if budget else None
        announce(progress, "computing the noise floor")
        floor = noise_floor(swaps.engine, plan)
        facts = swaps.engine.facts  # some are known after the first divergence
        notes = [*facts.notes, *swaps.notes, KEPT_AS]
    if facts.dtype in ("bfloat16", "float16"):
        notes.append(f"de-quantized weights are rounded to {facts.dtype}, in which the baseline computes")
    return Attribution(
        baseline=subject.name,
        by=by,
        cells=cells,
        candidates=measured,
        noise=None if floor.kl is None or not len(floor.kl) else float(np.mean(floor.kl)),
        noise_perturbed=floor.words,
        facts={
            "corpus": question.corpus.name,
            "method": plan.method,
            "method_settings": dict(plan.settings),
            "windows": len(plan),
            "forward_tokens": plan.forward_tokens,
            "stderr_groups": cells.kind,
            **describe_engine(facts),
        },
        notes=(*notes, *plan.notes),
        recipe=recipe,
    )


def _candidate(
    candidate: Candidate, baseline_stored: Stored, units: Sequence[Unit], measurement: SwapMeasurement
) -> CandidateDamage:
    weights = candidate.weights.stored
    whole, *each = measurement.measure([candidate.job(unit) for unit in (None, *units)])
    measured = [
        UnitDamage(
            name=unit.name,
            layer=unit.layer,
            kind=unit.kind,
            weights=unit.weights,
            format=formats_of(weights, unit.tensors),
            bits=stored_bits(weights, unit.tensors) / unit.weights,
            bits_saved=stored_bits(baseline_stored, unit.tensors) - stored_bits(weights, unit.tensors),
            damage=damage,
        )
        for unit, damage in zip(units, each, strict=True)
    ]
    bits = stored_bits(weights, tuple(weights)) / sum(unit.weights for unit in units)
    return CandidateDamage(short(candidate.name), bits, tuple(measured), whole, notes=tuple(candidate.weights.notes))
