"""llama.cpp's statistics of a comparison: its own lines, to the printed digit."""

# ruff: noqa: UP031 (C's own format strings are what is compared with)

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from scoremode.core.scores.answers import measured
from scoremode.studies.kld.statistics import llamacpp_statistics, llamacpp_text
from scoremode.values import Floats, Ints
from tests.core.statistics.test_comparison import compared, random_comparison


def f32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def longhand(nll: list[float], base: list[float], kld: list[float], same: list[bool]) -> str:
    """What llama.cpp prints, computed target by target in plain Python."""
    n = len(nll)

    def mean_and_uncertainty(values: list[float]) -> tuple[float, float]:
        total = squares = 0.0
        for value in values:
            total += value
            squares += value * value
        f = total / n
        return f, math.sqrt((squares / n - f * f) / (n - 1))

    def percentile(values: list[float], fraction: float) -> float:
        ordered = sorted(f32(v) for v in values)
        p = f32(f32(fraction) * (n - 1))
        i = int(p)
        p = f32(p - i)
        return f32(f32(f32(1 - p) * ordered[i]) + f32(p * ordered[min(i + 1, n - 1)]))

    def median(values: list[float]) -> float:
        ordered = sorted(f32(v) for v in values)
        return ordered[n // 2] if n % 2 else f32(0.5 * f32(ordered[n // 2] + ordered[n // 2 - 1]))

    (m, e), (mb, eb) = mean_and_uncertainty(nll), mean_and_uncertainty(base)
    cov = (sum(a * b for a, b in zip(nll, base, strict=True)) / n - sum(nll) / n * (sum(base) / n)) / (n - 1)
    ratio_error = math.sqrt(e * e + eb * eb - 2 * cov)
    p, pb = math.exp(m), math.exp(mb)
    p_error, pb_error = p * e, pb * eb
    difference_error = math.sqrt(p_error**2 + pb_error**2 - 2 * p * pb * cov)
    out = "====== Perplexity statistics ======\n"
    out += "Mean PPL(Q)                   : %10.6f ± %10.6f\n" % (p, p_error)
    out += "Mean PPL(base)                : %10.6f ± %10.6f\n" % (pb, pb_error)
    out += "Cor(ln(PPL(Q)), ln(PPL(base))): %6.2f%%\n" % (100 * cov / (e * eb))
    out += "Mean ln(PPL(Q)/PPL(base))     : %10.6f ± %10.6f\n" % (m - mb, ratio_error)
    out += "Mean PPL(Q)/PPL(base)         : %10.6f ± %10.6f\n" % (math.exp(m - mb), math.exp(m - mb) * ratio_error)
    out += "Mean PPL(Q)-PPL(base)         : %10.6f ± %10.6f\n" % (p - pb, difference_error)
    out += "\n====== KL divergence statistics ======\n"
    out += "Mean    KLD: %10.6f ± %10.6f\n" % mean_and_uncertainty(kld)
    out += "Maximum KLD: %10.6f\n" % max(kld)
    for label, fraction in (("99.9%", 0.999), ("99.0%", 0.99), ("95.0%", 0.95), ("90.0%", 0.9)):
        out += "%s   KLD: %10.6f\n" % (label, percentile(kld, fraction))
    out += "Median  KLD: %10.6f\n" % median(kld)
    for label, fraction in (("10.0%", 0.1), (" 5.0%", 0.05), (" 1.0%", 0.01), (" 0.1%", 0.001)):
        out += "%s   KLD: %10.6f\n" % (label, percentile(kld, fraction))
    out += "Minimum KLD: %10.6f\n" % min(kld)
    diff = [math.exp(-a) - math.exp(-b) for a, b in zip(nll, base, strict=True)]
    out += "\n====== Token probability statistics ======\n"
    out += "Mean    Δp: %6.3f ± %5.3f %%\n" % tuple(100 * x for x in mean_and_uncertainty(diff))
    out += "Maximum Δp: %6.3f%%\n" % (100 * max(diff))
    for label, fraction in (("99.9%", 0.999), ("99.0%", 0.99), ("95.0%", 0.95), ("90.0%", 0.9), ("75.0%", 0.75)):
        out += "%s   Δp: %6.3f%%\n" % (label, 100 * percentile(diff, fraction))
    out += "Median  Δp: %6.3f%%\n" % (100 * median(diff))
    for label, fraction in (("25.0%", 0.25), ("10.0%", 0.1), (" 5.0%", 0.05), (" 1.0%", 0.01), (" 0.1%", 0.001)):
        out += "%s   Δp: %6.3f%%\n" % (label, 100 * percentile(diff, fraction))
    out += "Minimum Δp: %6.3f%%\n" % (100 * min(diff))
    mse, mse_error = mean_and_uncertainty([d * d for d in diff])
    out += "RMS Δp    : %6.3f ± %5.3f %%\n" % (100 * math.sqrt(mse), 100 * 0.5 / math.sqrt(mse) * mse_error)
    share = sum(same) / n
    return out + "Same top p: %6.3f ± %5.3f %%\n" % (100 * share, 100 * math.sqrt(share * (1 - share) / (n - 1)))


@pytest.mark.parametrize("groups", [60, 61, 63, 250])
def test_llamacpp_to_the_printed_digit(groups: int) -> None:
    c = random_comparison(groups, seed=groups)
    base, cand = c.baseline.scores, c.candidate.scores
    same = (measured(base.top) == measured(cand.top)).tolist()
    expected = longhand((-cand.logprob).tolist(), (-base.logprob).tolist(), measured(c.kl).tolist(), same)
    assert llamacpp_text(llamacpp_statistics(c)).splitlines() == expected.splitlines()


def test_llamacpp_of_equal_runs_and_of_few_targets_and_lines_as_it_prints_them() -> None:
    """The lines are two of the table in llama.cpp's own README, from their numbers."""
    lp: Floats = -np.arange(1.0, 41.0) / 10
    equal = llamacpp_statistics(compared(lp, lp, kl=np.zeros(40)))
    assert (equal["log_ppl_ratio_error"] or 0) < 1e-8
    assert equal["delta_p_rms_error"] is None
    few = llamacpp_statistics(compared(lp[:10], lp[:10] - 1, kl=np.ones(10)))
    assert few["ppl_q_error"] == 0.0  # its own rule: no error for ten values or fewer
    nothing: Ints = np.zeros(0, np.int64)
    assert llamacpp_statistics(compared([], [], groups=nothing))["same_top"] is None
    text = llamacpp_text({"ppl_q": 6.407115, "ppl_q_error": 0.039119, "same_top": 0.91901, "same_top_error": 0.00072})
    assert text.splitlines()[1] == "Mean PPL(Q)                   :   6.407115 ±   0.039119"
    assert text.splitlines()[-1] == "Same top p: 91.901 ± 0.072 %"
    assert "KLD" not in text
