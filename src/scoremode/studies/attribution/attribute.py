"""``scoremode attribute``: which layers and matrices of a candidate do the damage.

Each unit of the candidate's weights is put into the baseline, alone, and compared with the baseline over the whole
vocabulary. The sum of these parts, all weights together, and the candidate as it is served make up the account.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import msgspec
import numpy as np
from msgspec import structs

from scoremode.core.disk.folders import entry_folder
from scoremode.core.disk.uri import RemotePath, located
from scoremode.core.engine.plugin import Work
from scoremode.core.plan.path import DECODE
from scoremode.core.verbs.arguments import AllArguments, spelled_out, split_arguments
from scoremode.core.verbs.compare import compare
from scoremode.core.verbs.compared_models import CompareRequest, assign_engines, short
from scoremode.core.verbs.model import GivenTokenizer, LazyModel
from scoremode.core.verbs.progress import Progress
from scoremode.core.verbs.progress_display import shows_progress
from scoremode.core.verbs.question import Question
from scoremode.core.verbs.run_contents import describe_engine
from scoremode.core.verbs.scoring import check_fits
from scoremode.errors import InputError, OptionError, RunError, did_you_mean, print_line
from scoremode.studies.attribution.cells import Cells, Damage, PlanCells
from scoremode.studies.attribution.recipe import Budget, RecipeOptions, make_recipe, write_tools
from scoremode.studies.attribution.result import Attribution, CandidateDamage, Recipe
from scoremode.studies.attribution.swap_loop import (
    AGAIN,
    AttributionFolder,
    Candidate,
    Stored,
    SwapMeasurement,
    formats_of,
    open_candidates,
    record_number,
    stored_bits,
)
from scoremode.studies.attribution.units import BY, Unit, units_of
from scoremode.studies.attribution.weight_formats.round_to_nearest import PREFIX as MADE
from scoremode.studies.attribution.weight_formats.round_to_nearest import read_name
from scoremode.studies.attribution.weights import candidate_fingerprint

if TYPE_CHECKING:
    from scoremode.core.statistics.comparison import Comparison

KEPT_AS = ("KL of parts and of the whole is of weights alone: activations are computed as the baseline computes them",)


@dataclass(frozen=True, slots=True)
class AttributeRequest:
    """The user's request, without the question."""

    baseline: str
    candidates: tuple[str, ...]
    by: str
    engine: str | None  # that serves the candidates, to be measured beside the weights
    tokenizer: GivenTokenizer | None
    budget: Budget

    def check(self, question: Mapping[str, Any]) -> None:
        """Refuses what cannot be, before anything is loaded."""
        if self.by not in BY:
            raise OptionError(f"--by {self.by} is not known", fix=did_you_mean(self.by, BY))
        if not self.candidates:
            raise InputError("there is no candidate", fix="name one after the baseline, as in rtn:4:32")
        for name in self.candidates:
            if name.startswith(MADE):
                read_name(name)
        if len({short(name) for name in self.candidates}) < len(self.candidates):
            raise InputError("two candidates have the same name", fix="rename one, so that tables can tell them apart")
        if question.get("path") == DECODE:
            raise OptionError("attribute has the prefill path only", fix="leave --path out")

    def as_json(self) -> dict[str, Any]:
        budget = self.budget.words if self.budget else None
        return {"candidates": list(self.candidates), "by": self.by, "engine": self.engine, "budget": budget}


