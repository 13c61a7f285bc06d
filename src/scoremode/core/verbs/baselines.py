"""Everything that a candidate can be compared with, and the one function that compares.

baseline ──finished──▶ hidden states and a head, or 16-bit records ──┐
         ──running───▶ logits, if it has nothing else ───────────────┴──▶ KL ──▶ a run of the candidate ──▶ Comparison

StoredRun         a reference (hidden states and a head), or scores alone, for candidates that are finished runs too
ModelBaseline     a model: finished first into a temporary reference; beside the candidate if it has logits alone
BaselineOffer     what wings offer: classes like these, for other files
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from scoremode.core.disk.folders import REFERENCE
from scoremode.core.disk.manifests import differing_fields
from scoremode.core.disk.stores import is_there
from scoremode.core.engine.base import Baseline, LogitsBaseline, Wanted, WholeDistributions, only_one_way
from scoremode.core.engine.baseline import noise_facts, stored_states
from scoremode.core.engine.plugin import EnginePlugin
from scoremode.core.engine.registry import require
from scoremode.core.extensions import BaselineOffer, ComparisonBaseline, offered
from scoremode.core.plan.comparable import ComparableFacts, first_difference, require_comparable
from scoremode.core.plan.question import Question
from scoremode.core.references.reader import Reference, open_reference
from scoremode.core.scores.answers import Answers, check_answers
from scoremode.core.scores.columns import Divergences
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store import runs
from scoremode.core.store.run import Run
from scoremode.core.verbs.compared_models import (
    NOISE,
    as_comparison,
    compared_with,
    name_of,
    place_of,
    require_both_fit,
    short,
)
from scoremode.core.verbs.model import LazyModel
from scoremode.core.verbs.place import Place
from scoremode.core.verbs.planned import PlannedQuestion
from scoremode.core.verbs.reference import temporary_reference
from scoremode.core.verbs.scoring import UnfinishedRun, check_fits, score_run
from scoremode.errors import EngineError, InputError, OptionError, RunError
from scoremode.values import Ids


@dataclass
class OpenBaseline:
    """A baseline that is open for one candidate: the question to the candidate, the baseline's run, its distributions.

    This one is stored: a reference or a file.
    """

    planned: PlannedQuestion
    run: Run | None  # once it is finished
    stored: Callable[[], Baseline | WholeDistributions] | None = field(default=None, kw_only=True)
    noise: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # fields of a manifest

    @property
    def missing(self) -> str | None:
        """Why there is no divergence; None: it is measured."""
        return None

    @property
    def identity(self) -> Mapping[str, object]:
        """The identity of the baseline's run. The identity of the candidate's run contains it."""
        identity: Mapping[str, object] = self.finished().manifest["identity"]
        return identity

    def distributions(self, candidate: LazyModel) -> Baseline | WholeDistributions | None:
        """The baseline's distributions, for a candidate that has no run yet; None if ``missing``."""
        assert self.stored is not None, "a stored baseline"
        return self.stored()

    def facts(self, run: UnfinishedRun, candidate: LazyModel) -> Mapping[str, object]:
        """The fields of the candidate's manifest about the baseline, after the last window."""
        return compared_with(self.finished(), self.noise, candidate)

    def finished(self) -> Run:
        """The run of the baseline, which outlives its folder."""
        assert self.run is not None, "a stored baseline is finished"
        return self.run


def compare_with(baseline: AbstractContextManager[OpenBaseline], candidate: LazyModel, place: Place) -> Comparison:
    """Compares a candidate with a baseline of any kind, in one pass over the plan. A run that is there is read."""
    at = place_of(candidate, place)
    with (
        # the baseline's folder is claimed first, everywhere: two processes that wait for each other would wait forever
        baseline as against,
        candidate.claimed(against.planned, at, against=against.identity) as claim,
    ):
        run_q = claim.finished or _score(candidate, against, claim, place)
        run_p, run_q = against.finished(), candidate.outliving(run_q, at)
    if place.command:  # a run that was there may have been made by another
        run_q = replace(run_q, manifest={**run_q.manifest, "command": place.command})
    compared = as_comparison(name_of(candidate), run_p, run_q, run_q.divergences, against.missing)
    return replace(compared, few_documents=place.few_documents)


def _score(candidate: LazyModel, against: OpenBaseline, claim: runs.Claim, place: Place) -> Run:
    distributions = against.distributions(candidate)
    engine = candidate.opened_for(against.planned, place.progress)
    if isinstance(distributions, LogitsBaseline) and distributions.engine is engine:
        raise InputError("one open model cannot run beside itself", fix="open it twice")
    with UnfinishedRun(against.planned, engine, claim, place.progress) as run:
        run.score(Wanted(against=distributions))
        manifest = run.manifest()
        return run.save({**manifest, **against.facts(run, candidate), "command": place.command or None})


