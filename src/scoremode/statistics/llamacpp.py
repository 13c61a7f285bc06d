"""The statistics that llama.cpp prints with a KL divergence, by its formulas and in its layout."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from scoremode.statistics.comparison import Comparison, require_sound
from scoremode.statistics.estimate import finite_or_none
from scoremode.values import Floats, Ids

KLD_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)

DELTA_P_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1)


def llamacpp_statistics(c: Comparison) -> dict[str, float | None]:
    """What llama.cpp's ``--kl-divergence`` prints, by its formulas: every target is independent and counts once.

    ``…_error`` is the number after ±. KL and ``same_top`` are left out if they were not measured. Percentiles are
    computed in float32, as in llama.cpp, which prints none of this below 100 targets. Names: ``kld_99.9%``,
    ``delta_p_50%``, ….
    """
    require_sound(c)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        found = _llamacpp_perplexity(-c.candidate.scores.logprob, -c.baseline.scores.logprob)
        if c.kl is not None:
            found |= _mean_error("kld_mean", c.kl) | _extremes("kld", c.kl, KLD_PERCENTILES)
        delta = np.exp(c.candidate.scores.logprob) - np.exp(c.baseline.scores.logprob)
        found |= _mean_error("delta_p_mean", delta) | _extremes("delta_p", delta, DELTA_P_PERCENTILES)
        square, error = _mean_and_error(delta**2)
        rms = math.sqrt(square)
        found |= {"delta_p_rms": rms, "delta_p_rms_error": 0.5 / rms * error if rms else math.nan}
        found |= _same_top(c.baseline.scores.top, c.candidate.scores.top)
    return {name: finite_or_none(value) for name, value in found.items()}


def _llamacpp_perplexity(nll: Floats, base: Floats) -> dict[str, float]:
    """Perplexities, their ratio and difference, with the errors of two correlated means."""
    n = len(nll)
    (mean, error), (mean_base, error_base) = _mean_and_error(nll), _mean_and_error(base)
    covariance = (float((nll * base).mean()) - mean * mean_base) / (n - 1) if n >= 10 else 0.0
    # for equal runs, rounding may give a negative number; llama.cpp prints its square root as nan
    difference_error = math.sqrt(max(0.0, error**2 + error_base**2 - 2 * covariance))
    ppl, ppl_base = float(np.exp(mean)), float(np.exp(mean_base))
    square = (ppl * error) ** 2 + (ppl_base * error_base) ** 2 - 2 * ppl * ppl_base * covariance
    quotient = float(np.exp(mean - mean_base))
    return {
        "ppl_q": ppl,
        "ppl_q_error": ppl * error,
        "ppl_base": ppl_base,
        "ppl_base_error": ppl_base * error_base,
        "log_ppl_correlation": covariance / (error * error_base) if error and error_base else math.nan,
        "log_ppl_ratio": mean - mean_base,
        "log_ppl_ratio_error": difference_error,
        "ppl_ratio": quotient,
        "ppl_ratio_error": quotient * difference_error,
        "ppl_difference": ppl - ppl_base,
        "ppl_difference_error": math.sqrt(max(0.0, square)),
    }


def _same_top(base: Ids | None, cand: Ids | None) -> dict[str, float]:
    if base is None or cand is None:
        return {}
    same = float((base == cand).mean()) if len(base) else math.nan
    spread = math.sqrt(same * (1 - same) / (len(base) - 1)) if len(base) > 1 else math.nan
    return {"same_top": same, "same_top_error": spread}


def _mean_and_error(values: Floats) -> tuple[float, float]:
    """The mean, and sqrt((mean of squares - mean²) / (n - 1)); 0 for up to ten values, as in llama.cpp."""
    n = len(values)
    if n < 1:
        return 0.0, 0.0
    mean = float(values.mean())
    variance = float((values**2).mean()) - mean**2
    return mean, math.sqrt(variance / (n - 1)) if variance > 0 and n > 10 else 0.0


def _mean_error(name: str, values: Floats) -> dict[str, float]:
    return dict(zip((name, f"{name}_error"), _mean_and_error(values), strict=True))


def _extremes(name: str, values: Floats, percentiles: tuple[float, ...]) -> dict[str, float]:
    if not len(values):
        return {}
    ordered = np.sort(values.astype(np.float32))
    inner = {f"{name}_{p:g}%": _llamacpp_percentile(ordered, p) for p in percentiles}
    return {f"{name}_max": float(ordered[-1]), **inner, f"{name}_min": float(ordered[0])}


def _llamacpp_percentile(ordered: npt.NDArray[np.float32], percent: float) -> float:
    """Linear interpolation, all in float32 as in llama.cpp: with many targets even the position is rounded."""
    n = len(ordered)
    if percent == 50:  # llama.cpp computes the median separately: the middle value, or the mean of the middle two
        middle = ordered[n // 2] if n % 2 else np.float32(0.5) * (ordered[n // 2] + ordered[n // 2 - 1])
        return float(middle)
    at = np.float32(percent / 100) * np.float32(n - 1)
    below = min(int(at), n - 1)
    share = at - np.float32(below)
    return float((np.float32(1) - share) * ordered[below] + share * ordered[min(below + 1, n - 1)])


def llamacpp_text(statistics: Mapping[str, float | None]) -> str:
    """The statistics with the layout and the digits of llama.cpp's own output."""

    def number(name: str, factor: float = 1.0) -> float:
        value = statistics.get(name)
        return math.nan if value is None else factor * value

    def plus_minus(label: str, name: str) -> str:
        return f"{label}: {number(name):10.6f} ± {number(f'{name}_error'):10.6f}"

    def plus_minus_percent(label: str, name: str) -> str:
        return f"{label}: {number(name, 100):6.3f} ± {number(f'{name}_error', 100):5.3f} %"

    labels = (("Mean PPL(Q)", "ppl_q"), ("Mean PPL(base)", "ppl_base"))
    ratios = (
        ("Mean ln(PPL(Q)/PPL(base))", "log_ppl_ratio"),
        ("Mean PPL(Q)/PPL(base)", "ppl_ratio"),
        ("Mean PPL(Q)-PPL(base)", "ppl_difference"),
    )
    lines = ["====== Perplexity statistics ======"]
    lines += [plus_minus(f"{label:30}", name) for label, name in labels]
    lines.append(f"Cor(ln(PPL(Q)), ln(PPL(base))): {number('log_ppl_correlation', 100):6.2f}%")
    lines += [plus_minus(f"{label:30}", name) for label, name in ratios]
    if "kld_mean" in statistics:
        lines += ["", "====== KL divergence statistics ======", plus_minus("Mean    KLD", "kld_mean")]
        lines += [f"{label} KLD: {number(name):10.6f}" for label, name in _lines_of("kld", KLD_PERCENTILES)]
    lines += ["", "====== Token probability statistics ======", plus_minus_percent("Mean    Δp", "delta_p_mean")]
    lines += [f"{label} Δp: {number(name, 100):6.3f}%" for label, name in _lines_of("delta_p", DELTA_P_PERCENTILES)]
    same_top = plus_minus_percent("Same top p", "same_top") if "same_top" in statistics else "Same top p: not measured"
    lines += [plus_minus_percent("RMS Δp    ", "delta_p_rms"), same_top]
    return "\n".join(lines) + "\n"


def _lines_of(name: str, percentiles: tuple[float, ...]) -> list[tuple[str, str]]:
    inner = [("Median " if p == 50 else f"{p:4.1f}%  ", f"{name}_{p:g}%") for p in percentiles]
    return [("Maximum", f"{name}_max"), *inner, ("Minimum", f"{name}_min")]
