"""The report as one HTML page: no network access, nothing to install, all text escaped.

Python computes, the templates in the folder beside this file write HTML and SVG, and one script (report.js) shows the
scored text. The script writes texts with textContent only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import overload

from scoremode.core.statistics.comparison import Comparison, are_of_paths
from scoremode.core.statistics.ranking import closest, pairs_tested
from scoremode.core.store.run import Run
from scoremode.core.verbs.outputs import check_report
from scoremode.errors import InputError, RunError
from scoremode.reports.html.charts import charts_section
from scoremode.reports.html.provenance import distinct_baselines, provenance_section, run_key
from scoremode.reports.html.scored_text import TEXT_TARGETS, page_data, text_section, worst_view
from scoremode.reports.html.size_chart import has_sizes, size_section
from scoremode.reports.html.tables import publish_section, summary_section
from scoremode.reports.html.templating import fill_page
from scoremode.reports.numbers import Statistics
from scoremode.reports.text import listed
from scoremode.studies.attribution.page import render_attribution
from scoremode.studies.attribution.result import Attribution
from scoremode.studies.rollouts.candidates_on_texts import OwnWords, own_words
from scoremode.studies.rollouts.mismatch_page import render_mismatch
from scoremode.studies.rollouts.mismatch_statistics import Mismatch
from scoremode.studies.rollouts.page import own_words_section
from scoremode.studies.rollouts.texts import Rollouts
from scoremode.studies.tasks.page import render_tasks
from scoremode.studies.tasks.results import TasksComparison
from scoremode.values import usable


def render(
    comparisons: Sequence[Comparison],
    statistics: Sequence[Statistics],
    *,
    runs: Sequence[Run] = (),
    text_targets: int = TEXT_TARGETS,
    more: Sequence[str] = (),
    words: Sequence[OwnWords] = (),
) -> str:
    """The page as HTML. ``statistics[i]`` belongs to ``comparisons[i]``; ``runs`` are shown in addition, or alone.

    ``more`` are the names of statistics that the table has in addition to the usual ones, ``words`` what texts that a
    model wrote say about the candidates.
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
    about_words = own_words_section(words)
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
        parts=(
            summary_section(comparisons, statistics, alone, more),
            *(() if of_paths else (size_section(comparisons, statistics),)),
            charts_section(comparisons, statistics, alone),
            about_words,
            text_section(comparisons, alone, text_targets),
            *(() if of_paths else (publish_section(comparisons, statistics),)),
            provenance_section(comparisons, alone),
        ),
        left_out=(
            *(() if has_sizes(comparisons) and not of_paths else ("quality",)),
            *(() if comparisons and not of_paths else ("publish",)),
            *(() if about_words else ("own-words",)),
        ),
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


Found = Comparison | Run | TasksComparison | Mismatch | Attribution


@overload
def report(path: Path, *found: Found, rollouts: Rollouts | None = None, drafts: bool = False) -> Path: ...
@overload
def report(path: str | Path, *found: Found, rollouts: Rollouts | None = None, drafts: bool = False) -> Path | str: ...
def report(path: str | Path, *found: Found, rollouts: Rollouts | None = None, drafts: bool = False) -> Path | str:
    """Writes comparisons or runs as one HTML page. Other results need a page each: tasks, mismatch, attribution.

    With ``rollouts`` that comparisons were made on, the page also shows where candidates part from these texts, and
    with ``drafts`` what they would save as draft models. Returns the path of the page, or its URI as text.

    >>> import scoremode as sm
    >>> sm.report("report.html", *sm.compare("ref/", "candidate"))     # doctest: +SKIP
    """
    check_report(path)  # before the work
    on_tasks = [f for f in found if isinstance(f, TasksComparison)]
    if on_tasks:
        if len(on_tasks) < len(found):
            raise InputError("comparisons on tasks and on texts do not share a page", fix="write two reports")
        return write(path, render_tasks(on_tasks))
    for one in found:
        if isinstance(one, Mismatch):
            if len(found) > 1:
                raise InputError("a mismatch has a page of its own", fix="write several reports")
            return write(path, render_mismatch(one))
        if isinstance(one, Attribution):
            if len(found) > 1:
                raise InputError("an attribution has a page of its own", fix="write several reports")
            return write(path, render_attribution(one))
    comparisons = [f for f in found if isinstance(f, Comparison)]
    runs = [f for f in found if isinstance(f, Run)]
    statistics = [c.statistics() for c in comparisons]
    words = [] if rollouts is None or not comparisons else own_words(comparisons, rollouts, drafts=drafts)
    return write(path, render(comparisons, statistics, runs=runs, words=words))
