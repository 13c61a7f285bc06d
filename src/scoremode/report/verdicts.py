"""What a candidate lost, in one sentence, by a rule that rests on the paired error and on the noise floor.

within the noise floor   its mean KL is not above the KL of the baseline against itself
clearly worse, better    its perplexity ratio differs from 1: p by Student's t with the paired error, and Holm's method
                         over all candidates, as in the ranking (statistics/ranking.py)
within the noise         its perplexity ratio does not

A model that is compared with itself (``scoremode paths``) has levels of its own:

the same bits            no target moved
more than the noise      the lower 95 % bounds of the rms difference and of the mean KL are above all noise that was
                         measured: that of computing a few windows again, and that of the prefill path
no more than the noise   one of them is not
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from scoremode.plan.windows import measured
from scoremode.report.numbers import Statistics, rounded, shown_statistic, usable
from scoremode.statistics.comparison import BY_NAME, Comparison, are_of_paths
from scoremode.statistics.estimate import LEVEL
from scoremode.statistics.gate import too_few
from scoremode.statistics.paired import PairedMeans
from scoremode.statistics.ranking import p_value, told_apart
from scoremode.values import Estimate

Level = Literal[
    "within the noise floor",
    "within the noise",
    "clearly worse",
    "clearly better",
    "not known",
    "the same bits",
    "more than the noise",
    "no more than the noise",
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a candidate is from its baseline, as one of a few levels, and as a sentence without the two names."""

    level: Level
    sentence: str


def verdicts(comparisons: Sequence[Comparison], statistics: Sequence[Statistics]) -> list[Verdict]:
    """Judges every candidate; all of them are tested together, so that more candidates give no more false claims."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # infinities are handled below
        differences = [_log_ratio(c) for c in comparisons]
    apart = told_apart([p_value(d) if math.isfinite(d.value) else 1.0 for d in differences])
    found = []
    for c, s, difference, is_apart in zip(comparisons, statistics, differences, apart, strict=True):
        if c.is_of_paths:
            level, words = _path_level(c, s, c.manifest["rerun"])
        else:
            level = _level(s, difference, is_apart=is_apart)
            words = _words(c, s, level)
        found.append(Verdict(level, f"{', '.join(_measured(s))}: {words}".removeprefix(": ")))
    return found


def rule_words(comparisons: Sequence[Comparison]) -> str:
    """How the verdicts were reached, for a footnote."""
    if are_of_paths(comparisons):
        return (
            f"more than the noise: the lower {100 * LEVEL:.0f} % bound of the rms difference is above what the same "
            "computation moved when it was done again, and that of KL is above the noise floor"
        )
    candidates = len(comparisons)
    together = f"; {candidates:,} candidates are tested together (Holm)" if candidates > 1 else ""
    return f"clearly: the perplexity ratio differs from 1 at {100 * (1 - LEVEL):.0f} % by its paired error{together}"


def _log_ratio(c: Comparison) -> Estimate:
    found = measured(BY_NAME["log_ppl_ratio"].of)(PairedMeans(c))
    assert isinstance(found, Estimate), "a statistic with an error"
    return found


def _level(s: Statistics, difference: Estimate, *, is_apart: bool) -> Level:
    kl, floor = usable(s.get("kl_mean")), usable(s.get("noise_floor_kl_mean"))
    if floor is not None and kl is not None and kl <= floor:
        return "within the noise floor"
    if (s.get("zero_probability_candidate") or 0) > (s.get("zero_probability_baseline") or 0):
        return "clearly worse"
    if difference.stderr is None or not math.isfinite(difference.value):
        return "not known"
    if is_apart:
        return "clearly worse" if difference.value > 0 else "clearly better"
    return "within the noise"


def _path_level(c: Comparison, s: Statistics, rerun: Mapping[str, Any]) -> tuple[Level, str]:
    """Judges a path against the prefill path of the same model, and says what that rests on."""
    if s.get("delta_logprob_max") == 0 and not usable(s.get("kl_max")):
        return "the same bits", "the same bits as prefill on every target"
    beside = [
        ("rms", "delta_logprob_rms", usable(rerun["rms"]), f"when computed again ({rerun['words']})"),
        ("KL", "kl_mean", usable(s.get("noise_floor_kl_mean")), "of prefill against itself"),
    ]
    said, bounds = list[str](), list[tuple[float, float | None, float]]()
    for title, name, noise, words in beside:
        value, low = usable(s.get(name)), usable(s.get(f"{name}_low"))
        if value is not None and noise is not None:
            said.append(f"{title} {rounded(value)[0]} against {rounded(noise)[0]} {words}")
            bounds.append((value, low, noise))
    if not said:
        return "not known", f"no noise to compare with ({rerun['words']})"
    numbers = ", ".join(said)
    if any((value if low is None else low) <= noise for value, low, noise in bounds):
        return "no more than the noise", f"differs from prefill by no more than the noise, {numbers}"
    if any(low is None for _, low, _ in bounds):
        few = too_few(s.get("groups"), c.baseline.manifest.get("stderr_groups", "groups"))
        return "not known", f"{numbers}; {few}"
    return "more than the noise", f"differs from prefill by more than the noise, {numbers}"


def _measured(s: Statistics) -> list[str]:
    """The numbers that a sentence begins with: first choices, and the change of perplexity in percent."""
    found = []
    if s.get("same_top") is not None:
        found.append(f"same first choice {shown_statistic(BY_NAME['same_top'], s)[0]}")
    ratio = usable(s.get("ppl_ratio"))
    if ratio is not None:
        number, error = rounded(ratio - 1, s.get("ppl_ratio_stderr"), percent=True)
        found.append(f"perplexity {'' if number.startswith('-') else '+'}{number} {error}".rstrip())
    return found


def _words(c: Comparison, s: Statistics, level: Level) -> str:
    manifest: Any = c.baseline.manifest
    baseline, impossible = manifest.get("model", "the baseline"), s.get("zero_probability_candidate")
    match level:
        case "within the noise floor":
            return f"the same as {baseline}, within its noise floor"
        case "within the noise":
            return f"within the noise of {baseline}"
        case "clearly worse" if s.get("ppl_ratio") is None:
            return f"clearly worse, {impossible:,} tokens have probability zero"
        case "clearly worse" | "clearly better":
            return level
        case _:
            few = s.get("worse_stderr") is None
            return too_few(s.get("groups"), manifest.get("stderr_groups", "groups")) if few else "not known"
