"""What changed between a baseline and its candidates: the same plan, target by target, over the whole vocabulary.

Each candidate is scored once, against the baseline's hidden states; each model's distribution is made by its own head,
so that a quantized head is seen. What cannot be compared is refused, never cut to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.engines.base import Baseline, Engine, EngineOptions, Want, gather_options
from scoremode.engines.baseline import LiveBaseline, StoredBaseline, noise_facts, noise_floor
from scoremode.errors import InputError, RunError, harmless
from scoremode.plan.comparable import Outline, difference
from scoremode.plan.plan import Plan
from scoremode.plan.windows import Answers
from scoremode.statistics.comparison import Comparison
from scoremode.store import runs
from scoremode.store.journal import Journal
from scoremode.store.reference import Reference, require_comparable
from scoremode.store.reference_format import REFERENCE
from scoremode.store.run import Run
from scoremode.values import Bools, Floats
from scoremode.verbs.question import Question, ask
from scoremode.verbs.reference import reference
from scoremode.verbs.scoring import Answered, Progress, Side, check_answers, check_fits, score_into

NOISE = ("noise_kl", "noise_perturbed")  # of a manifest


def compare(
    baseline: str,
    *candidates: str,
    engine: str | None = None,
    options: EngineOptions | None = None,
    baseline_engine: str | None = None,
    baseline_options: EngineOptions | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **question: Any,
) -> list[Comparison]:
    """Candidates against a baseline: models, a reference, or finished runs.

    ``question`` is what :func:`scoremode.verbs.question.ask` takes and, by name, what EngineOptions has. A reference
    brings its own question. ``engine`` and ``options`` are the candidates'; the baseline has its own, else the same.
    A model as the baseline runs beside a single candidate; for several its states are kept first.

    >>> compare("table:uniform", "table:uniform", text="any text")[0].kl.max()
    np.float64(0.0)
    """
    if not candidates:
        raise InputError("there is no candidate", fix="name a model, or a run, behind the baseline")
    if len({short(name) for name in candidates}) < len(candidates):
        raise InputError(
            "two candidates have the same name", fix="rename one folder, so that tables can tell them apart"
        )
    options = gather_options(options, question)
    keep = Keep(Path(out) if out is not None else None, fresh, progress)
    keep.require_a_folder_each(candidates)
    its_engine, its_options = baseline_engine or engine, baseline_options or options
    if (Path(baseline) / REFERENCE).exists():
        kept = Path(baseline)
    elif runs.is_run(baseline):
        return [of_runs(baseline, name) for name in candidates]
    elif len(candidates) == 1 and not runs.is_run(candidates[0]) and "vllm" not in (engine, its_engine):
        its_how = How(its_engine, its_options, question)
        return [_lockstep(baseline, candidates[0], its_how, How(engine, options, question), keep)]
    else:
        its_run = reference(
            baseline,
            keep.folder("baseline"),
            engine=its_engine,
            options=its_options,
            fresh=fresh,
            progress=progress,
            **question,
        )
        kept = Path(str(its_run.path))
    return [_against_reference(kept, name, How(engine, options, question), keep) for name in candidates]


def short(name: str) -> str:
    """What a candidate is called in tables: the last part of a folder's path."""
    return Path(name).name or name if Path(name).is_dir() else name


@dataclass(frozen=True, slots=True)
class Keep:
    """Where runs of a comparison go, and how."""

    out: Path | None
    fresh: bool
    progress: Progress | None

    def folder(self, name: str) -> Path | None:
        """For the run of that name; a model's name may be a path, of which the last part is taken."""
        return None if self.out is None else self.out / (Path(name).name or "candidate")

    def require_a_folder_each(self, candidates: Sequence[str]) -> None:
        """Refuse candidates whose runs would lie in one folder, before one of them is scored."""
        names = ["baseline", *(Path(name).name or "candidate" for name in candidates)]
        if self.out is not None and len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(
                f"two runs of this comparison would lie in {self.out / twice}",
                fix="leave --out out, or rename a candidate's folder",
            )


