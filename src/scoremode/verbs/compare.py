"""What changed between a baseline and its candidates: the same plan, target by target, over the whole vocabulary.

Each candidate is scored once, against the baseline's hidden states; each model's distribution is made by its own head,
so that a quantized head is seen. What cannot be compared is refused, never cut to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from scoremode.cluster.engine import require_alone
from scoremode.cluster.ray_cluster import Cluster
from scoremode.disk.folders import REFERENCE
from scoremode.engines.base import Engine, Want
from scoremode.engines.baseline import LiveBaseline, StoredBaseline, noise_facts, noise_floor
from scoremode.engines.plugin import Work
from scoremode.engines.registry import require
from scoremode.errors import InputError, RunError, harmless
from scoremode.plan.comparable import Outline, difference, first_difference, require_comparable
from scoremode.plan.windows import Answers
from scoremode.references.kld import is_kld
from scoremode.references.reader import Reference
from scoremode.remote.uri import located
from scoremode.scores.answers import check_answers
from scoremode.statistics.comparison import Comparison
from scoremode.store import runs
from scoremode.store.remote_copies import is_there, open_reference
from scoremode.store.run import Run
from scoremode.values import Floats, Ids
from scoremode.verbs.arguments import AllArguments, EngineArguments, spelled_out
from scoremode.verbs.base_logits import against_file, require_models, require_no_question
from scoremode.verbs.candidates import score_together, slots_and_shares
from scoremode.verbs.comparing import NOISE, Folders, as_comparison, compared_with, short
from scoremode.verbs.model import HeldModel, in_memory
from scoremode.verbs.progress import Progress
from scoremode.verbs.question import Question, split_arguments
from scoremode.verbs.reference import reference_of
from scoremode.verbs.scoring import UnfinishedRun, check_fits, score_run
from scoremode.verbs.sides import Settings, Wanted, divide


@spelled_out(AllArguments)
def compare(
    baseline: str,
    *candidates: str,
    engine: str | None = None,
    tokenizer: str | None = None,
    baseline_engine: str | None = None,
    baseline_options: EngineArguments | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> list[Comparison]:
    """Candidates against a baseline: models, a reference, a file of base logits (``.kld``), or finished runs.

    ``arguments`` are those of a question, and options of the candidates' engine. A reference and a ``.kld`` file bring
    their own question. A file that only one engine opens is scored by that one; each engine gets the options it has.
    The baseline has the same engine and options, but for ``baseline_engine`` and ``baseline_options``. A model as the
    baseline runs beside a single candidate if both engines allow that; else its states are kept first.

    >>> compare("table:uniform", "table:uniform", text="any text")[0].kl.max()
    np.float64(0.0)
    """
    if not candidates:
        raise InputError("there is no candidate", fix="name a model, or a run, after the baseline")
    if len({short(name) for name in candidates}) < len(candidates):
        raise InputError(
            "two candidates have the same name", fix="rename one folder, so that tables can tell them apart"
        )
    question, options = split_arguments(arguments)
    folders = Folders(located(out) if out is not None else None, fresh, progress)
    folders.require_a_folder_each(candidates)
    asked_for = Wanted(engine, options, baseline_engine or engine, {**options, **(baseline_options or {})}, tokenizer)
    its, how = divide(baseline, candidates, asked_for)
    if is_kld(baseline):
        require_no_question(baseline, {**question, **_own_settings(baseline_engine, baseline_options)})
        require_models(baseline, candidates)
        scored = _each(how, folders, partial(_named_against_file, baseline))
        return [scored[name] for name in candidates]
    if is_there(baseline, REFERENCE):
        kept = baseline
    elif its is None:
        return [of_runs(baseline, name) for name in candidates]
    elif len(candidates) == 1 and candidates[0] in how and _side_by_side(baseline, its, candidates[0], how):
        with closing(its.hold(baseline)) as held_p, closing(how[candidates[0]].hold(candidates[0])) as held_q:
            return [lockstep(held_p, held_q, question, folders)]
    else:
        with closing(its.hold(baseline)) as held:
            own = folders.folder("baseline")
            its_run = reference_of(held, question, own, tokenizer=tokenizer, fresh=fresh, progress=progress)
        kept = str(its_run.path)
    scored = _each(how, folders, partial(_named, kept, question))
    return [scored[name] if name in scored else of_runs(kept, name) for name in candidates]


Scored = Callable[[str, Settings, Folders], Comparison]
"""Scores a candidate with these settings into these folders."""


def _each(how: Mapping[str, Settings], folders: Folders, score: Scored) -> dict[str, Comparison]:
    """All candidates that are models, one after the other; with replicas, each as soon as the cluster has room."""
    spread = next((its.spread for its in how.values() if its.spread is not None), None)
    if spread is None or len(how) < 2:
        return {name: score(name, its, folders) for name, its in how.items()}
    slots, replicas = slots_and_shares(len(how), spread.replicas)

    def scored(name: str, progress: Progress) -> Comparison:
        its = replace(how[name], options={**how[name].options, "replicas": replicas})
        return score(name, its, replace(folders, progress=progress))

    rooms = [its.room(name) for name, its in how.items()]
    with closing(Cluster(spread, max(rooms, key=lambda room: room.all_cpus))):
        found = score_together(list(how), scored, slots, folders.progress)
    return dict(zip(how, found, strict=True))


def _side_by_side(baseline: str, its: Settings, candidate: str, how: Mapping[str, Settings]) -> bool:
    """Can both models run in this process, window by window?"""
    sides = ((its, baseline), (how[candidate], candidate))
    if any(side.spread is not None for side, _ in sides):
        return False  # replicas read a baseline's states from a reference
    return all(side.plugin(name).able().side_by_side for side, name in sides)


def _own_settings(engine: str | None, options: EngineArguments | None) -> dict[str, Any]:
    """What was given for the baseline alone."""
    given = {"engine": engine, **(options or {})}
    return {f"baseline_{name}": value for name, value in given.items() if value is not None}


def _named_against_file(file: str, name: str, how: Settings, folders: Folders) -> Comparison:
    with closing(how.hold(name)) as held:
        return against_file(file, held, {}, folders)


def _named(kept: str, question: dict[str, Any], name: str, how: Settings, folders: Folders) -> Comparison:
    """A candidate by its name, scored now."""
    stored = _question_of(runs.load(kept), question)
    if stored.get("tokenizer") is not None and how.tokenizer is None:
        how = replace(how, tokenizer=stored["tokenizer"])
    with closing(how.hold(name)) as held:
        return against_reference(kept, held, question, folders)


# ── a stored baseline ────────────────────────────────────────────────────────────────────────────────────────────────
def against_reference(folder: str | Path, held: HeldModel, question: dict[str, Any], folders: Folders) -> Comparison:
    """A model that is held against a reference: the reference brings its own question."""
    require(held.plugin, "divergence", "be compared with a reference")
    run_p, stored = runs.load(folder), open_reference(folder)
    kept = {name: value for name, value in _question_of(run_p, question).items() if name != "tokenizer"}
    asked = held.ask({**kept, **question}, folders.progress)
    _require_comparable(run_p, stored, asked)
    noise = {name: run_p.manifest.get(name) for name in NOISE}
    out, its_identity = folders.folder(held.subject.name), run_p.manifest["identity"]
    with held.claimed(asked, out, fresh=folders.fresh, against=its_identity) as claim:
        run_q = claim.finished
        if run_q is None:
            worker = held.engine(Work(longest=int(asked.plan.lengths.max())), folders.progress)
            with UnfinishedRun(asked, worker, claim, folders.progress, with_kl=True) as run:
                run.score(Want(against=StoredBaseline(stored, asked.plan)))
                run_q = run.save(run.manifest() | compared_with(run_p, noise))
            run_q = run_q if held.is_kept(out) else in_memory(run_q)
    return as_comparison(short(held.subject.name), run_p, run_q, run_q.kl)


def _question_of(run: Run, given: dict[str, Any]) -> dict[str, Any]:
    """The question of a stored baseline; what is given goes before it, and must lead to the same plan."""
    stored = run.manifest.get("question")
    if stored is None and not given:
        raise InputError(
            f"the text of {run.path} was piped in and cannot be read again", fix="give the same text with --corpus"
        )
    return dict(stored or {})


def _require_comparable(run_p: Run, stored: Reference, asked: Question) -> None:
    vocabulary = asked.subject.vocabulary
    require_comparable(
        stored.manifest,
        Outline(
            tokenizer=asked.tokens.tokenizer.fingerprint,
            vocabulary=stored.vocabulary if vocabulary is None else vocabulary,
            plan_digest=asked.plan.digest,
            method=asked.plan.method,
            settings=dict(asked.plan.settings),
            corpus_sha256=asked.corpus.sha256,
        ),
        where=lambda: first_difference(
            run_p.facts.token, run_p.facts.id, int(run_p.manifest["tokens"]), asked.tokens, asked.documents
        ),
    )


# ── two models side by side ──────────────────────────────────────────────────────────────────────────────────────────
def lockstep(held_p: HeldModel, held_q: HeldModel, question: dict[str, Any], folders: Folders) -> Comparison:
    """Two models that are held, side by side."""
    require(held_p.plugin, "hidden_states", "be the baseline of a comparison")
    require(held_q.plugin, "divergence", "be compared")
    for held in (held_p, held_q):
        require_alone(held.spread)
        require(held.plugin, "side_by_side", "run beside another; make a reference of the baseline first")
    first = held_p.ask(question, folders.progress)
    known, ids = _outline(first), first.tokens.ids
    del first  # where the two may be compared, they have the same text, tokens and plan: one of each is enough
    asked = held_q.ask(question, folders.progress)
    _require_same_question(known, asked, ids)
    del ids
    asked_p = replace(asked, subject=held_p.subject)
    identity_p = held_p.identity(asked_p)
    with ExitStack() as opened:
        # baseline first, everywhere: two processes that wait for each other would wait forever
        claim_p = opened.enter_context(held_p.claimed(asked_p, folders.folder("baseline"), fresh=folders.fresh))
        own = folders.folder(held_q.subject.name)
        claim_q = opened.enter_context(held_q.claimed(asked, own, fresh=folders.fresh, against=identity_p))
        run_p, run_q = claim_p.finished, claim_q.finished
        if run_p is None or run_q is None:
            worker_p = held_p.engine(Work(longest=int(asked.plan.lengths.max())), folders.progress)
            if run_q is not None:
                run_p = score_run(asked_p, worker_p, claim_p, folders.progress)
            else:
                sides = _Sides(asked_p, asked, worker_p, held_q, claim_p, claim_q)
                run_p, run_q = _score_both(sides, folders.progress)
        if not held_p.is_kept(folders.out):
            run_p = in_memory(run_p)
        if not held_q.is_kept(folders.out):
            run_q = in_memory(run_q)
    return as_comparison(short(held_q.subject.name), run_p, run_q, run_q.kl)


@dataclass(frozen=True, slots=True)
class _Sides:
    """A baseline that is open, and a candidate that will be: their questions and folders."""

    asked_p: Question
    asked_q: Question
    worker_p: Engine
    held_q: HeldModel
    claim_p: runs.Claim
    claim_q: runs.Claim


def _score_both(sides: _Sides, progress: Progress | None) -> tuple[Run, Run]:
    """Both models in one pass over the plan. The baseline's answers go into its own journal on the way."""
    claim_p, worker_p, plan = sides.claim_p, sides.worker_p, sides.asked_q.plan
    unfinished: UnfinishedRun | None = None

    def found(index: int, answers: Answers, seconds: float) -> None:
        if unfinished is not None and not unfinished.journal.done[index]:
            check_answers(unfinished.journal.schema, plan, [(index, answers)])
            unfinished.keep(index, answers, seconds)

    check_fits(plan, worker_p.facts.vocabulary, worker_p.facts.context_length)
    live = LiveBaseline(worker_p, plan, found)
    worker_q = sides.held_q.engine(Work(longest=int(plan.lengths.max())), progress)
    with ExitStack() as opened:
        if claim_p.finished is None:
            unfinished = opened.enter_context(UnfinishedRun(sides.asked_p, worker_p, claim_p, progress))
        candidate = UnfinishedRun(sides.asked_q, worker_q, sides.claim_q, progress, with_kl=True)
        opened.enter_context(candidate)
        live.want(worker_q.computes(plan, candidate.journal.done))
        candidate.score(Want(against=live))
        manifest = candidate.manifest()
        if unfinished is None:
            assert claim_p.finished is not None, "the baseline is scored now, or was before"
            run_p = claim_p.finished
        else:
            unfinished.score()  # what its journal lacks, after a resumed comparison
            run_p = unfinished.save(unfinished.manifest())
            claim_p.release()  # others may compare with the same baseline meanwhile
        noise = noise_facts(noise_floor(worker_p, plan))
        return run_p, candidate.save(manifest | compared_with(run_p, noise))