def require_none(given: Mapping[str, Any], reason: str) -> None:
    """Refuses arguments that would have no effect, for this reason."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise OptionError(reason, fix=f"leave --{name.replace('_', '-')} out")


def stored_baseline(name: str) -> ComparisonBaseline | None:
    """The baseline that is stored under a name; None if it is the name of a model."""
    kinds = (kind.load() for kind in offered(BaselineOffer) if kind.claims(name))
    return next((kind(name) for kind in kinds), StoredRun(name) if StoredRun.claims(name) else None)


# ── finished runs and references ─────────────────────────────────────────────────────────────────────────────────────
class StoredRun:
    """A baseline that is stored under a name: a finished run, or a reference, which brings its own question.

    Its files are checked when it is used first.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_states = is_there(name, REFERENCE)

    @staticmethod
    def claims(name: str) -> bool:
        return is_there(name, REFERENCE) or runs.is_run(name)

    @cached_property
    def run(self) -> Run:
        return runs.load(self.name)

    @cached_property
    def states(self) -> Reference:
        return open_reference(self.name)

    def accept(
        self,
        question: Question,
        of_baseline: Mapping[str, Any],
        models: Mapping[str, LazyModel],
        finished: Sequence[str],
    ) -> Mapping[str, LazyModel]:
        for model in models.values() if not self.has_states else ():
            raise no_states(self.name, model.name)
        kind = "reference" if self.has_states else "finished run"
        fixed = {**({} if models else question.chosen()), **of_baseline}
        require_none(fixed, f"{self.name} is a {kind}, whose text and engine are known")
        if not models:
            return models
        cut_by = self._stored_question(question).get("tokenizer")
        return {
            name: model if model.tokenizer or not cut_by else model.changed(tokenizer=cut_by, variant=model.variant)
            for name, model in models.items()
        }

    def finished(self, question: Question, place: Place) -> Run:
        return self.run

    @contextmanager
    def open_for(self, candidate: LazyModel, question: Question, place: Place) -> Iterator[OpenBaseline]:
        if not self.has_states:
            raise no_states(self.name, candidate.subject.name)
        require(candidate.plugin, "divergence", "be compared with a reference")
        kept = {name: value for name, value in self._stored_question(question).items() if name != "tokenizer"}
        planned = candidate.ask(Question.of({**kept, **question.chosen()}), place.progress)
        self._require_comparable(planned)
        noise = {name: self.run.manifest.get(name) for name in NOISE}
        yield OpenBaseline(
            planned, self.run, stored=lambda: stored_states(self.states, planned.plan.target_offsets), noise=noise
        )

    def _stored_question(self, question: Question) -> Mapping[str, Any]:
        """The arguments that it was made with; an error if its text was piped in and ``question`` names none."""
        stored = self.run.manifest.get("question")
        if stored is None and not question.chosen():
            raise InputError(
                f"the text of {self.run.path} was piped in and cannot be read again",
                fix="give the same text with --corpus",
            )
        return stored or {}

    def _require_comparable(self, planned: PlannedQuestion) -> None:
        candidate, made, facts = comparable_facts(planned), self.run.manifest, self.run.facts
        known = ComparableFacts(
            tokenizer=made["tokenizer"],
            vocabulary=candidate.vocabulary,
            plan_digest=self.run.plan_digest,
            method=made["method"],
            settings=made["method_settings"],
            corpus_sha256=made["corpus_sha256"],
        )
        asks_same = (known.method, known.settings, known.corpus_sha256) == (
            candidate.method,
            candidate.settings,
            candidate.corpus_sha256,
        )
        if asks_same or known.plan_digest == candidate.plan_digest:  # else refused below, before states are fetched
            known = replace(known, vocabulary=self.states.vocabulary)
            candidate = replace(candidate, vocabulary=candidate.vocabulary or known.vocabulary)
        require_comparable(
            known,
            candidate,
            lambda: first_difference(facts.token, facts.id, int(made["tokens"]), planned.tokens, planned.documents),
            own_question=self.name if made.get("question") else None,
        )


