"""The report as one HTML page: no network access, nothing to install, all text escaped.

Python writes the text and draws the charts (charts.py); one script (assets/report.js) shows the scored text. Its
numbers are stored as base64 of typed arrays: a hundred thousand tokens take a few megabytes, and the browser keeps
elements for only one page of them at a time.

Texts, names and paths come from untrusted files. They are written to HTML through ``escaped`` and to the script's data
through ``script_json`` (frame.py); the script writes them with textContent only. The page's content security policy
allows this one script, by its hash, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import overload

from scoremode.errors import InputError
from scoremode.harness.results import TasksComparison
from scoremode.report.html.figures import charts_section
from scoremode.report.html.frame import frame
from scoremode.report.html.headline import headline
from scoremode.report.html.numbers import Statistics
from scoremode.report.html.provenance import provenance_section
from scoremode.report.html.quality import quality_section
from scoremode.report.html.runs import same_run
from scoremode.report.html.tables import summary_section
from scoremode.report.html.tasks import write_tasks
from scoremode.report.html.text import TEXT_TARGETS, page_data, text_section
from scoremode.statistics.comparison import Comparison
from scoremode.store.run import Run
from scoremode.verbs.outputs import check_report


def render(
    comparisons: Sequence[Comparison],
    statistics: Sequence[Statistics],
    *,
    runs: Sequence[Run] = (),
    text_targets: int = TEXT_TARGETS,
) -> str:
    """The page. ``statistics[i]`` belongs to ``comparisons[i]``; ``runs`` are shown in addition, or alone."""
    assert len(comparisons) == len(statistics), "one record of statistics per comparison"
    alone = [
        run for run in runs if not any(same_run(run, own) for c in comparisons for own in (c.baseline, c.candidate))
    ]
    data = page_data(comparisons, alone, text_targets)
    title, lead = headline(comparisons, statistics, alone)
    quality = quality_section(comparisons, statistics)
    body = "".join(
        (
            summary_section(comparisons, statistics, alone),
            quality,
            charts_section(comparisons, statistics, alone),
            text_section(comparisons, alone, text_targets),
            provenance_section(comparisons, alone),
        )
    )
    sections = {"summary": "Summary", **({"quality": "Size"} if quality else {}), "charts": "Charts", "text": "Text"}
    return frame(title, lead, {**sections, "provenance": "Provenance"}, body, data=data, skip=("text", "the text"))


@overload
def write(
    path: Path,
    comparisons: Sequence[Comparison],
    statistics: Sequence[Statistics],
    *,
    runs: Sequence[Run] = (),
    text_targets: int = TEXT_TARGETS,
    flag: str = "-o",
) -> Path: ...
@overload
def write(
    path: str | Path,
    comparisons: Sequence[Comparison],
    statistics: Sequence[Statistics],
    *,
    runs: Sequence[Run] = (),
    text_targets: int = TEXT_TARGETS,
    flag: str = "-o",
) -> Path | str: ...
def write(
    path: str | Path,
    comparisons: Sequence[Comparison],
    statistics: Sequence[Statistics],
    *,
    runs: Sequence[Run] = (),
    text_targets: int = TEXT_TARGETS,
    flag: str = "-o",
) -> Path | str:
    """Write the page to a file, all of it or nothing. An older report is replaced; any other file is refused.

    ``flag`` is the option that named the file, for error messages.
    """
    output = check_report(path, flag)
    output.write(render(comparisons, statistics, runs=runs, text_targets=text_targets).encode())
    return output.where


@overload
def report(path: Path, *found: Comparison | Run | TasksComparison) -> Path: ...
@overload
def report(path: str | Path, *found: Comparison | Run | TasksComparison) -> Path | str: ...
def report(path: str | Path, *found: Comparison | Run | TasksComparison) -> Path | str:
    """Comparisons, or runs, as one HTML page; comparisons on tasks have a page of their own.

    Gives where it lies: a path, or the URI as text.

    >>> import scoremode as sm
    >>> sm.report("report.html", *sm.compare("ref/", "candidate"))     # doctest: +SKIP
    """
    on_tasks = [f for f in found if isinstance(f, TasksComparison)]
    if on_tasks:
        if len(on_tasks) < len(found):
            raise InputError("comparisons on tasks and on texts do not share a page", fix="write two reports")
        return write_tasks(path, on_tasks)
    comparisons = [f for f in found if isinstance(f, Comparison)]
    runs = [f for f in found if isinstance(f, Run)]
    return write(path, comparisons, [c.statistics() for c in comparisons], runs=runs)
