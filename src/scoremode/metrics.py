"""Columns -> numbers with errors, grouped by what is independent.

Tokens of one document are not independent of each other, so the error of a mean is computed from group sums: with
group g holding s_g over n_g units, mean = Σs/Σn and var = G/(G-1) · Σ(s_g - mean·n_g)² / (Σn)². Groups are documents
where there are several, else windows; where windows overlap and score tokens twice, stretches of text as long as a
window. One group has no error: None.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from scoremode.types import Estimate, Floats, Ids, Ints, Plan, Scores, Tokens


def groups_of(plan: Plan) -> tuple[str, Ints]:
    """What counts as independent, and the group of each target (0, 1, …)."""
    documents = np.unique(plan.target_document)
    if len(documents) > 1:
        return "documents", np.searchsorted(documents, plan.target_document).astype(np.int64)
    if plan.scores_once:
        return "windows", plan.target_window
    stretch = plan.target_token // int(plan.lengths.max())
    return "stretches of text", np.unique(stretch, return_inverse=True)[1].astype(np.int64)


def ratio(numerator: Floats, denominator: Floats | Ids | Ints, groups: Ints) -> Estimate:
    """Σ numerator / Σ denominator over all targets, with the error of its groups."""
    n = len(groups)
    count = int(groups.max()) + 1 if n else 0
    sums = np.bincount(groups, weights=numerator, minlength=count)
    units = np.bincount(groups, weights=denominator.astype(np.float64), minlength=count)
    total = float(units.sum())
    if total == 0:
        return Estimate(math.nan, None, n, count)
    value = float(sums.sum()) / total
    if count < 2 or not math.isfinite(value):
        return Estimate(value, None, n, count)
    residual = sums - value * units
    variance = count / (count - 1) * float(residual @ residual) / total**2
    return Estimate(value, math.sqrt(variance), n, count)


def exponential(mean: Estimate) -> Estimate:
    """exp of an estimate; its error to first order."""
    value = math.exp(mean.value) if not mean.value >= 700 else math.inf
    usable = mean.stderr is not None and math.isfinite(value)
    return Estimate(value, value * mean.stderr if usable and mean.stderr is not None else None, mean.n, mean.groups)


def mean_nll(plan: Plan, nll: Floats, groups: Ints) -> Estimate:
    """Nats a target, averaged as the method says."""
    if plan.average != "window":
        return ratio(nll, np.ones(len(nll)), groups)
    assert plan.weight is not None
    share = plan.weight / plan.target_counts  # so that each window's mean counts `weight` times
    weights = share[plan.target_window]
    return ratio(nll * weights, weights, groups)


def mean_of_perplexities(plan: Plan, nll: Floats) -> Estimate:
    """Arithmetic mean over documents of exp(mean nll of the document)."""
    documents, index, counts = np.unique(plan.target_document, return_inverse=True, return_counts=True)
    with np.errstate(over="ignore"):
        each = np.exp(np.bincount(index, weights=nll) / counts)
    value = float(each.mean())
    known = len(documents) > 1 and math.isfinite(value)
    stderr = float(each.std(ddof=1)) / math.sqrt(len(each)) if known else None
    return Estimate(value, stderr, len(nll), len(documents))


def all_metrics(plan: Plan, tokens: Tokens, scores: Scores) -> dict[str, Estimate]:
    """Every number that a run carries."""
    _, groups = groups_of(plan)
    nll = -scores.logprob
    ones = np.ones(len(nll))
    index = plan.target_token
    mean = mean_nll(plan, nll, groups)
    per_text = plan.average == "document"
    nats_per_byte = _per_unit(plan, nll, groups, tokens.byte_len[index], tokens.doc_bytes)
    return {
        "perplexity": mean_of_perplexities(plan, nll) if per_text else exponential(mean),
        "mean_nll": mean,
        "bits_per_byte": _scaled(nats_per_byte, 1 / math.log(2)),
        "word_perplexity": exponential(_per_unit(plan, nll, groups, tokens.word_starts[index], tokens.doc_words)),
        "mean_rank": ratio(scores.rank.astype(np.float64), ones, groups),
        "top1_accuracy": ratio((scores.rank == 1).astype(np.float64), ones, groups),
        "mean_entropy": ratio(scores.entropy, ones, groups),
    }


def _per_unit(plan: Plan, nll: Floats, groups: Ints, units: Ids, per_document: Ints) -> Estimate:
    """Nats a byte or a word: of the scored text, or, in lm-eval-rolling, of the whole source documents."""
    if plan.method != "lm-eval-rolling" or plan.mask is not None:
        return ratio(nll, units, groups)
    share = np.zeros(len(nll))
    firsts = np.unique(plan.target_document, return_index=True)[1]
    share[firsts] = per_document[plan.target_document[firsts]]
    return ratio(nll, share, groups)


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    stderr = None if estimate.stderr is None else estimate.stderr * factor
    return Estimate(estimate.value * factor, stderr, estimate.n, estimate.groups)


def llamacpp_stderr(scores: Scores) -> float | None:
    """The error that llama.cpp prints beside its perplexity: every token taken as independent."""
    n = len(scores)
    if n < 2:
        return None
    nll = -scores.logprob
    mean = float(nll.mean())
    variance = float((nll**2).mean()) - mean**2
    return math.exp(mean) * math.sqrt(max(0.0, variance) / (n - 1))


def as_json(estimates: dict[str, Estimate]) -> dict[str, Any]:
    """Estimates as plain data; JSON has no infinity: what is infinite becomes null, what does not exist is left out."""
    return {
        name: {"value": finite(e.value), "stderr": finite(e.stderr), "n": e.n, "groups": e.groups}
        for name, e in estimates.items()
        if not math.isnan(e.value)
    }


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
