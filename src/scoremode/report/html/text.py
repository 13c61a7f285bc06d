"""The scored text on the page: typed arrays for the script, and the section that shows them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from scoremode.report.html.charts import escaped, visible
from scoremode.report.html.runs import distinct_tokens, reading_order, run_name, taken
from scoremode.report.html.series import Column, column_of, delta_logprob
from scoremode.statistics.comparison import Comparison
from scoremode.store.run import Run
from scoremode.text.token_text import owned
from scoremode.values import Ints

TEXT_TARGETS = 250_000  # most targets per text; a page with more would not open on a phone

SENSITIVITY_QUANTILE = 0.99

FIRST_STEP = 0.1  # nats: the palest colour of Δ logprob and KL starts here, as in report.js


class PageData:
    """The data for the script: columns as base64, each distinct word once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.words: dict[str, int] = {}
        self.texts: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        self._orders: dict[str, tuple[int, Ints]] = {}
        self._known: list[tuple[Run, int]] = []

    def text_of(self, run: Run) -> tuple[int, Ints]:
        """The text that a run scored, and the order in which its targets are read; one per plan."""
        if run.plan_digest not in self._orders:
            order = reading_order(run, self.limit)
            token, document, window, text = taken(run.facts, ("token", "document", "window", "text"), order)
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
        for known, index in self._known:
            if known is run:
                return index
        _, order = self.text_of(run)
        found = {
            name: taken(columns, [name], order)[0]
            for columns, names in ((run.scores, ("logprob", "rank", "top_logprob")), (run.facts, ("top_text",)))
            for name in names
            if columns.has(name)
        }
        self.scores.append(
            {
                "logprob": column(found["logprob"]),
                # null: not measured
                "rank": column(found["rank"]) if "rank" in found else None,
                "topLogprob": column(found["top_logprob"]) if "top_logprob" in found else None,
                "topWord": self._words(found["top_text"]) if "top_text" in found else None,
            }
        )
        self._known.append((run, len(self.scores) - 1))
        return len(self.scores) - 1

    def _words(self, texts: Sequence[str] | npt.NDArray[np.object_]) -> dict[str, str]:
        words = self.words
        return column(np.fromiter((words.setdefault(str(t), len(words)) for t in texts), np.int64, len(texts)))


def page_data(comparisons: Sequence[Comparison], alone: Sequence[Run], limit: int) -> dict[str, Any]:
    """All data for the script; invisible characters are made visible here, so that the script shows texts unchanged."""
    made = PageData(limit)
    views: list[dict[str, Any]] = []
    for c in comparisons:
        text, order = made.text_of(c.baseline)
        baseline, candidate = made.scores_of(c.baseline), made.scores_of(c.candidate)
        kl = column(c.kl[order]) if c.kl is not None else None
        of = visible(c.baseline.manifest.get("model", "baseline"))
        views.append(
            {
                "name": visible(c.name),
                "baselineName": of,
                "text": text,
                "baseline": baseline,
                "candidate": candidate,
                "kl": kl,
            }
        )
    for run in alone:
        text, _ = made.text_of(run)
        name = visible(run_name(run, alone))
        views.append(
            {
                "name": name,
                "baselineName": name,
                "text": text,
                "baseline": made.scores_of(run),
                "candidate": None,
                "kl": None,
            }
        )
    return {
        "views": views,
        "texts": made.texts,
        "scores": made.scores,
        "words": [visible(word) for word in made.words],
        "sensitivity": {
            "delta": _sensitivity([Column(partial(delta_logprob, c)) for c in comparisons]),
            "kl": _sensitivity([column_of(c.kl) for c in comparisons if c.kl is not None]),
        },
    }


def _sensitivity(values: Sequence[Column]) -> int:
    """1, 10 or 100, so that about one token in a hundred is coloured for the candidate that moved most."""
    sizes = [v.where(np.isfinite).absolute() for v in values]
    high = max((s.quantile(SENSITIVITY_QUANTILE) for s in sizes if s.count), default=1.0)
    return 1 if high >= FIRST_STEP else 10 if high >= FIRST_STEP / 10 else 100


