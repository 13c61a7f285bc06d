"""What happened to a candidate, in a sentence that answers two questions: did these targets change, and how much?

no difference found              every log-probability is equal, and KL is 0 on every target
a difference within the noise    no single target is beyond the noise that was measured, and the mean is below it, or
                                 with 95 % below twice of it
changed                          a target is beyond the noise, or the mean is: see below
not known                        none of these; the sentence says what would decide it

*Did these targets change?* is about these targets alone, whatever was not read. A target changed if its KL is above
what computing again gives to any of so many targets in 1 of 100 runs: the quantile of the noise floor at
1 - 0.01 / targets, with its tail extrapolated (Weissman's estimate, Hill's index). *How much, on texts like these?* has
an error, by group: the mean is beyond the noise if KL less its error at 95 % is above the floor. Without a floor, USUAL
takes its place. A direction of the text that chance gives in fewer than 1 of 100 runs makes "changed" of "not known".

A second clause says whether the text became likelier or less likely, if the bounds of the perplexity ratio exclude 1
(all candidates together, by Holm); tokens of probability zero decide alone. It is about the text: a likelier text does
not make a better model. Over blocks of one text nothing is claimed, and of fewer than ENOUGH effective documents only
with ``few_documents``, which says how often such a claim is false.

A model that is compared with itself (``scoremode paths``) is within the noise unless the lower 95 % bounds of the rms
difference and of the mean KL are above all noise that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scoremode.core.statistics.comparison import Comparison, are_of_paths
from scoremode.core.statistics.estimate import LEVEL
from scoremode.core.statistics.groups import ENOUGH, are_blocks, false_of_few
from scoremode.core.statistics.paired import PairedMeans, chance_of_no_change
from scoremode.errors import readable
from scoremode.reports.numbers import Statistics
from scoremode.reports.ranking import told_apart
from scoremode.reports.text import counted, too_few
from scoremode.values import Floats, Ints, digits_of, rounded, usable

HOLDS = "Figures measured on one path hold for the other."
DIFFERS = "Publish with every figure which path it comes from."
NONE, NOISE, CHANGED, UNKNOWN = "no difference found", "a difference within the noise", "changed", "not known"
LESS, LIKELIER = "text less likely", "text likelier"
USUAL = 1e-3  # nats: bfloat16 serving alone costs SmolLM2-135M a mean KL of 0.00095 (docs/compare.md)
OTHER_CHOICES = 0.05  # share of first choices; chosen, not measured
FAR_SMALLER = 1e-3  # × the largest: such noise has another cause
ROUNDING = 1e-10  # nats: float32 moves log-probabilities by about 1e-5, and KL by half of that's square
IN_16_BITS = 1e-3  # nats of a target, likewise: a rare rounding moves up to 0.0002 (benchmarks/honest_noise.py)
EQUAL = 1e-5  # perplexity ratios less 1 that nobody needs the digits of
RARE = 0.01  # targets that rounding may move where a sample of the noise shows none
RATIO = "chance would give such a perplexity ratio in fewer than 1 of 100 runs"
OFTEN = 0.01  # runs of a model against itself in which a target may be called changed


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happened to a candidate: one of the four levels above, and a sentence without the two names."""

    level: str
    sentence: str
    scale: str = ""  # where its KL lies between those of usual quantization types
    direction: str = ""  # LESS, LIKELIER, or '' if that is not known


