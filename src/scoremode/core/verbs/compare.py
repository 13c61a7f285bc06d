"""What changed between a baseline and its candidates: the same plan, target by target, over the whole vocabulary.

Each candidate is scored once, against the baseline's hidden states; each model's distribution is made by its own head,
so that a quantized head is seen. What cannot be compared is refused, never cut to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from scoremode.core.disk.folders import REFERENCE
from scoremode.core.disk.stores import is_there
from scoremode.core.disk.uri import Place, is_uri, located
from scoremode.core.engine.base import Want, only_one_way
from scoremode.core.engine.baseline import LiveBaseline, live_baseline, noise_facts, noise_floor
from scoremode.core.engine.registry import require, require_path
from scoremode.core.plan.comparable import ComparableFacts, difference, first_difference, require_comparable
from scoremode.core.references.reader import Reference, open_reference
from scoremode.core.scores.answers import check_answers
from scoremode.core.statistics.comparison import Comparison, Comparisons, needs_whole_divergence
from scoremode.core.store import runs
from scoremode.core.store.run import Run
from scoremode.core.text.corpus import kind_of
from scoremode.core.verbs.arguments import (
    AllArguments,
    EngineOptionArguments,
    check_question,
    spelled_out,
    split_arguments,
)
from scoremode.core.verbs.candidate_names import expand_candidates
from scoremode.core.verbs.candidates import score_in_turn
from scoremode.core.verbs.finished_runs import of_runs
from scoremode.core.verbs.memory import is_by_logits, require_both_fit, require_by_logits
from scoremode.core.verbs.model import GivenModel, GivenTokenizer, LazyModel, Side, is_loaded, loaded_sides, outliving
from scoremode.core.verbs.ppl import ppl_of
from scoremode.core.verbs.progress import Progress
from scoremode.core.verbs.progress_display import shows_progress
from scoremode.core.verbs.question import Question
from scoremode.core.verbs.reference import reference_of
from scoremode.core.verbs.replicas import replicas_class
from scoremode.core.verbs.scoring import UnfinishedRun, check_fits, score_run
from scoremode.core.verbs.sides import (
    NOISE,
    CompareRequest,
    Folders,
    ModelSettings,
    as_comparison,
    compared_with,
    name_of,
    score_against,
)
from scoremode.errors import CandidatesError, EngineError, InputError, ScoremodeError
from scoremode.studies.kld.comparing import against_file, require_models, require_no_question
from scoremode.studies.kld.file import is_kld
from scoremode.studies.paths.cache_types import sides_in_types
from scoremode.values import Ids

if TYPE_CHECKING:
    from scoremode.core.engine.logits import LiveLogits
    from scoremode.core.engine.steps import LiveSteps

LESS = {"max_windows", "num_samples"}  # arguments with which a question may ask for a part of a reference


@spelled_out(AllArguments)
@shows_progress
def compare(
    baseline: GivenModel,
    *candidates: GivenModel,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    baseline_engine: str | None = None,
    baseline_options: EngineOptionArguments | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    columns: Sequence[str] = (),
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> Comparisons:
    """Compares candidates (models or runs) with a baseline: a model, a reference, a ``.kld`` file or a finished run.

    A candidate may be a pattern (``quants/*.gguf``) or a folder of several models. If some candidates fail, the others
    are finished; then CandidatesError is raised, which has the results (``found``) and the reasons (``failed``).

    ``arguments`` are those of a question, and options of the candidates' engine. A reference and a ``.kld`` file bring
    their own question. A file that only one engine opens is scored by that one; each engine gets the options it has.
    The baseline has the same engine and options, but for ``baseline_engine`` and ``baseline_options``. A model as the
    baseline runs beside a single candidate if both engines allow that; else its states are kept first. One that has
    logits only, such as a GGUF file, runs beside each candidate.

    Without ``divergence="all"``, engines with a choice measure KL alone. ``columns`` names statistics that will be
    asked for: if one needs more, or the text is rollouts, everything is measured.

    Models may also be given as causal LMs of Transformers that are loaded already, with their ``tokenizer``: then every
    candidate is scored beside the baseline.

    >>> compare("table:uniform", "table:uniform", text="any text")[0].kl.max()
    np.float64(0.0)
    """
    folders = Folders(located(out) if out is not None else None, fresh, progress)
    question, options = split_arguments(arguments)
    kind = kind_of(question.get("corpus"))
    whole = needs_whole_divergence(columns) or (kind is not None and kind.whole_divergence)
    if any(map(is_loaded, (baseline, *candidates))):
        its = baseline, baseline_engine or engine, {**options, **(baseline_options or {})}
        chosen = {"divergence": "all", **options} if whole else options
        sides = [its, *((candidate, engine, chosen) for candidate in candidates)]
        return _compare_loaded(baseline, sides, tokenizer, question, folders)
    request = CompareRequest(engine, options, baseline_engine, baseline_options, tokenizer)
    baseline_model, candidates, models = sides_in_types(baseline, expand_candidates(candidates), request, folders)
    if whole:
        models = {name: one.with_default("divergence", "all") for name, one in models.items()}
    for side in (*((baseline_model,) if baseline_model else ()), *models.values()):
        require_path(side.plugin, question.get("path"))
    if is_kld(baseline):
        _require_no_settings(baseline, candidates, question, baseline_engine, baseline_options)
        scored, failed = _score_each(models, folders, lambda model, where: against_file(baseline, model, {}, where))
        return _in_order(candidates, scored, failed)
    if is_there(baseline, REFERENCE):
        return _Candidates(candidates, models, question, folders).against_stored(baseline)
    if baseline_model is None:
        return Comparisons(of_runs(baseline, candidates))
    if not is_uri(baseline):  # no model is read from a URI
        question = check_question(question, needs_text=True)
    return _Candidates(candidates, models, question, folders).against_model(baseline_model)


def _require_no_settings(
    baseline: str,
    candidates: Sequence[str],
    question: Mapping[str, Any],
    engine: str | None,
    options: EngineOptionArguments | None,
) -> None:
    """Refuses what a ``.kld`` file as the baseline does not take: a question, an engine, options, finished runs."""
    given = {f"baseline_{name}": value for name, value in {"engine": engine, **(options or {})}.items()}
    known = {name: value for name, value in given.items() if value is not None}
    require_no_question(baseline, {**question, **known})
    require_models(baseline, candidates)


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The candidates of a comparison, of which ``models`` are yet to be scored, and what is asked of all of them."""

    names: Sequence[str]
    models: Mapping[str, ModelSettings]
    question: dict[str, Any]
    folders: Folders

    def against_model(self, baseline: ModelSettings) -> Comparisons:
        """Compares them with a model: side by side where both engines can, else through a reference of it."""
        if is_by_logits(baseline.plugin):
            with closing(baseline.prepare()) as model:
                return self._against_logits(model)
        if len(self.names) == 1 and self.models and _side_by_side(baseline, self.models[self.names[0]]):
            with closing(baseline.prepare()) as first, closing(self.models[self.names[0]].prepare()) as second:
                return Comparisons([lockstep(first, second, self.question, self.folders)])
        with closing(baseline.prepare()) as model:
            out, how = self._of_baseline()
            run = reference_of(model, self.question, out, tokenizer=baseline.tokenizer, **how)
        return self.against_stored(str(run.path))

    def against_stored(self, folder: str) -> Comparisons:
        """Compares them with a reference."""
        if not self.models:
            return self._with_finished({}, {}, folder, None)
        stored = StoredReference.open(folder)
        cut_by = stored.question(self.question).get("tokenizer")
        models = {name: replace(one, tokenizer=one.tokenizer or cut_by) for name, one in self.models.items()}
        found, failed = _score_each(
            models, self.folders, lambda model, where: against_reference(stored, model, self.question, where)
        )
        return self._with_finished(found, failed, folder, stored.run)

    def _against_logits(self, baseline: LazyModel) -> Comparisons:
        """Compares them with a model that has logits only. It stays open while one after the other runs beside it."""
        run_p: Run | None = None

        def beside(model: LazyModel, where: Folders) -> Comparison:
            nonlocal run_p
            found = lockstep(baseline, model, self.question, where, run_p)
            run_p = found.baseline
            return found

        found, failed = _score_each(self.models, self.folders, beside)
        if run_p is None and len(found) + len(failed) < len(self.names):
            out, how = self._of_baseline()
            run_p = ppl_of(baseline, self.question, out=out, **how)
        return self._with_finished(found, failed, baseline.subject.name, run_p)

    def _of_baseline(self) -> tuple[Path | Place | None, dict[str, Any]]:
        """Where the baseline's run goes, and how it is made."""
        return self.folders.folder("baseline"), {"fresh": self.folders.fresh, "progress": self.folders.progress}

    def _with_finished(
        self, found: dict[str, Comparison], failed: Mapping[str, ScoremodeError], baseline: str, run_p: Run | None
    ) -> Comparisons:
        """Adds the candidates that are finished runs."""
        finished = [name for name in self.names if name not in found and name not in failed]
        found |= zip(finished, of_runs(baseline, finished, run_p), strict=True)
        return _in_order(self.names, found, failed)


def _in_order(
    names: Sequence[str], found: Mapping[str, Comparison], failed: Mapping[str, ScoremodeError]
) -> Comparisons:
    """The comparisons in the order of the candidates; CandidatesError if some candidates failed."""
    if failed:
        raise CandidatesError({name: found[name] for name in names if name in found}, failed)
    return Comparisons(found[name] for name in names)


def _compare_loaded(
    baseline: GivenModel, sides: Sequence[Side], tokenizer: Any, question: dict[str, Any], folders: Folders
) -> Comparisons:
    """Compares models of which some are loaded already; ``sides`` begin with the baseline."""
    is_stored = not is_loaded(baseline) and (is_kld(baseline) or runs.is_run(baseline))
    models = loaded_sides(sides[1:] if is_stored else sides, tokenizer)
    first = baseline if is_stored else models.pop(0)
    folders.require_candidates([model.subject.name for model in models])
    found = Comparisons()
    for model in models:
        with closing(model):
            found.append(compare_model(first, model, check_question(question, needs_text=not is_stored), folders))
    return found


def compare_model(
    baseline: str | Path | Run | LazyModel, candidate: LazyModel, question: dict[str, Any], folders: Folders
) -> Comparison:
    """Compares a model with a reference (its folder or run), with a ``.kld`` file, or with another model."""
    if isinstance(baseline, LazyModel):
        return lockstep(baseline, candidate, question, folders)
    if not isinstance(baseline, Run) and is_kld(baseline):
        return against_file(baseline, candidate, question, folders)
    folder = str(baseline.path if isinstance(baseline, Run) else baseline)
    if not is_there(folder, REFERENCE):
        what = "a run without hidden states" if runs.is_run(folder) else "not a reference"
        raise InputError(f"{folder} is {what}", fix='make one: baseline.reference("ref/", corpus=…)')
    return against_reference(StoredReference.open(folder), candidate, question, folders)


ScoreCandidate = Callable[[LazyModel, Folders], Comparison]
"""Scores a candidate into these folders."""


def _score_each(
    models: Mapping[str, ModelSettings], folders: Folders, score: ScoreCandidate
) -> tuple[dict[str, Comparison], dict[str, ScoremodeError]]:
    """Scores the candidates that are models; returns the comparisons and the errors of those that failed, by name.

    They are scored one by one, each freed before the next is loaded; with replicas, as soon as the cluster has room.
    """
    try:
        return _score_all(models, folders, score), {}
    except CandidatesError as error:
        return error.found, error.failed


def _score_all(models: Mapping[str, ModelSettings], folders: Folders, score: ScoreCandidate) -> dict[str, Comparison]:

    def score_one(settings: ModelSettings, where: Folders) -> Comparison:
        with closing(settings.prepare()) as model:
            return score(model, where)

    spread = next((its.spread for its in models.values() if its.spread is not None), None)
    if spread is None or len(models) < 2:
        return score_in_turn(list(models), lambda name: score_one(models[name], folders), folders.progress)

    def score_share(name: str, replicas: int, progress: Progress) -> Comparison:
        its = replace(models[name], options={**models[name].options, "replicas": replicas})
        return score_one(its, replace(folders, progress=progress))

    engines = {name: (its.plugin, its.engine_options()) for name, its in models.items()}
    return replicas_class().side_by_side(spread, engines, score_share, folders.progress)


def _side_by_side(*sides: ModelSettings) -> bool:
    """Can both models run in this process, window by window?"""
    if any(side.spread is not None for side in sides):
        return False  # replicas read a baseline's states from a reference
    return all(side.plugin.able().side_by_side for side in sides)


# ── a stored baseline ────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class StoredReference:
    """A reference whose files were checked: its run, and its hidden states."""

    run: Run
    states: Reference

    @staticmethod
    def open(folder: str | Path) -> StoredReference:
        return StoredReference(runs.load(folder), open_reference(folder))

    def question(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The question that the reference was made with; an error if its text was piped in and none is given."""
        stored = self.run.manifest.get("question")
        if stored is None and not given:
            raise InputError(
                f"the text of {self.run.path} was piped in and cannot be read again",
                fix="give the same text with --corpus",
            )
        return dict(stored or {})


def against_reference(
    stored: StoredReference, model: LazyModel, question: Mapping[str, Any], folders: Folders
) -> Comparison:
    """Compares a model with a reference, which brings its own question.

    A question about the first windows of the reference's plan is answered too, with the rows of those windows alone.
    """
    require(model.plugin, "divergence", "be compared with a reference")
    kept = {name: value for name, value in stored.question(question).items() if name != "tokenizer"}
    asked = model.ask({**kept, **question}, folders.progress)
    if not _asks_for_less(stored, model, kept, question, asked):
        _require_comparable(stored, asked)
    noise = {name: stored.run.manifest.get(name) for name in NOISE}
    return score_against(model, asked, stored.run, stored.states, folders, noise=noise)


def _asks_for_less(
    stored: StoredReference,
    model: LazyModel,
    kept: Mapping[str, Any],
    question: Mapping[str, Any],
    asked: Question,
) -> bool:
    """Is the question about the first windows of the reference's plan, and is the whole plan comparable?"""
    given = {name: value for name, value in question.items() if value is not None and value != kept.get(name)}
    if asked.plan.digest == stored.run.plan_digest or not given.keys() & LESS:
        return False
    whole = model.ask({**kept, **question, **{name: kept.get(name) for name in LESS}})
    _require_comparable(stored, whole)
    return asked.plan.begins(whole.plan)


def _require_comparable(stored: StoredReference, asked: Question) -> None:
    candidate, facts = comparable_facts(asked), stored.run.facts
    if candidate.vocabulary is None:
        candidate = replace(candidate, vocabulary=stored.states.vocabulary)
    require_comparable(
        stored.states.manifest,
        candidate,
        where=lambda: first_difference(
            facts.token, facts.id, int(stored.run.manifest["tokens"]), asked.tokens, asked.documents
        ),
    )


# ── two models side by side ──────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class _Side:
    """One of two models that are scored side by side."""

    model: LazyModel
    asked: Question
    claim: runs.Claim
    run: Run | None = None  # if it is finished already


def lockstep(
    baseline: LazyModel,
    candidate: LazyModel,
    question: Mapping[str, Any],
    folders: Folders,
    run_p: Run | None = None,
) -> Comparison:
    """Compares two models that are scored side by side, window by window.

    A baseline without hidden states gives its logits instead: both are then reduced together, and none are kept.
    ``run_p`` is the baseline's run if it is finished already.
    """
    if is_by_logits(baseline.plugin):
        require_by_logits(baseline, candidate, question)
    else:
        require(baseline.plugin, "hidden_states", "be the baseline of a comparison")
        require(candidate.plugin, "divergence", "be compared")
        for model in (baseline, candidate):
            if model.spread is not None:
                raise EngineError(
                    "replicas cannot run beside another open model",
                    fix='make a reference of the baseline first: baseline.reference("ref/", corpus=…)',
                )
            require(model.plugin, "side_by_side", "run beside another; make a reference of the baseline first")
    first = baseline.ask(question, folders.progress)
    known, ids = comparable_facts(first), first.tokens.ids
    del first  # where the two may be compared, they have the same text, tokens and plan: one of each is enough
    asked = candidate.ask(question, folders.progress)
    require_same_question(known, asked, ids)
    del ids
    asked_p = replace(asked, subject=baseline.subject)
    own, against = folders.of(candidate), baseline.identity(asked_p)
    fresh_p = folders.fresh and run_p is None
    with (
        # baseline first, everywhere: two processes that wait for each other would wait forever
        baseline.claimed(asked_p, folders.folder("baseline"), fresh=fresh_p) as claim_p,
        candidate.claimed(asked, own, fresh=folders.fresh, against=against) as claim_q,
    ):
        run_p, run_q = run_p or claim_p.finished, claim_q.finished
        if run_q is None:
            sides = _Side(baseline, asked_p, claim_p, run_p), _Side(candidate, asked, claim_q)
            run_p, run_q = _score_both(*sides, folders.progress)
        elif run_p is None:
            engine = baseline.engine_for(asked_p, folders.progress)
            run_p = score_run(asked_p, engine, claim_p, folders.progress)
        run_p, run_q = outliving(baseline, run_p, folders.out), outliving(candidate, run_q, folders.out)
    return as_comparison(name_of(candidate), run_p, run_q, run_q.divergences)


def _score_both(p: _Side, q: _Side, progress: Progress | None) -> tuple[Run, Run]:
    """Scores both models in one pass over the plan. The baseline's answers also go into its own journal."""
    plan, run_p, by_logits = q.asked.plan, p.run, is_by_logits(p.model.plugin)
    if by_logits:
        require_both_fit(p.model, q.model, int(plan.lengths.max()) * (plan.path.sequences if plan.path else 1))
    engine_p = p.model.engine_for(p.asked, progress)
    check_fits(plan, engine_p.facts.vocabulary, engine_p.facts.context_length)
    live = live_baseline(engine_p, plan, by_logits=by_logits, keeps_answers=run_p is None)
    engine_q = q.model.engine_for(q.asked, progress)
    if by_logits and engine_q is engine_p:
        raise InputError("one open model cannot run beside itself", fix="open it twice")
    with ExitStack() as opened:
        baseline: UnfinishedRun | None = None
        if run_p is None:
            baseline = opened.enter_context(UnfinishedRun(p.asked, engine_p, p.claim, progress))
        candidate = opened.enter_context(UnfinishedRun(q.asked, engine_q, q.claim, progress, with_kl=True))
        if isinstance(live, LiveBaseline):
            live.want(engine_q.computes(plan, candidate.journal.done))
        for index, answers in candidate.answers(Want(against=live)):
            if baseline is not None:
                _keep_answers(baseline, live)
            candidate.keep(index, answers)
        manifest = candidate.manifest()
        if baseline is not None:
            baseline.score()  # windows that its journal lacks, after a resumed comparison
            run_p = baseline.save(baseline.manifest())
            p.claim.release()  # others may compare with the same baseline meanwhile
        assert run_p is not None, "the baseline is scored now, or was before"
        noise = noise_facts(only_one_way(engine_p) if by_logits else noise_floor(engine_p, plan))
        return run_p, candidate.save(manifest | compared_with(run_p, noise, q.model))


def _keep_answers(run: UnfinishedRun, live: LiveBaseline | LiveLogits | LiveSteps) -> None:
    """Write the answers that a live baseline has given since the last time into the journal of its own run."""
    for index, answers, seconds in live.take_answers():
        if not run.journal.done[index]:
            check_answers(run.asked.plan, [(index, answers)])
            run.keep(index, answers, seconds)


def comparable_facts(asked: Question) -> ComparableFacts:
    return ComparableFacts(
        tokenizer=asked.tokens.tokenizer.fingerprint,
        vocabulary=asked.subject.vocabulary,
        plan_digest=asked.plan.digest,
        method=asked.plan.method,
        settings=dict(asked.plan.settings),
        corpus_sha256=asked.corpus.sha256,
    )


def require_same_question(baseline: ComparableFacts, asked: Question, ids: Ids) -> None:
    """Refuse models that cannot be compared; say why, and what would make them so. ``ids`` are the baseline's."""

    def where() -> str | None:
        return first_difference(np.arange(len(ids)), ids, len(ids), asked.tokens, asked.documents)

    found = difference(baseline, comparable_facts(asked), where)
    if found is None:
        return
    fixes = {
        "tokenizer": "feed both with one: --tokenizer FOLDER; or compare bits per byte, which scoremode ppl prints",
        "vocabulary": "compare models with one vocabulary",
        "text": "give both the same text",
        "plan": "give --context-length and --stride that both models allow",
    }
    raise InputError(found.reason, fix=fixes[found.kind])
