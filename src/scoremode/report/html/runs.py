"""Which runs a page shows, how they are named, and the order in which their text is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from scoremode.report.html.numbers import Statistics
from scoremode.statistics.comparison import Comparison
from scoremode.store.run import Run
from scoremode.values import Floats, Ints


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


def positions(run: Run) -> Ints:
    """The distance of each target from the first token that its window scores."""
    window, token = run.facts.window, run.facts.token
    if not len(window):
        return np.zeros(0, np.int64)
    first = np.full(int(window.max()) + 1, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(first, window, token)
    return np.asarray(token - first[window], dtype=np.int64)


def delta_logprob(comparison: Comparison) -> Floats:
    """Nats by which the text's own token became likelier; NaN if both models give it probability zero."""
    with np.errstate(invalid="ignore"):
        return np.asarray(comparison.candidate.scores.logprob - comparison.baseline.scores.logprob)


def reading_order(run: Run, limit: int) -> Ints:
    """Targets in the order of the text, each token once, at most ``limit`` of them.

    If overlapping windows score a token more than once, its first score is kept: the one with the most context.
    """
    return np.asarray(np.unique(run.facts.token, return_index=True)[1][:limit], dtype=np.int64)
