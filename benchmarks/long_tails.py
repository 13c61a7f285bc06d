"""How often are bounds and claims right where a few documents lose much? By the formulas of docs/statistics.md.

Nothing here is the product's code, so it judges that code: tests/benchmarks/test_coverage.py compares the two draw by
draw. Documents have lognormal losses (σ), or one in ten loses ten times as much; lengths are equal or lognormal.

    python benchmarks/long_tails.py [--draws 20000] [--seed 0]

hold      the 95 % bounds contain the true mean: of KL, and of the logarithm of the perplexity ratio
no worse  claims of "no worse" at the margin, all of them false; with ten effective documents or more
likelier  claims that a text became likelier where the ratio is 1, all of them false; likewise
ranking   any of four equal candidates is told apart; one with half the KL is told apart from another
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit

Floats = npt.NDArray[np.float64]
DOCUMENTS = (5, 10, 20, 40)
LENGTHS = {"equal": 0.0, "uneven": 0.7, "very uneven": 1.2}
LOSSES: tuple[float | None, ...] = (0.3, 0.7, 1.0, 1.5, None)  # None: one in ten loses ten times as much
ENOUGH, TAIL, FLAT = 10.0, 2.5, 4.5


class Means(NamedTuple):
    """Means over documents, one per draw (n,), and what their bounds rest on."""

    mean: Floats
    error: Floats
    freedom: Floats
    skewness: Floats  # to expect of the mean
    effective: Floats


def means(size: Floats, level: Floats) -> Means:
    """Of documents of these sizes and levels, (draws, documents)."""
    share = size / size.sum(1, keepdims=True)
    mean = (share * level).sum(1)
    residual = share * (level - mean[:, None])
    error = np.sqrt((residual**2 / (1 - share)).sum(1))
    squares = (share**2).sum(1)
    freedom = np.minimum(size.shape[1] - 1, squares**2 / (share**4).sum(1))
    skewness = TAIL * size.shape[1] * squares * (residual**3).sum(1) / (residual**2).sum(1) ** 1.5
    return Means(mean, error, freedom, skewness, 1 / squares)


def reach(freedom: Floats, skewness: Floats, confidence: float) -> Floats:
    """Standard errors from a mean to its bound on the side of a long tail."""
    z, k = stdtrit(freedom, confidence), np.maximum(skewness, 1e-6)
    by_hall = 3 * (1 - np.cbrt(1 - k * z - k**2 / 6)) / k
    by_hall = np.where(k * by_hall > FLAT, 2 * z + np.sqrt(4 * z**2 + 3), by_hall)
    return np.where(skewness > 1e-6, by_hall, z)


def bounds_of_kl(m: Means) -> tuple[Floats, Floats]:
    by_log = stdtrit(m.freedom, 0.975) * m.error / m.mean
    above = m.mean + reach(m.freedom, m.skewness, 0.975) * m.error
    return m.mean * np.exp(-by_log), np.maximum(above, m.mean * np.exp(by_log))


def bounds_of_change(m: Means, confidence: float = 0.975) -> tuple[Floats, Floats]:
    above, below = (reach(m.freedom, sign * m.skewness, confidence) * m.error for sign in (1, -1))
    return m.mean - below, m.mean + above


def losses(spread: float | None, shape: tuple[int, ...], random: np.random.Generator) -> Floats:
    """Losses whose mean is 1."""
    if spread is None:
        level = 1 + 9 * (random.random(shape) < 0.1)
        return np.asarray(level / 1.9 * np.exp(0.3 * random.normal(size=shape) - 0.045))
    return np.exp(spread * random.normal(size=shape) - spread**2 / 2)


def sizes(spread: float, shape: tuple[int, ...], random: np.random.Generator) -> Floats:
    return np.exp(spread * random.normal(size=shape))


def cell(spread: float | None, uneven: float, documents: int, draws: int, seed: int) -> dict[str, float]:
    """The shares of one cell; NaN where fewer than 300 draws have enough effective documents."""
    random = np.random.default_rng([seed, documents, round(10 * (spread or 0)), round(10 * uneven)])
    size, loss = sizes(uneven, (draws, documents), random), losses(spread, (draws, documents), random)
    kl, change = means(size, loss), means(size, loss - 1)
    low, high = bounds_of_kl(kl)
    below, above = bounds_of_change(change)
    enough = change.effective >= ENOUGH - 1e-9

    def claimed(claims: npt.NDArray[np.bool_]) -> float:
        return float(claims[enough].mean()) if enough.sum() >= min(300, draws / 4) else float("nan")

    return {
        "KL": float(((low <= 1) & (high >= 1)).mean()),
        "ratio": float(((below <= 0) & (above >= 0)).mean()),
        "no worse": claimed(bounds_of_change(change, 0.95)[1] < 0),
        "likelier": claimed(above < 0),
    }


def p_of_pairs(kl: Floats, size: Floats) -> Floats:
    """The p-values of all pairs of candidates, (draws, pairs), from KL of documents (draws, documents, candidates)."""
    found = []
    for i, j in combinations(range(kl.shape[2]), 2):
        ratio = means(np.ones_like(size), np.log(kl[:, :, i] / kl[:, :, j]))
        difference = means(size, kl[:, :, i] - kl[:, :, j])
        p, by_mean = (2 * stdtr(m.freedom, -np.abs(m.mean) / m.error) for m in (ratio, difference))
        found.append(np.where((ratio.mean * difference.mean > 0) & (by_mean / 2 < 0.25), p, 1.0))
    return np.array(found).T


def told_apart(p: Floats) -> npt.NDArray[np.bool_]:
    """Holm's method in each draw."""
    order = np.argsort(p, 1)
    passes = np.take_along_axis(p, order, 1) <= 0.05 / np.arange(p.shape[1], 0, -1)
    found = np.zeros(p.shape, np.bool_)
    np.put_along_axis(found, order, np.cumprod(passes, 1).astype(np.bool_), 1)
    return found