def of_runs(
    baseline: str, candidates: Sequence[str], run_p: Run | None = None, *, few_documents: bool = False
) -> list[Comparison]:
    """Compares finished runs of one plan. KL is known only if the candidate was scored against the baseline.

    ``run_p`` is the baseline's run if it is loaded already.
    """
    found: list[Comparison] = []
    for candidate in candidates:
        if not runs.is_run(candidate):
            raise no_states(baseline, candidate)
        run_p, run_q = run_p or runs.load(baseline), runs.load(candidate)
        if run_p.plan_digest != run_q.plan_digest:
            what = [n for n in ("tokenizer", "corpus_sha256", "method") if run_p.manifest[n] != run_q.manifest[n]]
            raise RunError(
                f"{baseline} and {candidate} scored different plans (different {', '.join(what) or 'windows'})",
                fix="score both on the same text with the same method",
            )
        divergences, missing = divergence_between(run_p, run_q)
        name = run_q.manifest.get("variant") or short(candidate)
        found.append(as_comparison(name, run_p, run_q, divergences, missing))
    return [replace(c, few_documents=few_documents) for c in found]


def no_states(baseline: str, candidate: str) -> InputError:
    return InputError(
        f"{baseline} is a run without hidden states, so {candidate} cannot be scored against it",
        fix=f"score it first: scoremode ppl {candidate} --out DIR, or make a reference of the baseline",
    )


def divergence_between(baseline: Run, candidate: Run) -> tuple[Divergences, str | None]:
    """The divergence of a finished run, if it was measured against exactly this baseline; else none and the reason.

    What counts is the baseline's whole identity: weights, engine, dtype, settings and versions.
    """
    measured = candidate.manifest["identity"]["settings"].get("against")
    if not candidate.divergences.has("kl") or not isinstance(measured, dict):
        return Divergences(), "KL is not known between two finished runs: compare with a reference, or with the model"
    differing = differing_fields(*map(_flat, (measured, baseline.manifest["identity"])))
    if differing:
        return Divergences(), f"KL was measured against another baseline: it differs in {differing}"
    return candidate.divergences, None


