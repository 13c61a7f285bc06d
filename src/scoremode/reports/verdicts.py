"""What happened to a candidate, in a sentence: KL and first choices say if it changed, perplexity says better or worse.

same                     every log-probability is equal, and KL is 0 on every target
within the noise floor   its mean KL is not above the KL of the baseline against itself
changed                  KL less its error at 95 % (t · stderr) is above the noise floor; without one, above 0,
                         or first choices differ. Also if half of the targets moved more than 99 % do by noise, or if
                         better or worse is known
changed, worse, better   the direction: tokens of probability zero, infinite KL, or a perplexity ratio that differs from
                         1: p by Student's t with the paired error, and Holm's method over all candidates, as in the
                         ranking (reports/ranking.py)
not known                none of these

A model that is compared with itself (``scoremode paths``) has levels of its own:

the same bits            no target moved
more than the noise      the lower 95 % bounds of the rms difference and of the mean KL are above all noise that was
                         measured: that of computing a few windows again, and that of the prefill path
no more than the noise   one of them is not
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scoremode.core.scores.answers import measured
from scoremode.core.statistics.comparison import BY_NAME, Comparison, are_of_paths
from scoremode.core.statistics.estimate import LEVEL
from scoremode.core.statistics.groups import are_blocks
from scoremode.core.statistics.paired import PairedMeans
from scoremode.reports.gate import too_few
from scoremode.reports.numbers import Statistics
from scoremode.reports.ranking import p_value, told_apart
from scoremode.reports.text import counted
from scoremode.values import Estimate, digits_of, rounded, usable

HOLDS = "Figures measured on one path hold for the other."
DIFFERS = "Publish with every figure which path it comes from."


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a candidate is from its baseline, as one of the levels above, and as a sentence without the two names."""

    level: str
    sentence: str
    scale: str = ""  # where its KL lies between those of usual quantization types


