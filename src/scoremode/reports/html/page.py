"""The report as one HTML page: no network access, nothing to install, all text escaped.

Python computes, the templates in the folder beside this file write HTML and SVG, and one script (report.js) shows the
scored text. The script writes texts with textContent only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from scoremode.core import extensions
from scoremode.core.statistics.comparison import Comparison, are_of_paths
from scoremode.core.statistics.ranking import closest, pairs_tested
from scoremode.core.store.run import Run
from scoremode.core.verbs.outputs import check_report
from scoremode.errors import InputError, RunError, UnknownArgumentError
from scoremode.reports.html.charts import charts_section
from scoremode.reports.html.provenance import distinct_baselines, provenance_section, run_key
from scoremode.reports.html.scored_text import TEXT_TARGETS, page_data, text_section, worst_view
from scoremode.reports.html.size_chart import size_section
from scoremode.reports.html.tables import publish_section, summary_section
from scoremode.reports.html.templating import fill_page
from scoremode.reports.numbers import Statistics
from scoremode.reports.parts import ResultPart, offered_parts
from scoremode.reports.text import listed
from scoremode.values import usable


def render(
    comparisons: Sequence[Comparison],
    statistics: Sequence[Statistics],
    *,
    runs: Sequence[Run] = (),
    text_targets: int = TEXT_TARGETS,
    more: Sequence[str] = (),
    beside: Sequence[ResultPart] = (),
) -> str:
    """The page as HTML. ``statistics[i]`` belongs to ``comparisons[i]``; ``runs`` are shown in addition, or alone.

    ``more`` are the names of statistics that the table has in addition to the usual ones, ``beside`` what else
    is known about the candidates.
    """
    assert len(comparisons) == len(statistics), "one record of statistics per comparison"
    compared = {run_key(run) for c in comparisons for run in (c.baseline, c.candidate)}
    alone = [run for run in runs if run_key(run) not in compared]
    baselines = [c.baseline for c, _ in distinct_baselines(comparisons, statistics)] or alone
    texts = listed(list(dict.fromkeys(str(run.manifest.get("corpus", "a text")) for run in baselines)))
    names, best, tied = [c.name for c in comparisons], None, []
    of_paths = are_of_paths(comparisons)
    if comparisons and (len(comparisons) == 1 or not of_paths):
        with suppress(RunError, ValueError):  # baselines or texts differ, or no candidate has a value
            best, *tied = closest(comparisons) if len(comparisons) > 1 else [0]
    all_sections: list[tuple[str, str, Any]] = [
        ("summary", "Summary", summary_section(comparisons, statistics, alone, more)),
        ("quality", "Size", "" if of_paths else size_section(comparisons, statistics)),
        ("charts", "Charts", charts_section(comparisons, statistics, alone)),
        *((part.field.replace("_", "-"), part.title, part.section()) for part in beside),
        ("text", "Text", text_section(comparisons, alone, text_targets)),
        ("publish", "Publish", "" if of_paths else publish_section(comparisons, statistics)),
        ("provenance", "Provenance", provenance_section(comparisons, alone)),
    ]
    return fill_page(
        "report.html",
        title=_title(names, baselines, texts, of_paths=of_paths),
        baseline=baselines[0] if baselines else None,
        texts=texts,
        names=names,
        best=best,
        tied=listed([names[i] for i in tied]),
        s=statistics[best] if best is not None else {},
        by="kl_mean" if all(usable(s.get("kl_mean")) is not None for s in statistics) else "ppl_ratio",
        pairs=pairs_tested(len(comparisons)),
        sections={name: title for name, title, html in all_sections if html},
        parts=[html for *_, html in all_sections],
        data={**page_data(comparisons, alone, text_targets), "first": worst_view(comparisons, statistics, alone)},
    )


def _title(candidates: Sequence[str], baselines: Sequence[Run], texts: str, *, of_paths: bool) -> str:
    if not baselines:
        return "Nothing to report"
    unnamed = "the baseline" if candidates else "a model"
    models = listed(list(dict.fromkeys(str(run.manifest.get("model", unnamed)) for run in baselines)))
    if of_paths:
        return f"{listed(candidates)} against prefill of {models}"
    return f"{listed(candidates)} against {models}" if candidates else f"{models} on {texts}"


@overload
def write(path: Path, page: str, flag: str = "-o") -> Path: ...
@overload
def write(path: str | Path, page: str, flag: str = "-o") -> Path | str: ...
def write(path: str | Path, page: str, flag: str = "-o") -> Path | str:
    """Write a page to a file, all of it or nothing. An older report is replaced; any other file is refused.

    ``flag`` is the option that named the file, for error messages.
    """
    output = check_report(path, flag)
    output.write(page.encode())
    return output.where


@dataclass(frozen=True, slots=True)
class ResultPage:
    """A kind of result that has a page of its own: a value of the kind "page" that a wing offers."""

    shows: type
    render: Callable[[Sequence[Any]], str]
    refusal: tuple[str, str]  # what is wrong with results that cannot be on this page, and what to do
    several: bool = False  # can one page show several of them?
    in_notebooks: Callable[[Any], str] | None = None


def result_pages() -> list[ResultPage]:
    return extensions.offered("page")


@overload
def report(path: Path, *found: Any, **details: Any) -> Path: ...
@overload
def report(path: str | Path, *found: Any, **details: Any) -> Path | str: ...
def report(path: str | Path, *found: Any, **details: Any) -> Path | str:
    """Writes comparisons or runs as one HTML page. Other results need a page each: tasks, mismatch, attribution.

    With ``rollouts`` that comparisons were made on, the page also shows where candidates part from these texts, and
    with ``drafts=True`` what they would save as draft models. Returns the path of the page, or its URI as text.

    >>> import scoremode as sm
    >>> sm.report("report.html", *sm.compare("ref/", "candidate"))     # doctest: +SKIP
    """
    check_report(path)  # before the work
    parts = offered_parts()
    known = [name for part in parts for name in part.arguments]
    for name in details:
        if name not in known:
            raise UnknownArgumentError(f"report has no argument {name}", fix="leave it out")
    for page in result_pages():
        own = [one for one in found if isinstance(one, page.shows)]
        if own:
            if len(own) < len(found) or (len(own) > 1 and not page.several):
                raise InputError(page.refusal[0], fix=page.refusal[1])
            return write(path, page.render(own))
    comparisons = [f for f in found if isinstance(f, Comparison)]
    runs = [f for f in found if isinstance(f, Run)]
    beside = []
    for part in parts:
        given = {name: value for name, value in details.items() if name in part.arguments and value}
        beside += [part.make(comparisons, **given)] if given and comparisons else []
    return write(path, render(comparisons, [c.statistics() for c in comparisons], runs=runs, beside=beside))