def ranking(spread: float | None, uneven: float, documents: int, draws: int, seed: int) -> tuple[float, float]:
    """Draws in which any of four equal candidates is told apart, and pairs told apart if one has half the KL."""
    random = np.random.default_rng([seed, documents, round(10 * (spread or 0)), round(10 * uneven), 1])
    size, kl = sizes(uneven, (draws, documents), random), losses(spread, (draws, documents, 4), random)
    false = told_apart(p_of_pairs(kl, size)).any(1).mean()
    kl[:, :, 0] /= 2
    return float(false), float(told_apart(p_of_pairs(kl, size))[:, :3].mean())


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    heads = [f"{count} documents" for count in DOCUMENTS]
    print(f"{'':<32}" + "".join(f"{head:>28}" for head in heads))
    print(f"{'σ, lengths':<32}" + "".join(f"{'KL ratio | no worse likelier':>28}" for _ in heads))
    for spread in LOSSES:
        for name, uneven in LENGTHS.items():
            cells = [cell(spread, uneven, count, options.draws, options.seed) for count in DOCUMENTS]
            shown = [" ".join(f"{100 * value:5.1f}" for value in one.values()) for one in cells]
            print(f"{spread or 'one in ten'!s:>12}, {name:<18}" + "".join(f"{text:>28}" for text in shown), flush=True)
    print("\nranking: any of four equal candidates told apart, one with half the KL told apart")
    for spread in LOSSES:
        for name, uneven in LENGTHS.items():
            pairs = [ranking(spread, uneven, count, options.draws // 10, options.seed) for count in DOCUMENTS]
            shown = [f"{100 * false:5.1f} {100 * power:5.1f}" for false, power in pairs]
            print(f"{spread or 'one in ten'!s:>12}, {name:<18}" + "".join(f"{text:>28}" for text in shown), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
