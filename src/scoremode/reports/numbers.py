"""Numbers for people: the one rule for their digits, which terminal, page, card and JSON follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from scoremode.core.statistics.comparison import BY_NAME, STATISTICS, Comparison, are_of_paths
from scoremode.core.statistics.statistic import Statistic, TerminalColumn
from scoremode.errors import OptionError, did_you_mean, harmless
from scoremode.values import rounded, usable

Statistics = Mapping[str, Any]

PERPLEXITIES = ("ppl_baseline", "ppl_candidate")


SHOWN = sorted((s for s in STATISTICS if s.label), key=lambda s: s.name == "bits_per_byte_candidate")
"""The statistics of a comparison that tables show, in their order: as JSON lists them, but bits per byte come last."""

OF_PATHS = {  # names and headings
    "ppl_candidate": "",
    "ppl_ratio": "",
    "kl_mean": "",
    "delta_logprob_mean": "Δ mean",
    "delta_logprob_rms": "Δ rms",
    "delta_logprob_max": "Δ max",
    "kl_max": "",
    "same_top": "",
}


def shown_statistics(comparisons: Sequence[Comparison], columns: Sequence[str] = ()) -> list[Statistic]:
    """The statistics that tables of these comparisons show, in their order; at the end those asked for by name."""
    usual = [*map(_titled, OF_PATHS, OF_PATHS.values())] if are_of_paths(comparisons) else SHOWN
    names = {s.name for s in usual if s.column is not None}
    added = [_titled(name, BY_NAME[name].title or BY_NAME[name].label or name) for name in columns if name not in names]
    return [*(s for s in usual if s.name not in {statistic.name for statistic in added}), *added]


def judged_by(comparisons: Sequence[Comparison]) -> str:
    """The statistic by which candidates are ordered: the divergence, if all of them have it."""
    have_kl = (usable(c.statistics().get("kl_mean")) is not None for c in comparisons)
    return "kl_mean" if all(have_kl) else "ppl_ratio"


def _titled(name: str, title: str) -> Statistic:
    """A statistic as a column with this title; with its own if there is none."""
    statistic = BY_NAME[name]
    return replace(statistic, label=title, column=TerminalColumn(title)) if title else statistic


def read_columns(columns: str | None) -> list[str]:
    """The names of statistics in ``--columns``, checked before the work.

    >>> read_columns("overlap,top5_same")
    ['overlap', 'top5_same']
    """
    names = list(dict.fromkeys(name.strip() for name in (columns or "").split(",") if name.strip()))
    for name in names:
        if name not in BY_NAME:
            raise OptionError(f"there is no statistic '{harmless(name)}'", fix=did_you_mean(name, tuple(BY_NAME)))
    return names


def shown_statistic(statistic: Statistic, s: Statistics, paired: Any = None) -> tuple[str, str]:
    """A statistic of a comparison and its error, rounded for people.

    The decimals of a perplexity follow from the paired error of its difference from the baseline's, ``paired`` if it is
    given: its own error is mostly the difficulty of the text, which both models share.
    """
    if statistic.name in PERPLEXITIES:
        return rounded(s.get(statistic.name), supports=s.get("ppl_difference_stderr") if paired is None else paired)
    return rounded(s.get(statistic.name), s.get(f"{statistic.name}_stderr"), percent=statistic.percent)


def baseline_perplexity(statistics: Sequence[Statistics]) -> str:
    """The baseline's perplexity, with as many digits as its smallest difference from a candidate is known to."""
    errors = [e for s in statistics if (e := usable(s.get("ppl_difference_stderr")))]
    return shown_statistic(BY_NAME["ppl_baseline"], statistics[0], min(errors, default=None))[0]


def statistics_for_people(s: Statistics, together: Sequence[Statistics]) -> dict[str, str]:
    """The statistics that tables show, by name, each as one text such as ``1.0015 ± 0.0010``.

    ``together`` are the statistics of all candidates of the table.
    """
    texts = {m.name: " ".join(shown_statistic(m, s)).rstrip() for m in SHOWN if s.get(m.name) is not None}
    return {"ppl_baseline": baseline_perplexity(together), **texts}


def file_size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,} bytes"
