"""The scored text on the page: typed arrays for the script, and the section that shows them.

The numbers are stored as base64 of typed arrays: a hundred thousand tokens take a few megabytes, and the browser keeps
elements for only one page of them at a time.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from scoremode.core.statistics.comparison import BY_NAME, Comparison
from scoremode.core.store.run import Run
from scoremode.core.text.token_text import owned
from scoremode.reports.html.charts import delta_logprob
from scoremode.reports.html.templating import fill, visible
from scoremode.reports.numbers import judged_by
from scoremode.reports.served import run_name
from scoremode.values import Floats, Ints, usable

TEXT_TARGETS = 250_000  # most targets per text; a page with more would not open on a phone
SENSITIVITY_QUANTILE = 0.99
Stored = dict[str, str]  # a column: its type, and its numbers as base64
View = dict[str, str | int | Stored | None]
FIRST_STEP = 0.1  # nats: the palest colour of Δ logprob and KL starts here, as in report.js


def text_section(comparisons: Sequence[Comparison], alone: Sequence[Run], limit: int) -> Markup:
    if not comparisons and not alone:
        return Markup()
    return fill(
        "scored_text.html",
        names=[c.name for c in comparisons] + [run_name(run, alone) for run in alone],
        compared=bool(comparisons),
        kl=any(c.kl is not None for c in comparisons),
        notes=_notes([*(c.baseline for c in comparisons), *alone], limit),
    )


def worst_view(comparisons: Sequence[Comparison], alone: Sequence[Run]) -> int:
    """The number of the view that the page opens with: the candidate that lost most, or the most surprised run."""
    if not comparisons:
        metrics = [run.manifest.get("metrics", {}).get("mean_nll") or {} for run in alone]
        costs = [usable(metric.get("value")) for metric in metrics]
    else:
        name = judged_by(comparisons)
        values = [usable(c.statistics().get(name)) for c in comparisons]
        costs = [None if value is None else BY_NAME[name].cost(value) for value in values]
    keys = [-math.inf if cost is None else cost for cost in costs]
    return keys.index(max(keys)) if keys else 0


def _notes(runs: Sequence[Run], limit: int) -> list[str]:
    notes: dict[str, None] = {}
    for run in runs:
        unique = len(np.unique(run.facts.token))
        if unique > limit:
            notes[f"Only the first {limit:,} of {unique:,} tokens are shown; numbers and charts include all."] = None
        if unique < len(run.scores):
            again = len(run.scores) - unique
            notes[f"{again:,} targets score a token again; each token is shown with its first score."] = None
    return list(notes)


def page_data(comparisons: Sequence[Comparison], alone: Sequence[Run], limit: int) -> dict[str, object]:
    """All data for the script; invisible characters are made visible here, so that the script shows texts unchanged."""
    made = _PageData(limit)
    views = list[View]()
    for c in comparisons:
        baseline_name = str(c.baseline.manifest.get("model", "baseline"))
        views.append(made.view(c.name, c.baseline, baseline_name, c.candidate, c.kl))
    views += [made.view(run_name(run, alone), run, run_name(run, alone)) for run in alone]
    return {
        "views": views,
        "texts": made.texts,
        "scores": made.scores,
        "words": [visible(word) for word in made.words],
        "sensitivity": {
            "delta": _sensitivity([delta_logprob(c) for c in comparisons]),
            "kl": _sensitivity([c.kl for c in comparisons if c.kl is not None]),
        },
    }


def _sensitivity(values: Sequence[Floats]) -> int:
    """A factor for colours (1, 10 or 100) that colours about 1 % of the tokens of the candidate that moved most."""
    sizes = [np.abs(v[np.isfinite(v)]) for v in values]
    high = max((float(np.quantile(s, SENSITIVITY_QUANTILE)) for s in sizes if len(s)), default=1.0)
    return 1 if high >= FIRST_STEP else 10 if high >= FIRST_STEP / 10 else 100


class _PageData:
    """Collects the data of the page: columns as base64, and each distinct word, text and run only once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.words: dict[str, int] = {}
        self.texts: list[dict[str, int | Stored]] = []
        self.scores: list[dict[str, Stored | None]] = []
        self._orders: dict[str, tuple[int, Ints]] = {}
        self._runs: dict[int, int] = {}  # the number of a run's columns, by its identity

    def view(
        self, name: str, baseline: Run, baseline_name: str, candidate: Run | None = None, kl: Floats | None = None
    ) -> View:
        """The data of one view that the reader can choose: a candidate against its baseline, or a run alone."""
        text, order = self.text_of(baseline)
        return {
            "name": visible(name),
            "baselineName": visible(baseline_name),
            "text": text,
            "baseline": self.scores_of(baseline),
            "candidate": None if candidate is None else self.scores_of(candidate),
            "kl": None if kl is None else column(kl[order]),
        }

    def text_of(self, run: Run) -> tuple[int, Ints]:
        """The index of the text that a run scored, and its targets in reading order; all runs of a plan share both."""
        if run.plan_digest not in self._orders:
            order = reading_order(run, self.limit)
            facts = run.facts
            token, document, window, text = (x[order] for x in (facts.token, facts.document, facts.window, facts.text))
            begins = np.ones(len(order), dtype=np.bool_)
            begins[1:] = (np.diff(token) != 1) | (np.diff(document) != 0)
            stretches = np.split(text, np.flatnonzero(begins)[1:])
            enters = np.ones(len(order), dtype=np.bool_)
            enters[1:] = np.diff(window) != 0
            self.texts.append(
                {
                    "count": len(order),
                    "word": self._words([word for part in stretches for word in owned(part.tolist())]),
                    # runs of consecutive tokens: where each starts, its first position and its document
                    "begin": column(np.flatnonzero(begins)),
                    "beginToken": column(token[begins]),
                    "beginDocument": column(document[begins]),
                    "documents": len(np.unique(document)),
                    "enter": column(np.flatnonzero(enters)),
                    "enterWindow": column(window[enters]),
                }
            )
            self._orders[run.plan_digest] = (len(self.texts) - 1, order)
        return self._orders[run.plan_digest]

    def scores_of(self, run: Run) -> int:
        """Adds a run's columns to the page once, and returns their index. A column that was not measured is null."""
        if id(run) in self._runs:
            return self._runs[id(run)]
        _, order = self.text_of(run)

        def stored(name: str) -> Stored | None:
            values = getattr(run.scores, name)
            return None if values is None else column(values[order])

        top = None if run.facts.top_text is None else self._words(run.facts.top_text[order])
        columns = {"logprob": stored("logprob"), "rank": stored("rank"), "topLogprob": stored("top_logprob")}
        self.scores.append({**columns, "topWord": top})
        self._runs[id(run)] = len(self.scores) - 1
        return len(self.scores) - 1

    def _words(self, texts: Sequence[str] | npt.NDArray[np.object_]) -> Stored:
        indices = self.words
        return column(np.fromiter((indices.setdefault(str(t), len(indices)) for t in texts), np.int64, len(texts)))


def column(values: npt.NDArray[Any]) -> Stored:
    """Numbers as base64 of the smallest little-endian type that fits; float32 is enough for display."""
    if values.dtype.kind == "f":
        kind = "f4"
    else:
        top = int(values.max()) if len(values) else 0
        kind = "u1" if top < 2**8 else "u2" if top < 2**16 else "u4"
    with np.errstate(over="ignore"):
        data = np.ascontiguousarray(values.astype(f"<{kind}")).tobytes()
    return {"type": kind, "data": base64.b64encode(data).decode()}


def reading_order(run: Run, limit: int) -> Ints:
    """Targets in the order of the text, each token once, at most ``limit`` of them.

    If overlapping windows score a token more than once, its first score is kept: the one with the most context.
    """
    return np.unique(run.facts.token, return_index=True)[1][:limit]
