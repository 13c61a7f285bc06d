"""The report as one HTML page: no network access, nothing to install, all text escaped.

Python writes the text and draws the charts (charts.py); one script (assets/report.js) shows the scored text. Its
numbers are stored as base64 of typed arrays: a hundred thousand tokens take a few megabytes, and the browser keeps
elements for only one page of them at a time.

Texts, names and paths come from untrusted files. They are written to HTML through ``escaped`` and to the script's data
through ``_script_json``; the script writes them with textContent only. The page's content security policy allows this
one script, by its hash, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from scoremode import __version__
from scoremode.report.html.charts import escaped
from scoremode.report.html.figures import charts_section
from scoremode.report.html.headline import headline
from scoremode.report.html.numbers import Statistics
from scoremode.report.html.provenance import provenance_section
from scoremode.report.html.quality import quality_section
from scoremode.report.html.runs import same_run
from scoremode.report.html.tables import summary_section
from scoremode.report.html.text import TEXT_TARGETS, page_data, text_section
from scoremode.statistics.comparison import Comparison
from scoremode.store.outputs import check_report
from scoremode.store.run import Run


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
    style, script = asset("report.css"), asset("report.js")
    assert not any(end in script for end in ("</", "<!--")), "the script would end itself"
    data = _script_json(page_data(comparisons, alone, text_targets))
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
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="generator" content="scoremode {escaped(__version__)}">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy(script))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<title>{escaped(title)}</title>\n<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>\n'
        f"{_header(title, lead, sized=bool(quality))}<main>{body}</main>\n{_footer()}"
        f'<script type="application/json" id="scoremode-data">{data}</script>\n<script>{script}</script>\n'
        "</body>\n</html>\n"
    )


def write(
    path: str | Path,
    comparisons: Sequence[Comparison],
    statistics: Sequence[Statistics],
    *,
    runs: Sequence[Run] = (),
    text_targets: int = TEXT_TARGETS,
    flag: str = "-o",
) -> Path:
    """Write the page to a file, all of it or nothing. An older report is replaced; any other file is refused.

    ``flag`` is the option that named the file, for error messages.
    """
    output = check_report(path, flag)
    output.write(render(comparisons, statistics, runs=runs, text_targets=text_targets).encode())
    return Path(path)


def report(path: str | Path, *found: Comparison | Run) -> Path:
    """Comparisons, or runs, as one HTML page.

    >>> import scoremode as sm
    >>> sm.report("report.html", *sm.compare("ref/", "candidate"))     # doctest: +SKIP
    """
    comparisons = [f for f in found if isinstance(f, Comparison)]
    runs = [f for f in found if isinstance(f, Run)]
    return write(path, comparisons, [c.statistics() for c in comparisons], runs=runs)


def asset(name: str) -> str:
    """A file from the assets folder, with the line endings that a browser hashes."""
    return files("scoremode.report.html").joinpath("assets", name).read_text("utf-8").replace("\r\n", "\n")


def policy(script: str) -> str:
    """The content security policy: inline style, this one script, embedded images. Nothing from elsewhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _script_json(value: Any) -> str:
    """JSON that cannot end its script element or become markup: ASCII, without <, > and &."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# ── headline ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _header(title: str, lead: str, *, sized: bool) -> str:
    links = "".join(
        f'<a href="#{name}">{label}</a>'
        for name, label in (
            ("summary", "Summary"),
            *((("quality", "Size"),) if sized else ()),
            ("charts", "Charts"),
            ("text", "Text"),
            ("provenance", "Provenance"),
        )
    )
    themes = "".join(
        f'<button type="button" data-theme-choice="{name}" aria-pressed="{pressed}">{label}</button>'
        for name, label, pressed in (("auto", "Auto", "true"), ("light", "Light", "false"), ("dark", "Dark", "false"))
    )
    return (
        '<a class="skip" href="#text">Skip to the text</a>\n<header><div class="bar">'
        f'<nav aria-label="Sections"><span class="mark-name">scoremode</span>{links}</nav>'
        f'<div class="choice themes" role="group" aria-label="Colours">{themes}</div></div>'
        f'<h1>{escaped(title)}</h1><p class="lead">{lead}</p></header>\n'
    )


def _footer() -> str:
    said = f"Written by scoremode {__version__}. This page loads nothing from the network."
    return f"<footer><p>{escaped(said)}</p></footer>\n"