def verdicts(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Judges every candidate. Tests are corrected for their number, so more candidates give no more false claims."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # infinities are handled below
        chances = [chance_of_no_change(PairedMeans(c)) for c in comparisons]
    return [
        _path_level(c) if c.is_of_paths else _judged(c, is_apart=is_apart, chance=chance * len(chances))
        for c, is_apart, chance in zip(comparisons, told_apart(chances), chances, strict=True)
    ]


def rule_words(comparisons: Sequence[Comparison], judged: Sequence[Verdict]) -> list[str]:
    """What the words of these verdicts mean, a line each: only words that one of them has."""
    level, lines = f"{100 * LEVEL:.0f} %", list[str]()
    if any(verdict.level == CHANGED for verdict in judged):
        lines.append(_rule_of_changed(comparisons, level))
    if any(verdict.direction for verdict in judged):
        several = f"; {len(judged):,} candidates are tested together (Holm's method)" if len(judged) > 1 else ""
        lines.append(f"likelier, less likely: the {level} bounds of the perplexity ratio exclude 1{several}")
    return [*lines, *([SOURCE] if any(verdict.scale for verdict in judged) else [])]


def _rule_of_changed(comparisons: Sequence[Comparison], level: str) -> str:
    if are_of_paths(comparisons):
        how = f"the lower {level} bounds of the rms difference and of KL are both above what"
        return f"changed: {how} computing the same again moved"
    if all(c.kl is None for c in comparisons):
        return f"changed: at {level}, first choices differ in more than {OTHER_CHOICES:.0%}, or {RATIO}"
    mean = f"the mean KL less its error at {level} is above"
    if all(c.noise_kl is None for c in comparisons):
        return f"changed: {mean} {USUAL:g} (no noise floor was measured), or {RATIO}"
    many = "KL of a target is above all that 99 of 100 computations again give"
    return f"changed: {mean} the noise floor, {many}, or {RATIO}"


def changed_targets(c: Comparison) -> Ints | None:
    """The indices of the targets that moved further than noise does; None if KL or a noise floor was not measured.

    >>> changed_targets(comparison)    # doctest: +SKIP
    array([ 17, 203])
    """
    if c.kl is None or c.noise_kl is None or not len(c.noise_kl):
        return None
    return np.flatnonzero(c.kl > largest_of_noise(c.noise_kl, len(c.kl), _rounding(c)))


def _rounding(c: Comparison) -> float:
    """KL that rounding may give a target, even if a sample of the noise shows none: some windows round otherwise."""
    return IN_16_BITS if c.baseline.manifest.get("dtype") in ("bfloat16", "float16") else ROUNDING


def largest_of_noise(noise: Floats, targets: int, rounding: float = ROUNDING) -> float:
    """The KL that noise exceeds on any of so many targets in OFTEN of runs, from a sample of it.

    The tail above the largest twentieth, without what is far smaller, is extrapolated as a power law, with an index of
    one half or more.

    >>> [f"{largest_of_noise(noise, 100):.3g}" for noise in (np.linspace(0, 1, 1000), np.zeros(9))]
    ['21.2', '1e-10']
    """
    tail = np.sort(noise)[-max(10, len(noise) // 20) - 1 :]
    tail = tail[tail > FAR_SMALLER * tail[-1]]
    if not len(tail) or tail[-1] <= 0:
        return rounding
    index = max(0.5, float(np.log(tail / tail[0]).sum()) / max(1, len(tail) - 1))
    times = max(1, len(tail) - 1) * targets / (len(noise) * OFTEN)
    return max(rounding, float(tail[-1]), float(tail[0]) * float(max(1.0, times) ** index))


def _judged(c: Comparison, *, is_apart: bool, chance: float) -> Verdict:
    s = c.statistics()
    if s.get("targets") == 0:
        return Verdict(UNKNOWN, "not known: there are no targets")
    if s.get("delta_logprob_max") == 0 and s.get("kl_max") == 0 and s.get("same_top") in (None, 1):
        return Verdict(NONE, "no difference found: every log-probability is equal, and KL is 0 on every target")
    targets = changed_targets(c)
    level = _level_of(s, targets, RARE * _rounding(c))
    direction, text = _direction(c, s, is_apart=is_apart if level != UNKNOWN else chance < OFTEN)
    level = CHANGED if level == UNKNOWN and direction else level
    decides = _what_decides(c, s) if level == UNKNOWN else []
    parts = [f"{level}: {_moved(s, RARE * _rounding(c))}", *_targets_words(c, targets), *_unmeasured(s), text, *decides]
    kl = usable(s.get("kl_mean"))
    scale = scale_words(kl) if kl and kl > 0 and level in (CHANGED, UNKNOWN) else ""
    return Verdict(level, "; ".join(part for part in parts if part), scale, direction)


def _level_of(s: Statistics, targets: Ints | None, rounding: float) -> str:
    kl, high, floor = (usable(s.get(name)) for name in ("kl_mean", "kl_mean_high", "noise_floor_kl_mean"))
    noise = USUAL if floor is None else max(floor, rounding)
    if s.get("kl_infinite") or (targets is not None and len(targets)) or _is_beyond(s, noise):
        return CHANGED
    is_small = kl is not None and (kl <= noise or (high is not None and high <= 2 * noise))
    return NOISE if is_small and floor is not None else UNKNOWN


def _is_beyond(s: Statistics, noise: float) -> bool:
    """Is the mean KL less its error beyond the noise? Without KL: do first choices differ in more than one of 20?"""
    low, same = _kl_less_its_error(s), usable(s.get("same_top_high"))
    if usable(s.get("kl_mean")) is None:
        return same is not None and same < 1 - OTHER_CHOICES
    return low is not None and low > noise


def _what_decides(c: Comparison, s: Statistics) -> list[str]:
    """What would decide it: a noise floor, or more documents."""
    kind = c.baseline.group_kind
    needed = []
    if s.get("kl_mean") is None and s.get("same_top") is not None:
        return ["KL decides: give models, not finished runs"]
    if s.get("worse_stderr") is None:
        needed.append(too_few(s.get("groups"), kind))
    elif are_blocks(kind):
        needed.append("give unrelated documents")
    if s.get("kl_mean") is not None and s.get("noise_floor_kl_mean") is None:
        needed.append("no noise floor was measured")
    return needed or ["give more documents"]


def _targets_words(c: Comparison, targets: Ints | None) -> list[str]:
    """How many targets moved further than noise does, and the one that moved most."""
    if targets is None or not len(targets) or c.kl is None:
        return []
    if len(targets) == len(c.kl):
        return ["on every target"]
    facts, worst = c.candidate.facts, int(targets[np.argmax(c.kl[targets])])
    most = rounded(float(c.kl[worst]))[0] if math.isfinite(c.kl[worst]) else "infinitely many"
    where = f"{readable(str(facts.text[worst]))!r} in document {int(facts.document[worst]) + 1}"
    return [f"on {len(targets):,} of {len(c.kl):,} targets, by up to {most} nats ({where})"]


def _kl_less_its_error(s: Statistics) -> float | None:
    """KL - t · stderr. Its own bounds are KL · exp(∓ t · stderr / KL), of which the lower one never reaches 0."""
    kl, low = usable(s.get("kl_mean")), usable(s.get("kl_mean_low"))
    if not kl or low is None or kl < 0:
        return None if low is None else kl
    return kl + kl * math.log(low / kl) if low else -math.inf


def _path_level(c: Comparison) -> Verdict:
    """Judges a path against the prefill path of the same model, and says what that means for published figures."""
    s, rerun = c.statistics(), c.manifest["rerun"]
    if s.get("delta_logprob_max") == 0 and not usable(s.get("kl_max")):
        return Verdict(NONE, f"no difference found: the same bits as prefill on every target. {HOLDS}")
    rms, again = usable(s.get("delta_logprob_rms")), usable(rerun["rms"])
    moved = "" if rms is None else f" {_moved_words(rms, again, str(rerun['words']))}"
    beside = (("delta_logprob_rms", rms, again), ("kl_mean", s.get("kl_mean"), s.get("noise_floor_kl_mean")))
    measures = [
        (usable(s.get(f"{name}_low")), value, noise)
        for name, value, noise in ((name, usable(value), usable(noise)) for name, value, noise in beside)
        if value is not None and noise is not None
    ]
    if not measures:
        return Verdict(UNKNOWN, f"not known if this is more than noise: none was measured.{moved}")
    if any((value if low is None else low) <= noise for low, value, noise in measures):
        return Verdict(NOISE, f"a difference within the noise.{moved} {HOLDS}")
    if any(low is None for low, _, _ in measures):
        few = too_few(s.get("groups"), c.baseline.group_kind)
        return Verdict(UNKNOWN, f"not known if this is more than noise: {few}.{moved}")
    return Verdict(CHANGED, f"changed, by more than the noise.{moved} {DIFFERS}")


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


def _perplexity(s: Statistics, *, is_apart: bool = False) -> list[str]:
    """The change of perplexity in percent; nothing if a perplexity is infinite."""
    ratio = usable(s.get("ppl_ratio"))
    if ratio is None:
        return []
    if not is_apart and max(abs(ratio - 1), usable(s.get("ppl_ratio_stderr")) or 0) < EQUAL:
        return ["perplexity equal within 0.001%"]
    number, error = rounded(ratio - 1, s.get("ppl_ratio_stderr"), percent=True)
    return [f"perplexity {'' if number.startswith('-') else '+'}{number} {error}".rstrip()]


def _moved(s: Statistics, rounding: float) -> str:
    """KL beside its noise floor, and the share of other first choices; log-probabilities if neither was measured.

    A floor below ``rounding`` counts as that.
    """
    kl, floor, parts = usable(s.get("kl_mean")), usable(s.get("noise_floor_kl_mean")), list[str]()
    if kl is not None:
        low = _kl_less_its_error(s)
        is_clear = low is not None and low > (0 if floor is None else max(floor, rounding))
        number, error = rounded(kl, s.get("kl_mean_stderr"))
        parts.append(f"KL {number}" if is_clear else f"KL {number} {error}".rstrip())
        counts_as = f", counted as {plain_nats(rounding)}" if floor is not None and floor < rounding >= 1e-7 else ""
        parts += [] if is_clear or floor is None else [f"floor {rounded(floor)[0]}{counts_as}"]
    elif s.get("kl_infinite"):
        parts.append("KL infinite")
    if (same := usable(s.get("same_top"))) is not None:
        parts.append(f"first choice differs in {rounded(1 - same, s.get('same_top_stderr'), percent=True)[0]}")
    if not parts and (rms := usable(s.get("delta_logprob_rms"))) is not None:
        parts.append(f"log-probabilities differ by {rounded(rms)[0]} (rms)")
    return ", ".join(parts) or "a log-probability is infinite"


def _unmeasured(s: Statistics) -> list[str]:
    """Says that KL was not measured, and first choices neither."""
    if s.get("kl_mean") is not None or s.get("kl_infinite") is not None:
        return []
    return ["KL was not measured" if s.get("same_top") is not None else "KL and first choices were not measured"]


def _direction(c: Comparison, s: Statistics, *, is_apart: bool) -> tuple[str, str]:
    """Did the text become likelier or less likely, or '' if that is not known; and in words, with what it rests on."""
    impossible = (s.get("zero_probability_candidate") or 0) - (s.get("zero_probability_baseline") or 0)
    if impossible > 0:
        return LESS, f"{LESS}: probability zero for {counted(impossible, 'more tokens')}"
    if impossible < 0:
        return LIKELIER, f"{LIKELIER}: probability zero for {counted(-impossible, 'fewer tokens')}"
    if infinite := s.get("kl_infinite"):
        return "", f"KL is infinite on {counted(infinite, 'targets')}"
    return _by_perplexity(c, s) if is_apart else ("", _unsure(c, s))


def _by_perplexity(c: Comparison, s: Statistics) -> tuple[str, str]:
    """The direction by a perplexity ratio that is surely not 1, unless what that rests on is too little."""
    (change,), kind = _perplexity(s, is_apart=True) or [""], c.baseline.group_kind
    effective = s.get("groups_effective") or 0
    direction = LESS if (usable(s.get("log_ppl_ratio")) or 0) > 0 else LIKELIER
    if are_blocks(kind):
        return "", f"{change}, but {kind} are too few to call the {direction}"
    if effective < ENOUGH and not c.few_documents:
        return "", f"{change}, but {effective:.1f} effective {kind} are too few to call the {direction}"
    return direction, f"{direction} ({change}{false_of_few('direction', effective, kind)})"


def _unsure(c: Comparison, s: Statistics) -> str:
    """The change of perplexity, and why nobody can tell its direction."""
    (change,) = _perplexity(s) or ["perplexity is infinite under both"]
    groups = counted(s.get("groups") or 0, c.baseline.group_kind)
    has_error = usable(s.get("log_ppl_ratio_stderr")) is not None and "equal" not in change
    return f"{change}, which may be chance on {groups}" if has_error else change


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
    "for scale: KL on WikiText-2 by llama.cpp's tool, of LLaMA 3 8B (its table of 2024) and of SmolLM2-135M (whose "
    "Q2_K to Q6_K take more bits than usual); other models and texts compare only roughly"
)


def scale_words(kl: float) -> str:
    """Where a KL lies between those of usual quantization types, in one line.

    >>> scale_words(0.03)
    'for scale: about Q4_K_M of LLaMA 3 8B; between Q6_K and Q4_K_M of SmolLM2-135M'
    """
    return "for scale: " + "; ".join(f"{_place(kl, types)} of {model}" for model, types in MODELS.items())


def _place(kl: float, types: dict[str, float]) -> str:
    scale = sorted(types.items(), key=lambda pair: pair[1])
    near = min(range(len(scale)), key=lambda i: max(kl / scale[i][1], scale[i][1] / kl))
    if max(kl / scale[near][1], scale[near][1] / kl) <= ABOUT:
        return f"about {scale[near][0]}"
    above = sum(value < kl for _, value in scale)
    if above == 0:
        return f"{'far ' if kl < scale[0][1] / 10 else ''}below {scale[0][0]} (KL {scale[0][1]:.2g})"
    if above == len(scale):
        return f"beyond {scale[-1][0]} (KL {scale[-1][1]:.2g})"
    return f"between {scale[above - 1][0]} and {scale[above][0]}"