@dataclass(frozen=True, slots=True)
class How:
    """How models are scored."""

    engine: str | None
    options: EngineOptions
    question: dict[str, Any]

    def ask(self, name: str, **stored: Any) -> Question:
        """The question for the model of that name; ``stored`` is what a stored baseline adds to it."""
        return ask(name, trust_remote_code=bool(self.options.trust_remote_code), **{**stored, **self.question})

    def side(self, asked: Question, folder: Path | None, **more: Any) -> Side:
        return Side.of(asked, self.engine, self.options, folder, **more)


def _against(baseline: Baseline, engine: Engine, plan: Plan, done: Bools) -> Answered:
    if isinstance(baseline, LiveBaseline):
        baseline.want(engine.computes(plan, done))
    yield from engine.score(plan, done, Want(against=baseline))


# ── a stored baseline ────────────────────────────────────────────────────────────────────────────────────────────────
def _against_reference(folder: Path, name: str, how: How, keep: Keep) -> Comparison:
    run_p, stored = runs.load(folder), Reference.open(folder)
    if runs.is_run(name):
        return of_runs(str(folder), name)
    asked = how.ask(name, **_question_of(run_p, how.question))
    _require_comparable(stored, asked)
    q = how.side(asked, keep.folder(name), against=run_p.manifest["identity"])
    noise = {name: run_p.manifest.get(name) for name in NOISE}
    with q.claimed(fresh=keep.fresh) as claim:
        run_q = claim.finished
        if run_q is None:
            with closing(q.open()) as worker:
                beside = StoredBaseline(stored, q.asked.plan)
                run_q = _score(
                    q, worker, claim, beside, run_p=lambda: run_p, progress=keep.progress, noise=lambda: noise
                )
    return as_comparison(short(name), run_p, run_q, run_q.kl)


def _question_of(run: Run, given: dict[str, Any]) -> dict[str, Any]:
    """The question of a stored baseline; what is given goes before it, and must lead to the same plan."""
    stored = run.manifest.get("question")
    if stored is None and not given:
        raise InputError(
            f"the text of {run.path} was piped in and cannot be read again", fix="give the same text with --corpus"
        )
    return dict(stored or {})


def _require_comparable(stored: Reference, asked: Question) -> None:
    vocabulary = asked.subject.vocabulary
    require_comparable(
        stored.manifest,
        plan_digest=asked.plan.digest,
        tokenizer=asked.tokens.tokenizer.fingerprint,
        vocabulary=stored.vocabulary if vocabulary is None else vocabulary,
        method=asked.plan.method,
        method_settings=dict(asked.plan.settings),
        corpus_sha256=asked.corpus.sha256,
    )


def _score(
    q: Side,
    worker: Engine,
    claim: runs.Claim,
    baseline: Baseline,
    *,
    run_p: Callable[[], Run],
    progress: Progress | None,
    noise: Callable[[], dict[str, Any]],
) -> Run:
    """Score a candidate; ``run_p`` and ``noise`` are asked for when all is scored and nothing is saved yet."""

    def complete(manifest: dict[str, Any]) -> None:
        of_p = run_p().manifest
        manifest["against"] = {"model": of_p["model"], "fingerprint": of_p["model_fingerprint"]}
        manifest.update(noise())

    return score_into(
        q.asked,
        worker,
        claim,
        progress,
        answered=partial(_against, baseline),
        with_kl=True,
        before_saving=complete,
    )


# ── two models side by side ──────────────────────────────────────────────────────────────────────────────────────────
def _lockstep(baseline: str, candidate: str, how_p: How, how_q: How, keep: Keep) -> Comparison:
    first = how_p.ask(baseline)
    subject, known = first.subject, _outline(first)
    del first  # where the two may be compared, they have the same text, tokens and plan: one of each is enough
    asked = how_q.ask(candidate)
    _require_same_question(known, _outline(asked))
    p = how_p.side(replace(asked, subject=subject), keep.folder("baseline"))
    q = how_q.side(asked, keep.folder(candidate), against=p.identity)
    with ExitStack() as opened:
        # baseline first, everywhere: two processes that wait for each other would wait for ever
        claim_p, claim_q = (opened.enter_context(side.claimed(fresh=keep.fresh)) for side in (p, q))
        run_p, run_q = claim_p.finished, claim_q.finished
        if run_p is None or run_q is None:
            worker_p = opened.enter_context(closing(p.open()))
            if run_q is not None:
                run_p = score_into(p.asked, worker_p, claim_p, keep.progress)
            else:
                run_p, run_q = _beside(p, q, worker_p, claims=(claim_p, claim_q), progress=keep.progress)
    return as_comparison(short(candidate), run_p, run_q, run_q.kl)


