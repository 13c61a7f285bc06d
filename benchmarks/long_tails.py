"""How often are bounds and claims right where a few documents lose much? By the formulas of docs/statistics.md.

Nothing here is the product's code, so it judges that code: tests/benchmarks/test_coverage.py compares the two draw by
draw. Documents have lognormal losses (σ), or one in ten loses ten times as much; lengths are equal or lognormal.

    python benchmarks/long_tails.py [--draws 20000] [--seed 0]

hold      the 95 % bounds contain the true mean: of KL, and of the logarithm of the perplexity ratio
no worse  claims of "no worse" at the margin, all of them false; with ten effective documents or more
likelier  claims that a text became likelier where the ratio is 1, all of them false; likewise
few       the same claims with fewer than ten effective documents, which need --few-documents
ranking   any of four equal candidates is told apart; one with half the KL is told apart from another; by four rules
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit

Floats = npt.NDArray[np.float64]
DOCUMENTS = (5, 10, 20, 40)
LENGTHS = {"equal": 0.0, "uneven": 0.7, "very uneven": 1.2}
LOSSES: tuple[float | None, ...] = (0.3, 0.7, 1.0, 1.5, None)  # None: one in ten loses ten times as much
KINDS = ("alone", "alike", "long", "unequal")  # how candidates vary: see ``ranking``
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


def by_t(size: Floats, level: Floats) -> tuple[Floats, Floats]:
    """The means of documents of these sizes, and the two-sided p-values of 0 by Student's t."""
    m = means(size, level)
    return m.mean, np.asarray(2 * stdtr(m.freedom, -np.abs(m.mean) / m.error))


def by_flips(terms: Floats) -> Floats:
    """The p-values of sums of 0, by flips of the signs: of all for up to 12 documents, else of 1,000 at random."""
    terms = terms / np.abs(terms).sum(1, keepdims=True)
    count = terms.shape[1]
    if is_all := count <= 12:
        signs = np.where(np.arange(2 ** (count - 1))[:, None] >> np.arange(count) & 1, -1.0, 1.0)
    else:
        signs = np.random.default_rng(count).choice([-1.0, 1.0], (1000, count))
    as_far = (np.abs(terms @ signs.T) >= np.abs(terms.sum(1))[:, None] - 1e-12).sum(1)
    return np.asarray(as_far / len(signs) if is_all else (as_far + 1) / (len(signs) + 1))


def p_of_rules(kl: Floats, size: Floats) -> dict[str, Floats]:
    """The p-values of all pairs by each rule, (draws, pairs), from KL of documents (draws, documents, candidates).

    ours      the product's: t on ln(KL / KL), one number per document, and of 10 to 16 documents flips of its signs as
              well, if the means agree; t alone is that without flips
    flips     of the signs of the paired differences of documents, each times its length
    weighted  t on ln(KL / KL), each document as often as it has targets
    former    t on the paired difference of the means
    """
    found: dict[str, list[Floats]] = {"ours": [], "t alone": [], "flips": [], "weighted": [], "former": []}
    for i, j in combinations(range(kl.shape[2]), 2):
        difference, logarithm = kl[:, :, i] - kl[:, :, j], np.log(kl[:, :, i] / kl[:, :, j])
        mean, by_mean = by_t(size, difference)
        ratio, p = by_t(np.ones_like(size), logarithm)
        agree = (ratio * mean > 0) & (by_mean / 2 < 0.25)
        of_two = p
        if 10 <= kl.shape[1] <= 16:
            of_two = np.minimum(1, 1.1 * np.minimum(p, by_flips(logarithm)))
        found["ours"].append(np.where(agree, of_two, 1.0))
        found["t alone"].append(np.where(agree, p, 1.0))
        found["flips"].append(by_flips(size * difference))
        found["weighted"].append(by_t(size, logarithm)[1])
        found["former"].append(by_mean)
    return {rule: np.array(p).T for rule, p in found.items()}


def told_apart(p: Floats) -> npt.NDArray[np.bool_]:
    """Holm's method in each draw."""
    order = np.argsort(p, 1)
    passes = np.take_along_axis(p, order, 1) <= 0.05 / np.arange(p.shape[1], 0, -1)
    found = np.zeros(p.shape, np.bool_)
    np.put_along_axis(found, order, np.cumprod(passes, 1).astype(np.bool_), 1)
    return found


