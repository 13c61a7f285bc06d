"""Compares finished runs of one plan: nothing is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scoremode.core.scores.columns import Divergences
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store import runs
from scoremode.core.store.run import Run
from scoremode.core.verbs.compared_models import as_comparison, short
from scoremode.errors import InputError, RunError, harmless


def of_runs(baseline: str, candidates: Sequence[str], run_p: Run | None = None) -> list[Comparison]:
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
    return found


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
    differing = _differences(measured, baseline.manifest["identity"])
    if differing:
        what = harmless(", ".join(differing))
        return Divergences(), f"KL was measured against another baseline: it differs in {what}"
    return candidate.divergences, None


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The fields in which two identities differ, except whether hidden states were kept, which changes no score."""
    found = []
    for name in sorted(one.keys() | other.keys()):
        a, b = one.get(name), other.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = sorted((a.keys() | b.keys()) - {"keeps"})
            found += [f"{name} {key}" for key in inner if a.get(key) != b.get(key)]
        elif a != b:
            found.append(name)
    return found
