"""How often do the 95 % bounds contain the true mean? Texts are drawn many times from scores whose mean is known.

    python benchmarks/coverage.py

benchmarks/data/*.csv have sums over pieces of texts, in order: SmolLM2-135M (the embedded model) in float32 on one
H200, windows of 2,048 tokens with at least 512 of context, against its weights rounded to 8 and 4 bits by
examples/emulate_quantization.py. wikitext2_articles has the 62 pages of WikiText-2's test text (291,879 targets) and
python_docs the 79 texts of python-docs (112,798 targets, differing in size by a factor of 270), both in pieces of up to
512 tokens. mixed_texts has 100 documents of at most 4,096 tokens, one piece each: WikiText-2, Python's documentation,
modules of CPython 3.11, and Debian Reference in seven other languages. long_texts has the first 131,072 targets of five
single texts in pieces of 256: Debian Reference in English and German, the Jargon File, a long FAQ, CPython's modules.

documents   G documents are drawn with replacement; groups are documents
stretches   an endless stream of articles, drawn with replacement and joined without a separator; a part of it with a
            random start is split into G stretches. This is the hard case: a plain text file made of many texts
shares      groups with shares drawn from a beta distribution, or one yes or no each
blocks      excerpts of a single text, split into G blocks; the truth is the mean of all of that text

Documents that lose much are drawn by long_tails.py, beside this file.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from scoremode.core.statistics.equivalence import Equivalence
from scoremode.core.statistics.estimate import GroupSums
from scoremode.core.statistics.groups import FEWEST, SHORTEST, STRETCH
from scoremode.values import Floats, Ints, Range

DATA = Path(__file__).parent / "data"
NUMBERS: dict[str, Range] = {
    "nll": "any",
    "delta_w8": "change",
    "delta_w4": "change",
    "kl_w8": "positive",
    "kl_w4": "positive",
}
SAME: dict[str, Range] = {"same_w8": "share", "same_w4": "share"}  # measured in mixed_texts and long_texts only
GROUPS = (5, 10, 30, 60)
FEW = (5, 10, 20, 40)
SHARES = (0.5, 0.8, 0.9, 0.98)
DRAWN = {"one yes or no": (1, 0), "8 per group": (8, 3), "200 per group": (200, 90), "means": (0, 100)}
"""Yes or no per group, and how alike groups are: the sum of the parameters of a beta distribution. First choices that
stay the same after rounding to 4 bits have 90 over mixed_texts, after rounding to 8 bits 2,000."""
LONG = ("reference", "german", "jargon", "faq", "source")
EXCERPTS = (1280, 2560, 5120, 10240, 20480)  # tokens


def read(name: str) -> dict[str, Floats]:
    """The columns of a file that are numbers."""
    with (DATA / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {column: np.array([float(row[column]) for row in rows]) for column in rows[0] if column != "kind"}


def by_group(groups: Ints, values: Floats) -> Floats:
    return np.bincount(groups, values).astype(np.float64)


def sums_of(sums: Floats, units: Floats) -> GroupSums:
    groups = GroupSums(len(sums))
    groups.add(np.arange(len(sums)), sums, units)
    return groups


def holds(sums: Floats, tokens: Floats, truth: float, within: Range = "any") -> bool:
    """Do the bounds over these groups contain the true mean?"""
    found = sums_of(sums, tokens).estimate(within)
    return found.low is not None and found.high is not None and found.low <= truth <= found.high


# ── documents and stretches ──────────────────────────────────────────────────────────────────────────────────────────
def of_documents(name: str, number: str, groups: int, draws: int, seed: int) -> float:
    """The share of draws whose bounds contain the mean of all documents."""
    columns = read(name)
    document = np.unique(columns["document"], return_inverse=True)[1].astype(np.int64)
    sums, tokens = (by_group(document, columns[column]) for column in (number, "tokens"))
    truth, random = sums.sum() / tokens.sum(), np.random.default_rng(seed)
    drawn = (random.integers(len(sums), size=groups) for _ in range(draws))
    return sum(holds(sums[i], tokens[i], truth, (NUMBERS | SAME)[number]) for i in drawn) / draws


def of_stretches(number: str, groups: int, draws: int, seed: int, length: int = STRETCH) -> float:
    """The same for stretches of a stream of articles."""
    columns = read("wikitext2_articles")
    document: Ints = columns["document"].astype(np.int64)
    truth = columns[number].sum() / columns["tokens"].sum()
    starts = np.searchsorted(document, np.arange(document.max() + 2))
    random, held = np.random.default_rng(seed), 0
    for _ in range(draws):
        lines = _stream(starts, columns["tokens"], groups * length, random)
        tokens = columns["tokens"][lines]
        stretch = np.minimum((np.cumsum(tokens) - tokens) // length, groups - 1).astype(np.int64)
        sums = by_group(stretch, columns[number][lines])
        held += holds(sums, by_group(stretch, tokens), truth, NUMBERS[number])
    return held / draws


def _stream(starts: Ints, tokens: Floats, wanted: int, random: np.random.Generator) -> Ints:
    """Lines of articles drawn one after the other, from a random start, until there are enough tokens."""
    articles, have, skipped = [], 0.0, int(random.integers(20_000))
    while have < wanted + skipped:
        article = int(random.integers(len(starts) - 1))
        articles.append(np.arange(starts[article], starts[article + 1]))
        have += float(tokens[articles[-1]].sum())
    lines = np.concatenate(articles)
    before = np.cumsum(tokens[lines]) - tokens[lines]
    found: Ints = lines[(before >= skipped) & (before < skipped + wanted)]
    return found


def neighbours(number: str, length: int) -> float:
    """The correlation between neighbouring stretches of that length, with articles in their original order."""
    columns = read("wikitext2_articles")
    place = (np.cumsum(columns["tokens"]) - columns["tokens"]) // length
    sums, tokens = (np.bincount(place.astype(np.int64), columns[column]) for column in (number, "tokens"))
    residual = (sums - sums.sum() / tokens.sum() * tokens)[:-1]  # the last one is short
    return float((residual[1:] * residual[:-1]).sum() / (residual**2).sum())


# ── shares, and claims of "no worse" ─────────────────────────────────────────────────────────────────────────────
def sizes_of(groups: int, *, unequal: bool, random: np.random.Generator) -> Floats:
    """How much each group counts: alike, or lognormal, so that the largest of 20 is about 20 times the smallest."""
    return np.exp(0.8 * random.normal(size=groups)) if unequal else np.ones(groups)


def of_shares(drawn: str, share: float, groups: int, *, unequal: bool, draws: int, seed: int) -> float:
    """The share of draws whose bounds contain the true share; they must lie between 0 and 1."""
    random, held, (each, alike) = np.random.default_rng(seed), 0, DRAWN[drawn]
    for _ in range(draws):
        units = size = sizes_of(groups, unequal=unequal, random=random)
        own = random.beta(alike * share, alike * (1 - share), groups) if alike else np.full(groups, share)
        yes = own * size if each == 0 else (random.random(groups) < share) * size
        if each > 1:
            units = np.maximum(1, np.rint(each * size))
            yes = random.binomial(units.astype(np.int64), own).astype(np.float64)
        found = sums_of(yes, units).estimate("share")
        assert found.low is not None
        assert found.high is not None
        assert 0 <= found.low <= found.value <= found.high <= 1
        held += found.low <= share <= found.high
    return held / draws


def false_no_worse(number: str, groups: int, draws: int, seed: int) -> float:
    """How often "no worse" is said of mixed texts if the margin is their true loss."""
    columns, random, false = read("mixed_texts"), np.random.default_rng(seed), 0
    loss, tokens = columns[number], columns["tokens"]
    truth = float(loss.sum() / tokens.sum())
    for _ in range(draws):
        i = random.integers(len(loss), size=groups)
        change = sums_of(-loss[i], tokens[i])
        found = change.estimate()
        false += Equivalence("", truth, found, found, change.skewness()).no_worse
    return false / draws


# ── one text ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def of_blocks(kind: str, number: str, length: int, blocks: int = FEWEST) -> float:
    """The share of excerpts of a single text whose bounds over blocks contain the mean of all of it."""
    with (DATA / "long_texts.csv").open() as file:
        own = np.array([row["kind"] == kind for row in csv.DictReader(file)])
    columns = {name: values[own] for name, values in read("long_texts").items()}
    truth, pieces = columns[number].sum() / columns["tokens"].sum(), length // SHORTEST
    held = []
    for begin in range(0, len(columns[number]) - pieces + 1, max(1, pieces // 4)):
        here, block = slice(begin, begin + pieces), np.arange(pieces) * blocks // pieces
        sums, tokens = (by_group(block, columns[name][here]) for name in (number, "tokens"))
        held.append(holds(sums, tokens, truth, (NUMBERS | SAME)[number]))
    return float(np.mean(held))


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def table(title: str, rows: Sequence[object], columns: Sequence[object], share: Callable[..., float]) -> None:
    """Prints percentages, one per row and column."""
    width = max(12, *(len(str(column)) + 2 for column in columns))
    print(f"\n{title}\n{'':<16}" + "".join(f"{column!s:>{width}}" for column in columns))
    for row in rows:
        cells = (f"{100 * share(row, column):.1f}%" for column in columns)
        print(f"{row!s:<16}" + "".join(f"{cell:>{width}}" for cell in cells), flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    drawn = {"draws": given.draws, "seed": given.seed}
    print(f"at least {FEWEST} groups, stretches of at least {STRETCH:,} tokens, {given.draws:,} draws each")
    for name in ("wikitext2_articles", "python_docs", "mixed_texts"):
        numbers = [*NUMBERS, *(SAME if name == "mixed_texts" else ())]
        table(f"documents: {name}", GROUPS, numbers, lambda g, n, name=name: of_documents(name, n, g, **drawn))
    fewer = {**drawn, "draws": max(1, given.draws // 4)}
    table(f"stretches ({fewer['draws']:,} draws)", GROUPS, [*NUMBERS], lambda g, n: of_stretches(n, g, **fewer))
    print("\ncorrelation of neighbouring stretches\n" + " " * 16 + "".join(f"{number:>12}" for number in NUMBERS))
    for length in (512, 2048, 8192, 16384, STRETCH):
        print(f"{length:<16,}" + "".join(f"{neighbours(number, length):12.2f}" for number in NUMBERS))
    for unequal in (False, True):
        size = "groups of unequal size" if unequal else "equal groups"
        for kind in DRAWN:
            of = partial(of_shares, kind, unequal=unequal, **drawn)
            table(f"shares, {kind}, {size}: rows are groups", FEW, SHARES, lambda g, p, of=of: of(p, g))
    table(
        "false claims of no worse, mixed_texts",
        FEW,
        ("delta_w8", "delta_w4"),
        lambda g, n: false_no_worse(n, g, **drawn),
    )
    for blocks in (FEWEST, 10):
        for number in (*NUMBERS, *SAME):
            fits = [length for length in EXCERPTS if length // SHORTEST >= blocks]
            of_text = partial(of_blocks, number=number, blocks=blocks)
            table(f"{blocks} blocks of one text: {number}, by tokens of the excerpt", LONG, fits, _excerpt(of_text))
    return 0


def _excerpt(of: Callable[..., float]) -> Callable[..., float]:
    return lambda kind, length: of(kind, length=length)


if __name__ == "__main__":
    sys.exit(main())
