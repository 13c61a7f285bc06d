"""What changed between a baseline and its candidates: the same plan, target by target, over the whole vocabulary.

Each candidate is scored once, against the baseline's hidden states; each model's distribution is made by its own head,
so that a quantized head is seen. What cannot be compared is refused, never cut to fit.

names ──▶ settings of models, finished runs ──▶ compare_with(baseline, candidate) for each model ──▶ Comparisons
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from scoremode.core.disk.folders import REFERENCE, ROWS
from scoremode.core.disk.stores import is_there
from scoremode.core.disk.uri import RemotePath, is_uri
from scoremode.core.engine.registry import require_path
from scoremode.core.extensions import ComparisonBaseline, Format, FormatOffer, offered
from scoremode.core.plan.question import Question
from scoremode.core.statistics.comparison import BY_NAME, FIELDS, Comparison, Comparisons, needs_whole_divergence
from scoremode.core.store.run import Run
from scoremode.core.store.runs import Claim
from scoremode.core.text.corpus import Spec, kind_of
from scoremode.core.typed import checked
from scoremode.core.verbs.argument_types import EngineOptionArguments
from scoremode.core.verbs.arguments import (
    AllArguments,
    command_for,
    read_arguments,
    spelled_out,
)
from scoremode.core.verbs.baselines import (
    ModelBaseline,
    StoredRun,
    compare_with,
    is_by_logits,
    of_runs,
    require_none,
    stored_baseline,
)
from scoremode.core.verbs.cache_types import HINT, CacheTypes
from scoremode.core.verbs.compared_models import (
    CompareRequest,
    assign_engines,
    expand_candidates,
    folder_name,
    is_stored,
    place_of,
    require_candidates,
    short,
)
from scoremode.core.verbs.model import GivenModel, LazyModel, is_loaded, tell_starts, tokenizer_name
from scoremode.core.verbs.place import Place
from scoremode.core.verbs.planned import PlannedQuestion
from scoremode.core.verbs.progress import Progress, announce, shows_progress
from scoremode.core.verbs.reference import reference_of
from scoremode.errors import (
    CandidatesError,
    CorpusError,
    EngineError,
    InputError,
    MethodError,
    OptionError,
    ScoremodeError,
    StorageError,
    did_you_mean,
)

Outputs = list[tuple[Format, str | Path | None]]
"""Formats of files that every comparison leaves, each with one more place for them, if one was named."""


class OutputArguments(TypedDict, total=False):
    """Places of such files, named here for editors and type checkers alone."""

    records: str | Path | None
    """a folder for the record of each candidate"""


class CompareArguments(AllArguments, OutputArguments, total=False):
    """Arguments of a question, of a model, and files that wings write."""


def split_outputs(arguments: Mapping[str, Any]) -> tuple[Outputs, Mapping[str, Any]]:
    """Splits arguments into the files that are left, with their places, and all others."""
    rest = dict(arguments)
    return [(kind.load(), rest.pop(kind.name, None)) for kind in offered(FormatOffer) if kind.compare], rest


def check_outputs(outputs: Outputs, candidates: Mapping[str, Path | RemotePath | None]) -> None:
    for output, folder in outputs:
        output.check(folder, candidates)


def leave(outputs: Outputs, found: Sequence[Comparison], place: Place, failure: CandidatesError | None = None) -> None:
    """Writes the files. Raises an error that has the results if they cannot be written, or the ``failure`` of some."""
    try:
        for output, folder in outputs if found else ():
            output.write(found, place, folder)
    except ScoremodeError as unwritten:
        known = ({c.name: c for c in found}, {}) if failure is None else (failure.found, failure.failed)
        raise CandidatesError(*known, unwritten) from None
    if failure is not None:
        raise failure


@spelled_out(CompareArguments)
@shows_progress
def compare(
    baseline: GivenModel,
    *candidates: GivenModel,
    engine: str | None = None,
    tokenizer: Spec | None = None,
    baseline_engine: str | None = None,
    baseline_options: EngineOptionArguments | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    keep: bool = False,
    columns: Sequence[str] = (),
    few_documents: bool = False,
    progress: Progress | None = None,
    **arguments: Unpack[CompareArguments],
) -> Comparisons:
    """Compares candidates (models or runs) with a baseline: a model, a reference, a ``.kld`` file or a finished run.

    A candidate may be a pattern (``quants/*.gguf``, ``org/repo:*`` on the hub) or a folder of several models. Files
    that are fetched for a pattern are removed after their candidate was scored, unless ``keep``. If some candidates
    fail, the others are finished; then CandidatesError is raised, which has the results (``found``) and the reasons
    (``failed``).

    ``arguments`` are those of a question, and options of the candidates' engine. A reference and a ``.kld`` file bring
    their own question. A file that only one engine opens is scored by that one; each engine gets the options it has.
    The baseline gets the same engine and options unless ``baseline_engine`` and ``baseline_options`` say otherwise. If
    it is a model, its hidden states are stored first: for several candidates in ``out`` or the cache, for one until
    that is scored. A baseline that has logits only, such as a GGUF file, runs beside each candidate.

    Of fewer than ten effective documents, ``few_documents`` claims what is refused otherwise (no worse, a direction, a
    rank), each with how often such a claim was measured to be false.

    Every candidate leaves ``record.json`` in its run's folder below ``out``; ``records`` is a folder for copies.

    Without ``divergence="all"``, engines with a choice measure KL alone. ``columns`` names statistics that will be
    asked for: if one needs more, or the text is rollouts, everything is measured.

    A model that is open or loaded already is compared by its own method: see ``scoremode.open`` and ``scoremode.wrap``.

    >>> compare("table:uniform", "table:uniform", text="any text")[0].kl.max()
    np.float64(0.0)
    """
    if any(is_loaded(one) or hasattr(one, "compare") for one in (baseline, *candidates)):
        fix = "compare the candidate by its own method: scoremode.wrap(model, tokenizer).compare(BASELINE), or "
        fix += "scoremode.open(NAME).compare(BASELINE); BASELINE is a reference, or a model that is open or wrapped too"
        raise InputError("compare takes names, and this model is loaded already", fix=fix)
    checked("baseline", baseline, Spec), checked("candidates", candidates, Sequence[Spec])
    if unknown := [name for name in columns if name not in BY_NAME and name not in FIELDS]:
        raise OptionError(f"columns: there is no statistic '{unknown[0]}'", fix=did_you_mean(unknown[0], FIELDS))
    outputs, rest = split_outputs(arguments)
    question, options = read_arguments(rest)
    request = CompareRequest(engine, options, baseline_engine, baseline_options, tokenizer_name(tokenizer), keep)
    more = [name for name in columns if name in BY_NAME and needs_whole_divergence([name])]
    of_model = {"engine": engine, "tokenizer": tokenizer, **options, **request.of_baseline, "columns": more}
    of_model["few_documents"] = few_documents
    command = command_for("compare", (baseline, *candidates), {**question.chosen(), **of_model})
    place = replace(Place.at(out, fresh=fresh, progress=progress), command=command, few_documents=few_documents)
    try:
        found = _compare(baseline, candidates, question, request, place, outputs=outputs, columns=columns)
    except CandidatesError as error:
        leave(outputs, list(error.found.values()), place, error)
        raise
    leave(outputs, found, place)
    return found


def _compare(
    baseline: str | Path,
    candidates: Sequence[str | Path],
    question: Question,
    request: CompareRequest,
    place: Place,
    *,
    outputs: Outputs,
    columns: Sequence[str],
) -> Comparisons:
    kind = kind_of(question.corpus)
    whole = needs_whole_divergence(columns) or (kind is not None and kind.whole_divergence)
    baseline = os.fspath(baseline)
    if (texts := kind_of(baseline)) is not None:
        raise InputError(f"{baseline} is a text, not a model", fix=texts.as_baseline or "give it with --corpus")
    model, found = _settings(baseline, expand_candidates(candidates, baseline), request, place)
    run_folders = [(short(name), place.folder(folder_name(name, one.variant if one else None))) for name, one in found]
    check_outputs(outputs, dict(run_folders))
    typed = {str(name) for name in (baseline, *candidates)}
    if whole:
        found = [(name, one and _with_whole_divergence(one)) for name, one in found]
    for one in (model, *(one for _, one in found)):
        if one is not None:
            require_path(one.plugin, question.path)
            one.is_removed = not request.keep and one is not model and one.name not in typed
    if model is None and not any(one for _, one in found):
        given = {"engine": request.engine, **request.options}
        require_none(given, "only finished runs are compared, and nothing is scored")
    if model is not None and not is_uri(baseline):  # no model is read from a URI
        question = question.with_text()
    return _compare_each(baseline, model, found, question, place, of_baseline=request.of_baseline)


def _with_whole_divergence(model: LazyModel) -> LazyModel:
    """The same model with all columns of a divergence, if its engine has a choice and the user made none."""
    if "divergence" not in model.plugin.options.known() or model.arguments.get("divergence") is not None:
        return model
    return model.changed(variant=model.variant, divergence="all")


# ── the candidates ───────────────────────────────────────────────────────────────────────────────────────────────────
Candidates = Sequence[tuple[str, LazyModel | None]]
"""The name of each candidate, and how it is scored; None: it is a finished run."""


def _settings(
    baseline: str, named: Sequence[str], request: CompareRequest, place: Place
) -> tuple[LazyModel | None, Candidates]:
    """The settings of the baseline, if it is a model, and all candidates. Refuses those that cannot be told apart.

    Variants make several candidates of each model. If no candidate is named, they are variants of the baseline's model.
    """
    variants = CacheTypes.asked_for(request)
    is_alone = variants is not None and not named and not is_stored(baseline)
    given = [baseline] if is_alone else named
    if not given:
        fix = f"name a model or a run, as in scoremode compare BASELINE CANDIDATE --corpus FILE, or {HINT}"
        raise InputError("CANDIDATE is missing", fix=fix)
    require_candidates(given, place)
    first, models = assign_engines(baseline, given, request)
    if variants is None:
        return first, [(name, models.get(name)) for name in given]
    found: list[tuple[str, LazyModel | None]] = []
    for name in given:
        each = variants.of_candidate(models[name], is_baseline=is_alone) if name in models else []
        found += [(one.called, one) for one in each] if name in models else [(name, None)]
    require_candidates([name for name, _ in found], place)
    return first and variants.first(first), found


def _compare_each(
    baseline: str,
    model: LazyModel | None,
    candidates: Candidates,
    question: Question,
    place: Place,
    *,
    of_baseline: Mapping[str, Any],
) -> Comparisons:
    """Compares candidates with a baseline, in their order; CandidatesError if some of them failed.

    ``of_baseline`` are arguments that were given for the baseline alone.
    """
    finished = [name for name, one in candidates if one is None]
    with _opened(baseline, model, candidates, question, place) as (against, opened):
        # a baseline that is stored takes no arguments; a reference that was made of a model just now has them already
        models = dict(against.accept(question, of_baseline if model is None else {}, opened, finished))
        if model is None or isinstance(against, ModelBaseline):  # else it was said before the reference was made

            def asks(candidate: LazyModel) -> tuple[PlannedQuestion, Mapping[str, object]]:
                with against.open_for(candidate, question, place) as first:
                    return first.planned, first.identity

            starts = [("baseline", against.model)] if isinstance(against, ModelBaseline) else []
            _tell_starts(starts, models, asks, place)

        def score(name: str) -> Comparison:
            candidate = models.pop(name)  # each is freed before the next is loaded
            try:
                with closing(candidate):
                    return compare_with(against.open_for(candidate, question, place), candidate, place)
            finally:
                candidate.release()

        only_runs = not models
        in_turn = sorted(models, key=lambda name: not models[name].is_open)
        found, failed = score_in_turn(in_turn, score, place.progress)
        try:
            run_p, few = against.finished(question, place) if finished else None, place.few_documents
            found |= zip(finished, of_runs(baseline, finished, run_p, few_documents=few), strict=True)
        except ScoremodeError as error:
            if only_runs:
                raise
            failed |= dict.fromkeys(finished, error)  # what was scored is shown
    if failed:
        raise CandidatesError({name: found[name] for name, _ in candidates if name in found}, failed)
    return Comparisons(found[name] for name, _ in candidates)


@contextmanager
def _opened(
    baseline: str, model: LazyModel | None, candidates: Candidates, question: Question, place: Place
) -> Iterator[tuple[ComparisonBaseline, dict[str, LazyModel]]]:
    """Yields the baseline, and the candidates that are models, by name. Finished runs need only the baseline's run.

    For several candidates, and for replicas on other machines, a reference of the baseline is kept. A candidate that is
    the baseline with the same options becomes the baseline's own model, with its open engine.
    """
    models = {name: one for name, one in candidates if one is not None}
    if model is None:
        stored = stored_baseline(baseline)
        assert stored is not None, "a name that is not stored is that of a model"
        yield stored, models
        return
    with closing(model):
        if not is_by_logits(model.plugin):
            alike = {name: one for name, one in models.items() if one.scores_as(model)}
            model.variant = next((one.variant for one in alike.values()), None)
            models |= dict.fromkeys(alike, model)
        has_spread = any(one.spread is not None for one in (model, *models.values()))
        out = place.folder("baseline")
        is_begun = out is not None and (is_there(out, REFERENCE) or is_there(out, ROWS))  # by a command of several
        is_kept = len(models) > 1 or has_spread or is_begun
        if not models or is_by_logits(model.plugin) or not is_kept:
            yield ModelBaseline(model), models
            return

        def tell(planned: PlannedQuestion, claim: Claim) -> None:
            def asks(candidate: LazyModel) -> tuple[PlannedQuestion, Mapping[str, object]]:
                return replace(planned, subject=candidate.subject), claim.identity

            _tell_starts([] if claim.finished else [("baseline", model)], models, asks, place)

        run = reference_of(model, question, place.within("baseline"), tell=tell)
        if model not in models.values():
            model.close()
        yield StoredRun(str(run.path)), models


def _tell_starts(
    starts: list[tuple[str, LazyModel]],
    candidates: Mapping[str, LazyModel],
    asks: Callable[[LazyModel], tuple[PlannedQuestion, Mapping[str, object]]],
    place: Place,
) -> None:
    """Says how often engines that are slow to start will start: for the baseline, and for candidates without a run.

    ``asks`` gives the question to a candidate, and the identity of what it is compared with.
    """
    slow = {name: one for name, one in candidates.items() if one.plugin.starts_slowly}
    for name, model in slow.items() if len(starts) + len(slow) > 1 else ():
        with suppress(ScoremodeError, OSError):  # what is refused is refused when it is its turn
            planned, against = asks(model)
            if place.fresh or not model.has_run(planned, place_of(model, place), against=against):
                starts.append((short(name), model))
    tell_starts(starts)


def compare_model(
    baseline: str | Path | Run | LazyModel, candidate: LazyModel, question: Question, place: Place
) -> Comparison:
    """Compares a model with another model, or with a baseline that is stored (its name, or its run)."""
    if isinstance(baseline, Run) and baseline.path is None:
        raise InputError("this run is not kept on disk", fix='make a reference: baseline.reference("ref/", corpus=…)')
    if isinstance(baseline, LazyModel):
        return compare_with(ModelBaseline(baseline).open_for(candidate, question, place), candidate, place)
    name = str(baseline.path if isinstance(baseline, Run) else baseline)
    against = stored_baseline(name)
    if against is None:
        raise InputError(f"{name} is not a reference", fix='make one: baseline.reference("ref/", corpus=…)')
    return compare_with(against.open_for(candidate, question, place), candidate, place)


# ── one after the other ──────────────────────────────────────────────────────────────────────────────────────────────
T = TypeVar("T")
FOR_ALL = (CorpusError, MethodError, OptionError)  # of the first candidate: the question is wrong, not the model


def score_in_turn(
    names: Sequence[str], score: Callable[[str], T], progress: Progress | None = None
) -> tuple[dict[str, T], dict[str, ScoremodeError]]:
    """Scores candidates; returns the results, and the errors of those that failed, which do not stop the others.

    An error that every candidate would meet is raised at once: a question that cannot be asked, a storage that cannot
    be reached.
    """
    scored: dict[str, T] = {}
    failed: dict[str, ScoremodeError] = {}
    for name in names:
        if len(names) > 1:
            done = f"{len(scored)} of {len(names)} candidates scored" + (f", {len(failed)} failed" if failed else "")
            announce(progress, f"{done}; now {short(name)}", "label")
        try:
            scored[name] = score(name)
        except (ScoremodeError, OSError, MemoryError) as error:
            is_for_all = isinstance(error, StorageError) or (isinstance(error, FOR_ALL) and not scored)
            if len(names) == 1 or is_for_all:
                raise
            if isinstance(error, MemoryError):
                error = EngineError("this machine's memory is used up", fix="try a smaller --context-length")
            elif isinstance(error, OSError):
                error = EngineError(f"{type(error).__name__}: {error}", fix="run the same command again")
            failed[name] = error
    return scored, failed