def _beside(
    p: Side, q: Side, worker_p: Engine, *, claims: tuple[runs.Claim, runs.Claim], progress: Progress | None
) -> tuple[Run, Run]:
    """Both models in one pass over the plan. The baseline's answers go into its own journal on the way."""
    claim_p, claim_q = claims
    plan, vocabulary = q.asked.plan, worker_p.facts.vocabulary
    finished = [claim_p.finished] if claim_p.finished is not None else []
    own: Journal | None = None

    def found(index: int, answers: Answers, seconds: float) -> None:
        if own is not None and not own.done[index]:
            check_answers(index, plan.window(index), answers)
            own.add(index, answers, seconds)

    def finish_p() -> Run:
        if own is not None and not finished:  # what the journal lacks, after a resumed comparison, is scored now
            own.close()
            finished.append(score_into(p.asked, worker_p, claim_p, progress))
            claim_p.release()  # others may compare with the same baseline meanwhile
        return finished[0]

    check_fits(plan, vocabulary, worker_p.facts.context_length)
    live = LiveBaseline(worker_p, plan, found)
    with closing(q.open()) as worker_q:
        if not finished:
            claim_p.begin()
            own = Journal(p.folder / runs.JOURNAL, claim_p.identity, plan, vocabulary=vocabulary)
        try:
            noise = partial(_noise_facts_of, worker_p, plan)
            run_q = _score(q, worker_q, claim_q, live, run_p=finish_p, progress=progress, noise=noise)
        finally:
            if own is not None:
                own.close()
    return finished[0], run_q


def _noise_facts_of(worker: Engine, plan: Plan) -> dict[str, Any]:
    return noise_facts(noise_floor(worker, plan))


def _outline(asked: Question) -> Outline:
    return Outline(
        tokenizer=asked.tokens.tokenizer.fingerprint,
        vocabulary=asked.subject.vocabulary,
        plan_digest=asked.plan.digest,
        method=asked.plan.method,
        settings=dict(asked.plan.settings),
        corpus_sha256=asked.corpus.sha256,
    )


def _require_same_question(baseline: Outline, candidate: Outline) -> None:
    """Refuse what cannot be compared, with the reason and what would make it comparable."""
    found = difference(baseline, candidate)
    if found is None:
        return
    fixes = {
        "tokenizer": "compare bits per byte instead: scoremode ppl prints them for each",
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
            f"{baseline} and {candidate} scored different plans ({', '.join(what) or 'other windows'} differ)",
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


def as_comparison(
    name: str, baseline: Run, candidate: Run, kl: Floats | None, kl_missing: str | None = None
) -> Comparison:
    """Two runs of one plan, whose groups and weights are kept with each. ``kl_missing`` says why there is no KL."""
    floor, words = noise_of(candidate) if kl is not None else (None, None)
    return Comparison(
        name,
        baseline,
        candidate,
        baseline.facts.group,
        baseline.facts.weight,
        kl,
        floor,
        {**_sizes(candidate), **({} if kl_missing is None else {"kl_missing": kl_missing})},
        candidate.path,
        words,
    )


def noise_of(run: Run) -> tuple[Floats | None, str | None]:
    """The noise floor that a run was given, and the words that say how it was measured, or why it was not."""
    kl, words = (run.manifest.get(name) for name in NOISE)
    return None if kl is None else np.array(kl), words


def _sizes(run: Run) -> dict[str, Any]:
    """What the report draws against divergence."""
    keys = (("bytes", "weight_bytes"), ("bits_per_weight", "bits_per_weight"))
    return {name: run.manifest[key] for name, key in keys if run.manifest.get(key)}