def _flat(identity: Mapping[str, Any]) -> Mapping[str, object]:
    """The fields of an identity and of its parts, except whether hidden states were kept, which changes no score."""
    found: dict[str, object] = {}
    for name, value in identity.items():
        parts = {f"{name} {key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        found |= parts
    return {name: value for name, value in found.items() if name != "settings keeps"}


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class ModelBaseline(ComparisonBaseline):
    """A model. It is finished first; if it has logits alone, it runs beside one candidate after the other."""

    def __init__(self, model: LazyModel) -> None:
        self.model = model
        self.run: Run | None = None  # once it is finished

    @contextmanager
    def open_for(self, candidate: LazyModel, question: Question, place: Place) -> Iterator[OpenBaseline]:
        if is_by_logits(self.model.plugin):
            require_by_logits(self.model, candidate, question)
        else:
            require(self.model.plugin, "hidden_states", "be the baseline of a comparison")
            require(candidate.plugin, "divergence", "be compared")
            if self.model.spread is not None or candidate.spread is not None:
                raise EngineError(
                    "replicas are compared with a reference that every machine can read",
                    fix='make a reference of the baseline first: baseline.reference("ref/", corpus=…)',
                )
        first = self.model.ask(question, place.progress)
        known, ids = comparable_facts(first), first.tokens.ids
        del first  # frees memory: models that can be compared have the same text, tokens and plan
        planned = candidate.ask(question, place.progress)
        require_same_question(known, planned, ids)
        del ids
        own = replace(planned, subject=self.model.subject)
        mine = place.within("baseline")
        mine = replace(mine, fresh=mine.fresh and self.run is None)
        with self.model.claimed(own, mine) as claim, ExitStack() as opened:
            kind = RunningBaseline if is_by_logits(self.model.plugin) else UnfinishedBaseline
            against = kind(planned, self.run or claim.finished, self.model, own, claim, opened, place)
            yield against
            self.run = against.run

    def finished(self, question: Question, place: Place) -> Run:
        if self.run is None:
            self.run = self.model.score(question, place.within("baseline"))
        return self.run


@dataclass
class UnfinishedBaseline(OpenBaseline):
    """A model that is finished first: its states are in a temporary reference, until the candidate is scored."""

    model: LazyModel
    own: PlannedQuestion  # the same question, to the baseline
    claim: runs.Claim
    opened: ExitStack
    place: Place

    @property
    def identity(self) -> Mapping[str, object]:
        return self.model.identity(self.own)

    def distributions(self, candidate: LazyModel) -> Baseline | WholeDistributions:
        reference = self.opened.enter_context(temporary_reference(self.model, self.own, self.place))
        states = stored_states(open_reference(str(reference.path)), self.planned.plan.target_offsets)  # holds the entry
        if self.run is None:
            self.run = self.claim.copy(reference, "question", *NOISE)
            self.claim.release()  # others may compare with the same baseline meanwhile
        self.noise = {name: reference.manifest.get(name) for name in NOISE}
        if candidate is not self.model and (not self.model.many_questions or self.model.plugin.starts_slowly):
            self.model.close()  # its memory is needed
        return states

    def finished(self) -> Run:
        if self.run is None:  # the candidate's run was finished, and the baseline's was not
            self.run = self._scored()
        self.run = self.model.outliving(self.run, self.place)
        return self.run

    def _scored(self) -> Run:
        progress = self.place.progress
        return score_run(self.own, self.model.opened_for(self.own, progress), self.claim, progress)


@dataclass
class RunningBaseline(UnfinishedBaseline):
    """A model that has logits alone. Its own answers go into its own run, so that they need no second pass."""

    _scores: UnfinishedRun | None = None

    def distributions(self, candidate: LazyModel) -> Baseline | WholeDistributions:
        from scoremode.core.engine.logits import LiveLogits
        from scoremode.core.engine.steps import LiveSteps

        plan = self.planned.plan
        sequences = plan.path.sequences if plan.path else 1
        require_both_fit(self.model, candidate, int(plan.lengths.max()) * sequences)
        engine = self.model.opened_for(self.own, self.place.progress)
        check_fits(plan, engine.facts.vocabulary, engine.facts.context_length)
        self.noise = noise_facts(only_one_way(engine))
        kind = LiveLogits if engine.path is None else LiveSteps
        return kind(engine, plan, self._keep if self.run is None else None)

    def _unfinished(self) -> UnfinishedRun:
        """Its own run, which begins with its first answer: if the candidate does not start, nothing is lost."""
        if self._scores is None:
            engine = self.model.opened_for(self.own, self.place.progress)
            run = UnfinishedRun(self.own, engine, self.claim, self.place.progress)
            self._scores = self.opened.enter_context(run)
        return self._scores

    def _keep(self, index: int, answers: Answers, seconds: float) -> None:
        run = self._unfinished()
        if not run.journal.done[index]:
            check_answers(self.planned.plan, [(index, answers)], run.engine.facts.vocabulary)
            run.keep(index, answers, seconds)

    def _scored(self) -> Run:
        run = self._unfinished()
        run.score()  # windows that its journal lacks, after a resumed comparison
        finished = run.save(run.manifest())
        self.claim.release()  # others may compare with the same baseline meanwhile
        return finished


def is_by_logits(baseline: EnginePlugin) -> bool:
    """Is a baseline of this engine compared by its logits, because it has no hidden states with a head?"""
    able = baseline.able()
    return able.logits and not able.hidden_states


def require_by_logits(baseline: LazyModel, candidate: LazyModel, question: Question) -> None:
    """Refuses a candidate that cannot run beside a baseline which has logits and no hidden states."""
    require(candidate.plugin, "divergence", "be compared")
    if not candidate.plugin.able().distributions:
        raise EngineError(
            f"the {candidate.engine_name} engine is compared by hidden states, and {baseline.engine_name} gives none",
            fix="use an unquantized checkpoint as the baseline",
        )
    path = question.decode_path
    if path is not None and path.sequences > 1 and not candidate.plugin.able().logits:
        raise EngineError(
            f"a baseline of the {baseline.engine_name} engine takes every step beside its candidate, and the "
            f"{candidate.engine_name} engine decodes a whole batch before its scores are computed",
            fix="give --sequences 1, or use the checkpoint as the baseline",
        )
    if baseline.spread is not None or candidate.spread is not None:
        raise EngineError(
            f"a baseline of the {baseline.engine_name} engine runs in this process, beside one candidate without "
            "replicas",
            fix="leave --replicas out",
        )


def comparable_facts(planned: PlannedQuestion) -> ComparableFacts:
    return ComparableFacts(
        tokenizer=planned.tokens.tokenizer.fingerprint,
        vocabulary=planned.subject.vocabulary,
        plan_digest=planned.plan.digest,
        method=planned.plan.method,
        settings=dict(planned.plan.settings),
        corpus_sha256=planned.corpus.sha256,
    )


def require_same_question(baseline: ComparableFacts, planned: PlannedQuestion, ids: Ids) -> None:
    """Refuses models that cannot be compared. ``ids`` are the baseline's."""

    def where() -> str | None:
        return first_difference(np.arange(len(ids)), ids, len(ids), planned.tokens, planned.documents)

    require_comparable(baseline, comparable_facts(planned), where)
