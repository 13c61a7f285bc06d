"""How often do the 95 % bounds contain the true mean? Texts are drawn many times from scores whose mean is known.

    python benchmarks/coverage.py

benchmarks/data/*.csv have sums over pieces of up to 512 tokens, in order: SmolLM2-135M (the embedded model) in float32
on one H200, windows of 2,048 tokens with at least 512 of context, against its weights rounded to 8 and 4 bits by
examples/emulate_quantization.py. wikitext2_articles has the 62 pages of WikiText-2's test text (291,879 targets),
python_docs the 79 texts of python-docs (112,798 targets), which differ in size by a factor of 270.

documents   G documents are drawn with replacement; groups are documents
stretches   an endless stream of articles, drawn with replacement and joined without a separator; a part of it with a
            random start is split into G stretches. This is the hard case: a plain text file made of many texts
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from scoremode.statistics.estimate import GroupSums
from scoremode.statistics.groups import FEWEST, STRETCH
from scoremode.values import Floats, Ints

DATA = Path(__file__).parent / "data"
NUMBERS = ("nll", "delta_w8", "delta_w4", "kl_w8", "kl_w4")
GROUPS = (5, 10, 30, 60)
PIECE = 512  # tokens per line of the files


def read(name: str) -> dict[str, Floats]:
    """The columns of a file."""
    with (DATA / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {column: np.array([float(row[column]) for row in rows]) for column in rows[0]}


def by_group(groups: Ints, values: Floats) -> Floats:
    return np.bincount(groups, values).astype(np.float64)


def holds(sums: Floats, tokens: Floats, truth: float) -> bool:
    """Do the bounds over these groups contain the true mean?"""
    groups = GroupSums(len(sums))
    groups.add(np.arange(len(sums)), sums, tokens)
    found = groups.estimate()
    return found.low is not None and found.high is not None and found.low <= truth <= found.high


def of_documents(name: str, number: str, groups: int, draws: int, seed: int) -> float:
    """The share of draws whose bounds contain the mean of all documents."""
    columns = read(name)
    document: Ints = columns["document"].astype(np.int64)
    sums, tokens = (by_group(document, columns[column]) for column in (number, "tokens"))
    truth, random = sums.sum() / tokens.sum(), np.random.default_rng(seed)
    drawn = (random.integers(len(sums), size=groups) for _ in range(draws))
    return sum(holds(sums[i], tokens[i], truth) for i in drawn) / draws


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
        held += holds(by_group(stretch, columns[number][lines]), by_group(stretch, tokens), truth)
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


def table(title: str, share: Callable[..., float]) -> None:
    print(f"\n{title}\ngroups   " + "".join(f"{number:>10}" for number in NUMBERS))
    for groups in GROUPS:
        print(
            f"{groups:<9}" + "".join(f"{100 * share(number=number, groups=groups):9.1f}%" for number in NUMBERS),
            flush=True,
        )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    print(f"at least {FEWEST} groups, stretches of at least {STRETCH:,} tokens, {given.draws:,} draws each")
    for name in ("wikitext2_articles", "python_docs"):
        table(f"documents: {name}", partial(of_documents, name, draws=given.draws, seed=given.seed))
    draws = max(1, given.draws // 4)
    table(f"stretches ({draws:,} draws)", partial(of_stretches, draws=draws, seed=given.seed))
    print("\ncorrelation of neighbouring stretches\ntokens   " + "".join(f"{number:>10}" for number in NUMBERS))
    for length in (512, 2048, 8192, 16384, STRETCH):
        print(f"{length:<9,}" + "".join(f"{neighbours(number, length):10.2f}" for number in NUMBERS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