@spelled_out(AllArguments)
@shows_progress
def attribute(
    baseline: str,
    *candidates: str,
    by: str = "layer",
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    bits_budget: float | None = None,
    kl_budget: float | None = None,
    write_recipe: str | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> Attribution:
    """Measures what each unit of a candidate's weights does to the baseline: a layer, a kind of matrix, or a matrix.

    A candidate is another version of the baseline: quantized (compressed-tensors, GPTQ, AWQ, GGUF, EXL3), fine-tuned,
    or ``rtn:BITS:GROUP``, the baseline rounded to nearest. ``engine`` serves the candidate as well, and the result says
    how much of the damage is not in the weights. ``arguments`` are those of a question, and options of Transformers,
    which computes the baseline, and of ``engine``.

    With ``bits_budget`` (mean bits per weight, embedding and head included) or ``kl_budget``, a mixture of candidates
    and baseline is chosen on the first half of the windows, built, and measured on the second half. ``write_recipe`` is
    the beginning of the names of files that tools read.

    Every finished unit is kept at once, in ``out`` or in the cache, and the same call resumes.

    >>> sm.attribute("org/model", "rtn:4:32", corpus="wikitext2")[0].units[3].name     # doctest: +SKIP
    'layer 2'
    """
    request = AttributeRequest(
        str(baseline), tuple(map(str, candidates)), by, engine, tokenizer, Budget(bits_budget, kl_budget)
    )
    question, options = split_arguments(arguments, needs_text=True)
    request.check(question)
    request.budget.check(write_recipe)
    where = located(out) if out is not None else None
    if isinstance(where, RemotePath):
        raise OptionError("--out of attribute is a folder of this machine", fix="give a folder")
    served = [name for name in request.candidates if not name.startswith(MADE)] if engine else []
    if engine and not served:
        raise OptionError(f"--engine {engine} serves none of the candidates: rtn is emulated", fix="leave --engine out")
    wanted = CompareRequest(engine, options, "transformers", None, tokenizer)
    own, _ = assign_engines(request.baseline, served, wanted)
    if own is None or own.plugin.name != "transformers":  # a run, or a format that another engine opens
        raise InputError(f"{request.baseline} has no weights to swap", fix="give a checkpoint as the baseline")
    with closing(own.prepare()) as model:
        if model.spread is not None:
            raise OptionError("attribute measures units in one process", fix="leave --replicas out")
        asked = model.ask(question, progress)
        check_fits(asked.plan, asked.subject.vocabulary, asked.subject.context_length)
        token = getattr(model.chosen.options, "token", None)
        prints = {name: candidate_fingerprint(name, token) for name in request.candidates}
        identity = model.identity(asked)
        with AttributionFolder(where or entry_folder("attributions", identity), identity, fresh=fresh) as folder:
            known = {**request.as_json(), "fingerprints": prints}
            found = _kept(folder, known)
            if found is None:
                work = _Work(request, asked, model, folder, prints, progress)
                manifest = {"request": known, **work.measured(), **work.served(served, arguments)}
                found = _restored(folder, folder.save(manifest))
    if write_recipe is not None and found.recipe is not None:
        write_tools(found.recipe, write_recipe)
    return found


@dataclass(frozen=True, slots=True)
class _Work:
    request: AttributeRequest
    asked: Question
    model: LazyModel
    folder: AttributionFolder
    prints: Mapping[str, str]
    progress: Progress | None

    def measured(self) -> dict[str, Any]:
        """Swaps all units of all candidates; returns the manifest of what was measured. Sums are in the folder."""
        from scoremode.engines.transformers.engine import TransformersEngine
        from scoremode.studies.attribution.engines.transformers_swaps import SwappableModel

        plan, subject, token = self.asked.plan, self.asked.subject, getattr(self.model.chosen.options, "token", None)
        opened, cells = self.model.engine(Work(longest=int(plan.lengths.max())), self.progress), PlanCells(plan)
        assert isinstance(opened, TransformersEngine)
        assert subject.checkpoint is not None
        with SwappableModel(opened) as swaps:
            own, candidates = open_candidates(
                swaps, subject.checkpoint.path, self.prints, name=subject.name, token=token
            )
            check_fits(plan, opened.facts.vocabulary, opened.facts.context_length)
            units = units_of({name: one.shape for name, one in own.items()}, self.request.by, swaps.layers_name)
            model_type = str(swaps.model.config.to_dict().get("model_type", ""))
            choices = RecipeOptions({one.name: one for one in candidates}, own, units, model_type)
            choices.check(self.request.budget)
            self.folder.begin()
            measurement = SwapMeasurement(
                swaps, candidates, plan, cells=cells, folder=self.folder, progress=self.progress
            )
            measurement.measure([candidate.job(unit) for candidate in candidates for unit in (*units, None)])
            recipe = make_recipe(self.request.budget, choices, measurement) if self.request.budget else None
            noise_kl, perturbed = measurement.noise()
            engine = opened.facts  # some are known after the first divergence
            notes = [*engine.notes, *swaps.notes, *KEPT_AS]
        if engine.dtype in ("bfloat16", "float16"):
            notes.append(f"de-quantized weights are rounded to {engine.dtype}, in which the baseline computes")
        return {
            "baseline": short(self.request.baseline),
            "by": self.request.by,
            "cells": cells.cells.as_json(),
            "noise_kl": None if noise_kl is None else noise_kl.tolist(),
            "noise_perturbed": perturbed,
            "facts": {
                "corpus": self.asked.corpus.name,
                "method": plan.method,
                "method_settings": dict(plan.settings),
                "windows": len(plan),
                "forward_tokens": plan.forward_tokens,
                "stderr_groups": cells.kind,
                **describe_engine(engine),
            },
            "notes": [*notes, *plan.notes],
            "candidates": [_candidate(candidate, own, units) for candidate in candidates],
            "recipe": recipe,
        }

    def served(self, candidates: Sequence[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Compares the candidates as an engine serves them with the baseline: normal comparisons, kept in the cache."""
        if not candidates:
            return {}
        self.model.close()
        cells, found = PlanCells(self.asked.plan), {}
        for name in candidates:
            number = record_number(self.prints[name], "served", str(self.request.engine), repr(sorted(arguments)))
            compared = compare(
                self.request.baseline,
                name,
                engine=self.request.engine,
                baseline_engine="transformers",
                tokenizer=self.request.tokenizer,
                progress=self.progress,
                **arguments,
            )[0]
            if compared.baseline.plan_digest != self.asked.plan.digest:
                raise InputError(f"{name} was served with other windows", fix="give --context-length")
            self.folder.add(number, _damage_of(compared, cells).packed())
            found[short(name)] = {"record": number, "engine": compared.candidate.manifest["engine"]}
        return {"served": found}


def _candidate(candidate: Candidate, own: Stored, units: Sequence[Unit]) -> dict[str, Any]:
    """What the manifest keeps of a candidate."""
    weights = candidate.weights.stored
    return {
        "name": short(candidate.name),
        "bits_per_weight": stored_bits(weights, tuple(weights)) / sum(unit.weights for unit in units),
        "notes": list(candidate.weights.notes),
        "whole": candidate.job(None).number,
        "units": [
            {
                "name": unit.name,
                "layer": unit.layer,
                "kind": unit.kind,
                "weights": unit.weights,
                "format": formats_of(weights, unit.tensors),
                "bits": stored_bits(weights, unit.tensors) / unit.weights,
                "bits_saved": stored_bits(own, unit.tensors) - stored_bits(weights, unit.tensors),
                "record": candidate.job(unit).number,
            }
            for unit in units
        ],
    }


def _damage_of(compared: Comparison, cells: PlanCells) -> Damage:
    rows = compared.rows
    if rows.kl is None or rows.base_top is None or rows.cand_top is None:
        raise InputError(f"the engine of {compared.name} gives no KL", fix="leave --engine out")
    return cells.damage(rows.kl, rows.moved, rows.base_top == rows.cand_top)


def _kept(folder: AttributionFolder, known: Mapping[str, Any]) -> Attribution | None:
    """The finished attribution in a folder; None if it answers another request, or lacks records: they are measured.

    ``known`` is the request that it must answer.
    """
    if folder.finished is None or folder.finished["request"] != known:
        return None
    try:
        return _restored(folder, folder.finished)
    except KeyError:
        print_line(f"scoremode: records of {folder.folder} are lost: what is missing is measured again")
    except (ValueError, msgspec.ValidationError) as error:
        raise RunError(f"{folder.folder} cannot be right: {error}", fix=AGAIN) from None
    return None


def _restored(folder: AttributionFolder, stored: Mapping[str, Any]) -> Attribution:
    """The attribution in a folder: its manifest, with the sums in its records instead of their numbers."""
    cells = Cells.from_json(stored["cells"])

    opened = partial(msgspec.convert, dec_hook=lambda _, number: cells.damage(folder.records[number]))
    candidates = opened(stored["candidates"], tuple[CandidateDamage, ...])
    for name, its in stored.get("served", {}).items():
        served = {"served": opened(its["record"], Damage), "served_by": its["engine"]}
        candidates = tuple(structs.replace(one, **served) if one.name == name else one for one in candidates)
    recipe = opened(stored["recipe"], Recipe | None)
    return Attribution(
        **{name: stored[name] for name in ("baseline", "by", "noise_perturbed", "facts")},
        cells=cells,
        candidates=candidates,
        noise_kl=None if stored["noise_kl"] is None else np.asarray(stored["noise_kl"]),
        notes=tuple(stored["notes"]),
        recipe=None if recipe is None else structs.replace(recipe, uniform=candidates),
    )