def column(values: npt.NDArray[Any]) -> dict[str, str]:
    """Numbers as base64 of the smallest little-endian type that fits; float32 is enough for display."""
    if values.dtype.kind == "f":
        kind = "f4"
    else:
        top = int(values.max()) if len(values) else 0
        kind = "u1" if top < 2**8 else "u2" if top < 2**16 else "u4"
    with np.errstate(over="ignore"):
        data = np.ascontiguousarray(values.astype(f"<{kind}")).tobytes()
    return {"type": kind, "data": base64.b64encode(data).decode()}


def text_section(comparisons: Sequence[Comparison], alone: Sequence[Run], limit: int) -> str:
    if not comparisons and not alone:
        return ""
    names = [c.name for c in comparisons] + [run_name(run, alone) for run in alone]
    options = "".join(f'<option value="{i}">{escaped(name)}</option>' for i, name in enumerate(names))
    label = "Candidate" if comparisons else "Run"
    measures = [("delta", "Δ logprob", True), ("kl", "KL", any(c.kl is not None for c in comparisons))]
    buttons = "".join(
        f'<button type="button" data-measure="{name}" aria-pressed="false">{text}</button>'
        for name, text, known in [*measures, ("surprise", "Surprise", True)]
        if known
    )
    # with runs only, there is one measure and nothing to choose
    colour_by = f'<div class="choice" role="group" aria-label="Colour by">{buttons}</div>' if comparisons else ""
    scales = "".join(f'<option value="{n}">{text}</option>' for n, text in ((1, "normal"), (10, "×10"), (100, "×100")))
    notes = "".join(f'<p class="note">{escaped(note)}</p>' for note in _text_notes(comparisons, alone, limit))
    return f"""<section id="text" aria-labelledby="text-title"><h2 id="text-title">The text</h2>
<noscript><p class="note">The text is shown by a script, and scripts are disabled here.</p></noscript>{notes}
<div class="tools" hidden>
<label>{label} <select id="view">{options}</select></label>
{colour_by}
<label id="scale-label">Sensitivity <select id="scale">{scales}</select></label>
<div class="choice jump" role="group" aria-label="Jump to the worst tokens">
<button type="button" id="worst">Worst</button>
<button type="button" id="previous-worst" aria-keyshortcuts="p" title="key p">‹ Previous</button>
<button type="button" id="next-worst" aria-keyshortcuts="n" title="key n">Next worst ›</button></div>
<form id="go" class="find">
<label>Position <input id="position" type="number" min="0" step="1" inputmode="numeric"></label>
<button>Go</button></form>
<form id="search" class="find">
<label>Find <input id="needle" type="search" autocomplete="off" spellcheck="false"></label>
<button>Find</button></form>
</div>
<div id="legend" class="scale" hidden></div>
<p id="said" class="said" role="status" aria-live="polite"></p>
<div class="worst-list" hidden><h3 id="worst-title">Worst tokens</h3><ol id="worst-tokens"></ol></div>
<h3 class="reading-title" hidden>Every token</h3>
<div class="overview" hidden><svg id="map" viewBox="0 0 600 44" preserveAspectRatio="none" aria-hidden="true"></svg>
<input id="page" type="range" min="1" max="1" value="1" step="1" aria-label="Page of the text"></div>
<div class="reading" hidden>
<div><div id="tokens" class="tokens" role="listbox" aria-orientation="horizontal" tabindex="0" dir="auto"
 aria-label="Tokens of the text. Use the left and right arrow keys to move, n and p to jump to the worst tokens."></div>
<div class="pager"><button type="button" id="previous-page">‹ Previous page</button><span id="page-number"></span>
<button type="button" id="next-page">Next page ›</button></div></div>
<aside id="details" class="details" aria-label="The selected token" aria-live="polite"></aside>
</div>
</section>
"""


def _text_notes(comparisons: Sequence[Comparison], alone: Sequence[Run], limit: int) -> list[str]:
    notes: dict[str, None] = {}
    for run in [*(c.baseline for c in comparisons), *alone]:
        unique = distinct_tokens(run)
        if unique > limit:
            notes[f"Only the first {limit:,} of {unique:,} tokens are shown; numbers and charts include all."] = None
        if unique < len(run.scores):
            again = len(run.scores) - unique
            notes[f"{again:,} targets score a token again; each token is shown with its first score."] = None
    return list(notes)