def ranking(
    spread: float | None, uneven: float, documents: int, draws: int, *, seed: int, kind: str = "alone"
) -> dict[str, tuple[float, float]]:
    """By rule: draws in which any of four equal candidates is told apart, and pairs told apart if one has half the KL.

    Candidates vary ``alone``, or are ``alike``: they share four fifths of the variance of ln KL, or of one in ten, all
    of the bad documents; or it is the ``long`` documents that lose most, for half of that variance. Or they are
    ``unequal``: only their means are the same, and two of them have σ = 0.3.
    """
    random = np.random.default_rng([seed, documents, round(10 * (spread or 0)), round(10 * uneven), KINDS.index(kind)])
    of_length, shape = random.normal(size=(draws, documents)), (draws, documents, 4)
    size, own = np.exp(uneven * of_length), random.normal(size=shape)
    shared = random.normal(size=(draws, documents, 1)) if kind == "alike" else of_length[:, :, None]
    if spread is None:
        bad = random.random((draws, documents, 1) if kind == "alike" else shape) < 0.1
        kl = np.where(bad, 10, 1) / 1.9 * np.exp(0.3 * own - 0.045)
    else:
        part = {"alike": 0.8, "long": 0.5}.get(kind, 0.0)
        each = np.array([0.3, 0.3, spread, spread]) if kind == "unequal" else np.full(4, spread)
        kl = np.exp(each * (part**0.5 * shared + (1 - part) ** 0.5 * own) - each**2 / 2)
    false = {rule: float(told_apart(p).any(1).mean()) for rule, p in p_of_rules(kl, size).items()}
    kl[:, :, 0] /= 2
    power = {rule: float(told_apart(p)[:, :3].mean()) for rule, p in p_of_rules(kl, size).items()}
    return {rule: (false[rule], power[rule]) for rule in false}


def false_of_few(draws: int, seed: int) -> dict[str, list[float]]:
    """The largest share of false claims with 1, 2, … 9 effective documents, over 5 to 20 documents of σ 1."""
    most = {claim: [0.0] * 9 for claim in ("no worse", "direction", "surely", "ranking")}
    for uneven in LENGTHS.values():
        for count in (5, 6, 7, 8, 9, 10, 12, 16, 20) if uneven else (5, 6, 7, 8, 9):
            random = np.random.default_rng([seed, count, round(10 * uneven), 2])
            size, kl = sizes(uneven, (draws, count), random), losses(1.0, (draws, count, 4), random)
            m, change = means(size, kl[:, :, 0]), means(size, kl[:, :, 0] - 1)
            (low, high), (below, above) = bounds_of_kl(m), bounds_of_change(change)
            false = {
                "no worse": bounds_of_change(change, 0.95)[1] < 0,
                "direction": (above < 0) | (below > 0),
                "surely": (high < 1) | (low > 1),
            }
            if count < 10:  # more documents change little, and take long
                false["ranking"] = np.asarray(told_apart(p_of_rules(kl, size)["ours"]).any(1))
            for place in range(9):
                here = np.floor(m.effective + 1e-9) == place + 1
                for claim, claims in false.items() if here.sum() >= draws / 10 else ():
                    most[claim][place] = max(most[claim][place], float(claims[here].mean()))
    return most


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
    print("\nfalse claims with 1, 2, … 9 effective documents, the largest of all cells of σ = 1")
    for claim, shares in false_of_few(options.draws, options.seed).items():
        print(f"{claim:<12}" + "".join(f"{100 * share:6.1f}" for share in shares), flush=True)
    print("\nranking: any of four equal candidates told apart | one with half the KL told apart")
    for kind, spread, (name, uneven) in product(KINDS, LOSSES, LENGTHS.items()):
        if (kind == "long" and (spread is None or not uneven)) or (kind == "unequal" and (spread != 1 or uneven)):
            continue
        for count in DOCUMENTS[1:]:
            rules = ranking(spread, uneven, count, options.draws // 10, seed=options.seed, kind=kind)
            shown = [f"{rule} {100 * false:.1f} | {100 * power:.1f}" for rule, (false, power) in rules.items()]
            print(f"{kind}, {spread or 'one in ten'}, {name}, {count}:  " + ";  ".join(shown), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