def _outline(asked: Question) -> Outline:
    return Outline(
        tokenizer=asked.tokens.tokenizer.fingerprint,
        vocabulary=asked.subject.vocabulary,
        plan_digest=asked.plan.digest,
        method=asked.plan.method,
        settings=dict(asked.plan.settings),
        corpus_sha256=asked.corpus.sha256,
    )


def _require_same_question(baseline: Outline, asked: Question, ids: Ids) -> None:
    """Refuse what cannot be compared, with the reason and what would make it comparable. ``ids`` are the baseline's."""

    def where() -> str | None:
        return first_difference(np.arange(len(ids)), ids, len(ids), asked.tokens, asked.documents)

    found = difference(baseline, _outline(asked), where)
    if found is None:
        return
    fixes = {
        "tokenizer": "feed both with one: --tokenizer FOLDER; or compare bits per byte, which scoremode ppl prints",
        "vocabulary": "compare models with one vocabulary",
        "text": "give both the same text",
        "plan": "give --context-length and --stride that both models allow",
    }
    raise InputError(found.reason, fix=fixes[found.kind])


# ── two finished runs ────────────────────────────────────────────────────────────────────────────────────────────────
def of_runs(baseline: str, candidate: str) -> Comparison:
    """Two finished runs of one plan. Their divergence is known only if the one was scored against the other."""
    if not runs.is_run(candidate):
        raise InputError(
            f"{baseline} is a run without hidden states, so {candidate} cannot be scored against it",
            fix=f"score it first: scoremode ppl {candidate} --out DIR, or make a reference of the baseline",
        )
    run_p, run_q = runs.load(baseline), runs.load(candidate)
    if run_p.plan_digest != run_q.plan_digest:
        what = [n for n in ("tokenizer", "corpus_sha256", "method") if run_p.manifest[n] != run_q.manifest[n]]
        raise RunError(
            f"{baseline} and {candidate} scored different plans (different {', '.join(what) or 'windows'})",
            fix="score both on the same text with the same method",
        )
    kl, missing = divergence_between(run_p, run_q)
    return as_comparison(short(candidate), run_p, run_q, kl, missing)


def divergence_between(baseline: Run, candidate: Run) -> tuple[Floats | None, str | None]:
    """KL of a finished run, if it was measured against exactly this baseline; else None, and why.

    What counts is the baseline's whole identity: weights, engine, dtype, settings and versions.
    """
    measured = candidate.manifest["identity"]["settings"].get("against")
    if candidate.kl is None or not isinstance(measured, dict):
        return None, "KL is not known between two finished runs: compare with a reference, or with the model"
    differing = _differences(measured, baseline.manifest["identity"])
    if differing:
        return None, f"KL was measured against another baseline: it differs in {harmless(', '.join(differing))}"
    return candidate.kl, None


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """In what two identities differ. Whether hidden states were kept as well does not change a score."""
    found = []
    for name in sorted(one.keys() | other.keys()):
        a, b = one.get(name), other.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = sorted((a.keys() | b.keys()) - {"keeps"})
            found += [f"{name} {key}" for key in inner if a.get(key) != b.get(key)]
        elif a != b:
            found.append(name)
    return found
