"""The statistics that llama.cpp prints with a KL divergence, by its formulas and in its layout."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.estimate import finite_or_none
from scoremode.core.statistics.run import LlamacppMean
from scoremode.values import Floats

KLD_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1)

DELTA_P_PERCENTILES = (99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1)


def llamacpp_statistics(c: Comparison) -> dict[str, float | None]:
    """Computes what llama.cpp's ``--kl-divergence`` prints, by its formulas: targets are independent and count once.

    ``…_error`` is the number after ±. KL and ``same_top`` are left out if they were not measured. Percentiles are
    computed in float32, as in llama.cpp, which prints none of this below 100 targets. Names: ``kld_99.9%``,
    ``delta_p_50%``, ….
    """
    n, candidate, baseline = len(c.groups), LlamacppMean(-c.cand), LlamacppMean(-c.base)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        delta_p, squared = LlamacppMean(c.delta_p), LlamacppMean(c.delta_p**2)
        statistics = _perplexity(candidate, baseline, LlamacppMean(-c.cand * -c.base).mean)
        if c.kl is not None:
            kl = LlamacppMean(c.kl)
            statistics |= {"kld_mean": kl.mean, "kld_mean_error": kl.error, **_extremes("kld", c.kl, KLD_PERCENTILES)}
        statistics |= {"delta_p_mean": delta_p.mean, "delta_p_mean_error": delta_p.error}
        statistics |= _extremes("delta_p", c.delta_p, DELTA_P_PERCENTILES)
        rms = math.sqrt(squared.mean)
        statistics |= {"delta_p_rms": rms, "delta_p_rms_error": 0.5 / rms * squared.error if rms else math.nan}
        if c.same_first_choice is not None:
            same = np.count_nonzero(c.same_first_choice) / n if n else math.nan
            spread = math.sqrt(same * (1 - same) / (n - 1)) if n > 1 else math.nan
            statistics |= {"same_top": same, "same_top_error": spread}
    return {name: finite_or_none(value) for name, value in statistics.items()}


def _perplexity(candidate: LlamacppMean, baseline: LlamacppMean, product: float) -> dict[str, float]:
    """Computes perplexities, their ratio and difference, with the errors of two correlated means."""
    mean, error, mean_base, error_base = candidate.mean, candidate.error, baseline.mean, baseline.error
    n = candidate.n
    covariance = (product - mean * mean_base) / (n - 1) if n >= 10 else 0.0
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


def _extremes(name: str, values: Floats, percentiles: tuple[float, ...]) -> dict[str, float]:
    n = len(values)
    if not n:
        return {}
    places = {0, n - 1, *(place for p in percentiles for place in _places(p, n))}
    rounded = np.partition(values.astype(np.float32), sorted(places))
    ordered = {place: rounded[place] for place in places}
    inner = {f"{name}_{p:g}%": _llamacpp_percentile(ordered, n, p) for p in percentiles}
    return {f"{name}_max": float(ordered[n - 1]), **inner, f"{name}_min": float(ordered[0])}


def _places(percent: float, n: int) -> tuple[int, int]:
    """Returns the two places among n sorted values between which a percentile lies."""
    if percent == 50:
        return (n // 2, n // 2) if n % 2 else (n // 2 - 1, n // 2)
    below = min(int(np.float32(percent / 100) * np.float32(n - 1)), n - 1)
    return below, min(below + 1, n - 1)


def _llamacpp_percentile(ordered: Mapping[int, np.float32], n: int, percent: float) -> float:
    """Interpolates a percentile linearly, in float32 as in llama.cpp: even the position is rounded if n is large."""
    below, above = _places(percent, n)
    if percent == 50:  # llama.cpp computes the median separately: the middle value, or the mean of the middle two
        middle = ordered[below] if n % 2 else np.float32(0.5) * (ordered[above] + ordered[below])
        return float(middle)
    share = np.float32(percent / 100) * np.float32(n - 1) - np.float32(below)
    return float((np.float32(1) - share) * ordered[below] + share * ordered[above])


def llamacpp_text(statistics: Mapping[str, float | None]) -> str:

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
