"""Which runs a page shows, how they are named, and the order in which their text is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scoremode.report.html.numbers import Statistics
from scoremode.scores.columns import Scores, TargetFacts
from scoremode.statistics.comparison import Comparison
from scoremode.store.run import Run
from scoremode.values import Ints

MOST_BETWEEN = 64  # tokens of the text for each target


def same_run(one: Run, other: Run) -> bool:
    return one is other or (one.path is not None and one.path == other.path)


def distinct(runs: Iterable[Run]) -> list[Run]:
    found: list[Run] = []
    for run in runs:
        if not any(same_run(run, other) for other in found):
            found.append(run)
    return found


def distinct_baselines(
    comparisons: Sequence[Comparison], statistics: Sequence[Statistics]
) -> list[tuple[Comparison, Statistics]]:
    found: list[tuple[Comparison, Statistics]] = []
    for c, s in zip(comparisons, statistics, strict=True):
        if not any(same_run(c.baseline, other.baseline) for other, _ in found):
            found.append((c, s))
    return found


def run_name(run: Run, among: Sequence[Run] = ()) -> str:
    """The model's name, with the text, engine or folder added if the model alone would not tell the runs apart."""
    m = run.manifest
    parts = [str(m.get("model", "run"))]
    for name in ("corpus", "engine", "dtype", "method"):
        if len({str(other.manifest.get(name)) for other in among}) > 1:
            parts.append(str(m.get(name)))
    named = " · ".join(parts)
    twins = [other for other in among if [str(other.manifest.get("model", "run"))] == parts[:1]]
    return f"{named} · {run.path}" if len(parts) == 1 and len(twins) > 1 and run.path else named


def reading_order(run: Run, limit: int) -> Ints:
    """Targets in the order of the text, each token once, at most ``limit`` of them.

    If overlapping windows score a token more than once, its first score is kept: the one with the most context.
    """
    tokens, order, begin = np.zeros(0, np.int64), np.zeros(0, np.int64), 0
    for (block,) in run.facts.blocks("token"):
        new = np.arange(len(block)) if len(tokens) < limit else np.flatnonzero(block < tokens[-1:].max(initial=0))
        if len(new):
            here, index = block[new], begin + new
            tokens, first = np.unique(np.concatenate([tokens, here]), return_index=True)
            tokens, order = tokens[:limit], np.concatenate([order, index])[first[:limit]]
        begin += len(block)
    return order


def distinct_tokens(run: Run) -> int:
    """How many different tokens of the text the targets are; a byte for each, unless they are in order."""
    count, largest, in_order = 0, -1, True
    for (token,) in run.facts.blocks("token"):
        in_order = in_order and int(token[0]) > largest and bool((np.diff(token) > 0).all())
        count, largest = count + len(token), max(largest, int(token.max()))
    if in_order:
        return count
    if largest > MOST_BETWEEN * count:  # no plan of ours skips that much; a foreign file must not fill the memory
        return len(np.unique(run.facts.token))
    seen = np.zeros(largest + 1, np.bool_)
    for (token,) in run.facts.blocks("token"):
        seen[token] = True
    return int(seen.sum())


def taken(columns: Scores | TargetFacts, names: Sequence[str], order: Ints) -> list[npt.NDArray[Any]]:
    """Some rows of some columns that were measured, in the order given; the columns are not held whole."""
    ascending = np.argsort(order, kind="stable")
    wanted, begin, at = order[ascending], 0, 0
    parts: list[tuple[npt.NDArray[Any], ...]] = []
    for block in columns.blocks(*names):
        end = begin + len(block[0])
        upto = int(np.searchsorted(wanted, end))
        if upto > at or not parts:
            parts.append(tuple(column[wanted[at:upto] - begin] for column in block))
        begin, at = end, upto
        if at == len(wanted):
            break
    if not parts:  # not a single target
        return [getattr(columns, name) for name in names]
    back = np.empty_like(ascending)
    back[ascending] = np.arange(len(ascending))
    return [np.concatenate(of_column)[back] for of_column in zip(*parts, strict=True)]
