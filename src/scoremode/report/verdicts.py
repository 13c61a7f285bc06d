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
from scoremode.report.numbers import Statistics, digits_of, rounded, shown_statistic, usable
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

HOLDS = "Figures measured on one path hold for the other."
NO_CHANGE = 1e-5  # of a perplexity ratio: 0.001 %


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
            found.append(_path_level(c, s, c.manifest["rerun"]))
            continue
        level = _level(s, difference, is_apart=is_apart)
        words = _words(c, s, level)
        found.append(Verdict(level, f"{', '.join(_measured(s))}: {words}".removeprefix(": ")))
    return found


def rule_words(comparisons: Sequence[Comparison]) -> str:
    """How the verdicts were reached, for a footnote."""
    if are_of_paths(comparisons):
        return (
            f"beyond the noise: the lower {100 * LEVEL:.0f} % bounds of the rms difference and of KL are both above "
            "what computing the same again moved"
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


def _path_level(c: Comparison, s: Statistics, rerun: Mapping[str, Any]) -> Verdict:
    """Judges a path against the prefill path of the same model, and says what that means for published figures."""
    if s.get("delta_logprob_max") == 0 and not usable(s.get("kl_max")):
        return Verdict("the same bits", f"the same bits as prefill on every target. {HOLDS}")
    said, bounds = list[str](), list[tuple[float, float | None, float]]()
    beside = (
        ("delta_logprob_rms", usable(rerun["rms"]), _moved_words),
        ("kl_mean", usable(s.get("noise_floor_kl_mean")), _kl_words),
    )
    for name, noise, words in beside:
        value, low = usable(s.get(name)), usable(s.get(f"{name}_low"))
        if value is not None:
            said.append(words(s, value, noise, str(rerun["words"])))
        if value is not None and noise is not None:
            bounds.append((value, low, noise))
    numbers = " ".join([*filter(None, said), f"{_path_means(s)}."])
    if not bounds:
        return Verdict("not known", f"not known if this is more than noise: none was measured. {numbers}")
    if any((value if low is None else low) <= noise for value, low, noise in bounds):
        return Verdict("no more than the noise", f"no difference beyond the noise. {numbers} {HOLDS}")
    if any(low is None for _, low, _ in bounds):
        few = too_few(s.get("groups"), c.baseline.manifest.get("stderr_groups", "groups"))
        return Verdict("not known", f"not known if this is more than noise: {few}. {numbers}")
    return Verdict("more than the noise", f"a real difference, beyond the noise. {numbers} {_path_meaning(s)}")


def _moved_words(s: Statistics, rms: float, noise: float | None, rerun: str) -> str:
    largest = f", at most {plain_nats(s['delta_logprob_max'])}" if usable(s.get("delta_logprob_max")) else ""
    moved = f"Single log-probabilities differ from prefill's by {plain_nats(rms)} nats (rms){largest}"
    if noise is None:
        return f"{moved}; what computing again moves is unknown ({rerun})."
    windows, how = rerun.split(", ", 1)
    by = f"moves them by {plain_nats(noise)}" if noise else "gives the same bits"
    return f"{moved}; computing {windows} again, {how}, {by}."


def _kl_words(_: Statistics, kl: float, floor: float | None, __: str) -> str:
    if floor is None:
        return ""
    said, own = f"KL, over all possible next tokens, is {plain_nats(kl)}", plain_nats(floor)
    itself = "that of prefill against itself, computed in another way"
    if own == plain_nats(kl):
        return f"{said}, and so is {itself}."
    return f"{said}, {'more' if kl > floor else 'no more'} than {itself} ({own})."


def _path_means(s: Statistics) -> str:
    """What happened to perplexity and to first choices; a change that rounds to nothing is not given in digits."""
    found, ratio, error = list[str](), usable(s.get("ppl_ratio")), usable(s.get("ppl_ratio_stderr")) or 0.0
    if ratio is None:
        found.append("Perplexity is infinite")
    elif abs(ratio - 1) + error < NO_CHANGE:
        found.append(f"No measurable change of perplexity (below {100 * NO_CHANGE:.3f} %)")
    else:
        digits = min(3, digits_of(100 * (error or abs(ratio - 1))))
        number = round(100 * (ratio - 1), digits) + 0.0  # no negative zero
        found.append(f"Perplexity {number:+.{digits}f}%" + (f" ± {100 * error:.{digits}f}%" if error else ""))
    if s.get("same_top") is not None:
        found.append(f"same first choice {shown_statistic(BY_NAME['same_top'], s)[0]}")
    return ", ".join(found)


def _path_meaning(s: Statistics) -> str:
    """What a difference beyond the noise means for published figures."""
    low, high = usable(s.get("ppl_ratio_low")), usable(s.get("ppl_ratio_high"))
    if low is not None and high is not None and low <= 1 <= high:
        return (
            "Perplexity is the same within its error; with probabilities of single tokens and greedy choices, "
            "publish which path they come from."
        )
    return "Publish with every figure which path it comes from."


def plain_nats(value: float) -> str:
    """A small number with two digits and without an exponent.

    >>> plain_nats(1.123e-5), plain_nats(0.5801), plain_nats(3e-12)
    ('0.000011', '0.58', 'below 0.0000001')
    """
    if math.isinf(value):
        return "infinity"
    return "0" if value == 0 else f"{value:.{digits_of(value)}f}" if value >= 1e-7 else "below 0.0000001"


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