def verdicts(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Judges every candidate; all of them are tested together, so that more candidates give no more false claims."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # infinities are handled below
        differences = [_log_ratio(c) for c in comparisons]
    apart = told_apart([p_value(d) if math.isfinite(d.value) else 1.0 for d in differences])
    return [
        _path_level(c) if c.is_of_paths else _level(c, difference, is_apart=is_apart)
        for c, difference, is_apart in zip(comparisons, differences, apart, strict=True)
    ]


def _level(c: Comparison, difference: Estimate, *, is_apart: bool) -> Verdict:
    s = c.statistics()
    one = _judged(s, _direction(c, s, difference, is_apart=is_apart))
    kl = usable(s.get("kl_mean"))
    return replace(one, scale=scale_words(kl)) if kl and one.level not in ("same", "within the noise floor") else one


def rule_words(comparisons: Sequence[Comparison]) -> str:
    """How the verdicts were reached, for a footnote."""
    if are_of_paths(comparisons):
        return (
            f"beyond the noise: the lower {100 * LEVEL:.0f} % bounds of the rms difference and of KL are both above "
            "what computing the same again moved"
        )
    candidates = len(comparisons)
    scale = f"; {SOURCE}" if any(c.kl is not None for c in comparisons) else ""
    together = f"; {candidates:,} candidates are tested together (Holm)" if candidates > 1 else ""
    return (
        f"changed: KL less its error at {100 * LEVEL:.0f} % is above the noise floor (above 0 if none was measured); "
        f"worse, better: the perplexity ratio differs from 1 at {100 * (1 - LEVEL):.0f} % by its paired error"
        f"{together}{scale}"
    )


def _log_ratio(c: Comparison) -> Estimate:
    found = measured(BY_NAME["log_ppl_ratio"].of)(PairedMeans(c))
    assert isinstance(found, Estimate), "a statistic with an error"
    return found


def _judged(s: Statistics, direction: tuple[str, str]) -> Verdict:
    """The verdict on a candidate; ``direction`` is 'worse', 'better' or '', and what that rests on, in words."""
    kl, floor = usable(s.get("kl_mean")), usable(s.get("noise_floor_kl_mean"))
    if s.get("targets") == 0:
        return Verdict("not known", "not known: there are no targets")
    if s.get("delta_logprob_max") == 0 and s.get("kl_max") == 0 and s.get("same_top") in (None, 1):
        return Verdict("same", "the same on every target: all log-probabilities are equal, KL is 0")
    if kl is not None and floor is not None and kl <= floor:
        return Verdict("within the noise floor", f"no change beyond the noise floor: {_moved(s)}")
    which, words = direction
    shown = _change(s)
    if shown is None and not which:
        start = "no change shown" if kl is None else f"not clearly above {'0' if floor is None else 'the noise floor'}"
        start = "not judged" if s.get("worse_stderr") is None else start
        return Verdict("not known", "; ".join([f"{start}: {_moved(s)}", *_unmeasured(s), words]))
    return Verdict(
        f"changed, {which}" if which else "changed",
        "; ".join(part for part in (f"changed: {_moved(s)}", *_unmeasured(s), shown, words) if part),
    )


def _change(s: Statistics) -> str | None:
    """Is a change shown? What that rests on, in words; '' if it needs none; None if no change is shown."""
    kl, floor, low = usable(s.get("kl_mean")), usable(s.get("noise_floor_kl_mean")), _kl_less_its_error(s)
    high = usable(s.get("same_top_high"))
    other_choices = high is not None and high < 1
    if kl is None:
        return "" if other_choices else None
    if floor is None:
        if other_choices:
            return ""
        return "no noise floor was measured" if low is not None and low > 0 else None
    if low is not None and low > floor:
        return ""
    half, noise = usable(s.get("kl_median")), usable(s.get("noise_floor_kl_p99"))
    if half is not None and noise is not None and half > noise:
        return "half of the targets moved more than 99 % do by noise"
    return None


def _kl_less_its_error(s: Statistics) -> float | None:
    """KL - t · stderr. Its own bounds are KL · exp(∓ t · stderr / KL), of which the lower one never reaches 0."""
    kl, high = usable(s.get("kl_mean")), usable(s.get("kl_mean_high"))
    if not kl or not high or kl < 0:
        return None if high is None else kl
    return kl - kl * math.log(high / kl)


def _path_level(c: Comparison) -> Verdict:
    """Judges a path against the prefill path of the same model, and says what that means for published figures."""
    s, rerun = c.statistics(), c.manifest["rerun"]
    if s.get("delta_logprob_max") == 0 and not usable(s.get("kl_max")):
        return Verdict("the same bits", f"the same bits as prefill on every target. {HOLDS}")
    rms, again = usable(s.get("delta_logprob_rms")), usable(rerun["rms"])
    moved = "" if rms is None else f" {_moved_words(rms, again, str(rerun['words']))}"
    beside = (("delta_logprob_rms", rms, again), ("kl_mean", s.get("kl_mean"), s.get("noise_floor_kl_mean")))
    known = [
        (usable(s.get(f"{name}_low")), value, noise)
        for name, value, noise in ((name, usable(value), usable(noise)) for name, value, noise in beside)
        if value is not None and noise is not None
    ]
    if not known:
        return Verdict("not known", f"not known if this is more than noise: none was measured.{moved}")
    if any((value if low is None else low) <= noise for low, value, noise in known):
        return Verdict("no more than the noise", f"no difference beyond the noise.{moved} {HOLDS}")
    if any(low is None for low, _, _ in known):
        few = too_few(s.get("groups"), c.baseline.manifest.get("stderr_groups", "groups"))
        return Verdict("not known", f"not known if this is more than noise: {few}.{moved}")
    return Verdict("more than the noise", f"a real difference, beyond the noise.{moved} {DIFFERS}")


def _moved_words(rms: float, noise: float | None, rerun: str) -> str:
    moved = f"Single log-probabilities differ from prefill's by {plain_nats(rms)} nats (rms)"
    if noise is None:
        return f"{moved}; what computing again moves is unknown ({rerun})."
    windows, how = rerun.split(", ", 1)
    by = f"moves them by {plain_nats(noise)}" if noise else "gives the same bits"
    return f"{moved}; computing {windows} again, {how}, {by}."


def plain_nats(value: float) -> str:
    """A small number with two digits and without an exponent.

    >>> plain_nats(1.123e-5), plain_nats(0.5801), plain_nats(3e-12)
    ('0.000011', '0.58', 'below 0.0000001')
    """
    if math.isinf(value):
        return "infinity"
    return "0" if value == 0 else f"{value:.{digits_of(value)}f}" if value >= 1e-7 else "below 0.0000001"


def _perplexity(s: Statistics) -> list[str]:
    """The change of perplexity in percent; nothing if a perplexity is infinite."""
    ratio = usable(s.get("ppl_ratio"))
    if ratio is None:
        return []
    number, error = rounded(ratio - 1, s.get("ppl_ratio_stderr"), percent=True)
    return [f"perplexity {'' if number.startswith('-') else '+'}{number} {error}".rstrip()]


def _moved(s: Statistics) -> str:
    """KL beside its noise floor, and the share of other first choices; log-probabilities if neither was measured."""
    kl, floor, found = usable(s.get("kl_mean")), usable(s.get("noise_floor_kl_mean")), list[str]()
    if kl is not None:
        low = _kl_less_its_error(s)
        is_clear = low is not None and low > (floor or 0)
        number, error = rounded(kl, s.get("kl_mean_stderr"))
        found.append(f"KL {number}" if is_clear else f"KL {number} {error}".rstrip())
        found += [] if is_clear or floor is None else [f"floor {rounded(floor)[0]}"]
    elif s.get("kl_infinite"):
        found.append("KL infinite")
    if (same := usable(s.get("same_top"))) is not None:
        found.append(f"first choice differs in {rounded(1 - same, s.get('same_top_stderr'), percent=True)[0]}")
    if not found and (rms := usable(s.get("delta_logprob_rms"))) is not None:
        found.append(f"log-probabilities differ by {rounded(rms)[0]} (rms)")
    return ", ".join(found) or "a log-probability is infinite"


def _unmeasured(s: Statistics) -> list[str]:
    """Says that KL was not measured, and first choices neither."""
    if s.get("kl_mean") is not None or s.get("kl_infinite") is not None:
        return []
    return ["KL was not measured" if s.get("same_top") is not None else "KL and first choices were not measured"]


def _direction(c: Comparison, s: Statistics, difference: Estimate, *, is_apart: bool) -> tuple[str, str]:
    """'worse', 'better', or '' if nobody can tell; and in words what that rests on."""
    impossible = (s.get("zero_probability_candidate") or 0) - (s.get("zero_probability_baseline") or 0)
    if impossible > 0:
        return "worse", f"probability zero for {counted(impossible, 'more tokens')} of the text: worse"
    if infinite := s.get("kl_infinite"):
        return "worse", f"KL is infinite on {counted(infinite, 'targets')}: worse"
    if impossible < 0:
        return "better", f"probability zero for {counted(-impossible, 'fewer tokens')} of the text: better"
    (said,) = _perplexity(s) or ["perplexity is infinite under both"]
    kind = str(c.baseline.manifest.get("stderr_groups", "groups"))
    if difference.stderr is None or not math.isfinite(difference.value):
        few = [too_few(s.get("groups"), kind)] if s.get("worse_stderr") is None else []
        return "", "; ".join([said, *few])
    if not is_apart:
        return "", f"{said} cannot tell better from worse on {counted(s.get('groups') or 0, kind)}"
    which = "worse" if difference.value > 0 else "better"
    where = f" on {counted(s.get('groups') or 0, kind)}" if are_blocks(kind) else ""  # says nothing of other texts
    return which, f"{said}: {which}{where}"


# ── the scale ────────────────────────────────────────────────────────────────────────────────────────────────────────
# How large a KL is, beside those of usual quantization types: KL(original‖quantized) on WikiText-2, nats per token.
#
# LLaMA 3 8B     llama.cpp's scoreboard, rows without importance matrix: tools/perplexity/README.md at commit b21e4de;
#                figures of 2024 (revision f364eb6, CUDA, f16 original, context 512, the whole test set)
# SmolLM2-135M   measured by the same tool on 60 chunks: docs/reading.md has the versions
#
# The KL of different models, texts and contexts compare only roughly: the same scoreboard has 0.11 for Q2_K of LLaMA 2
# 7B, a quarter of that of LLaMA 3 8B. A row of SmolLM2's 576 weights cannot be cut into the blocks of 256 that K types
# need, so llama.cpp stores most of its matrices in a type of more bits than the name says. Its Q5_K_M (0.074) is left
# out: what it is mostly stored in, Q5_1, is worse on these weights than the Q5_0 of its Q4_K_M.
MODELS: dict[str, dict[str, float]] = {
    "LLaMA 3 8B": {
        "Q8_0": 0.001355,
        "Q6_K": 0.005452,
        "Q5_K_M": 0.010762,
        "Q4_K_M": 0.031273,
        "Q3_K_M": 0.101913,
        "Q2_K": 0.445132,
    },
    "SmolLM2-135M": {
        "Q8_0": 0.003986,
        "Q6_K": 0.009233,
        "Q4_K_M": 0.056045,
        "Q3_K_M": 0.142932,
        "Q2_K": 0.430484,
    },
}
ABOUT = 1.25  # a KL within this factor of a type's is called about that of the type
SOURCE = (
    "scale: KL on WikiText-2 by llama.cpp's tool, of LLaMA 3 8B (its scoreboard, 2024) and SmolLM2-135M (its K types "
    "hold more bits than they say); other models and texts compare only roughly"
)


def scale_words(kl: float) -> str:
    """Where a KL lies between those of usual quantization types, in one line.

    >>> scale_words(0.03)
    'for scale: about Q4_K_M of LLaMA 3 8B; between Q6_K and Q4_K_M of SmolLM2-135M'
    """
    return "for scale: " + "; ".join(f"{_place(kl, types)} of {model}" for model, types in MODELS.items())


def _place(kl: float, types: dict[str, float]) -> str:
    known = sorted(types.items(), key=lambda one: one[1])
    near = min(range(len(known)), key=lambda i: max(kl / known[i][1], known[i][1] / kl))
    if max(kl / known[near][1], known[near][1] / kl) <= ABOUT:
        return f"about {known[near][0]}"
    above = sum(value < kl for _, value in known)
    if above == 0:
        return f"{'far ' if kl < known[0][1] / 10 else ''}below {known[0][0]} ({known[0][1]:.2g})"
    if above == len(known):
        return f"beyond {known[-1][0]} ({known[-1][1]:.2g})"
    return f"between {known[above - 1][0]} and {known[above][0]}"
