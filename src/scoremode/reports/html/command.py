"""``scoremode report``: its flags, and what it prints."""

from __future__ import annotations

import argparse

from scoremode.reports.command import flags
from scoremode.reports.command.output import print_json
from scoremode.reports.command.verb import Verb
from scoremode.reports.parts import report_input


class ReportVerb(Verb):
    summary = "runs and comparisons as one HTML page"
    examples = (
        "scoremode report runs/base --output page.html",
        "scoremode report runs/base runs/q4 runs/q8 --output page.html",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add(parser, {"run_folders RUN …": "folders written with --out; the first is the baseline"})
        parser.add_argument("-o", "--output", metavar="FILE", help="the page, as in report.html")
        flags.add(parser, {**flags.COLUMNS, **flags.JSON})

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.core.statistics.comparison import comparison_statistics
        from scoremode.core.store.runs import load
        from scoremode.core.verbs.finished_runs import of_runs
        from scoremode.core.verbs.outputs import check_report
        from scoremode.reports.html.page import render, write
        from scoremode.reports.numbers import read_columns

        if (shown := report_input(parsed.run_folders)) is not None:
            shown.show(parsed)
            return
        output, more = check_report(parsed.output), read_columns(parsed.columns)  # before columns are read
        first, *others = parsed.run_folders
        found = of_runs(first, others)
        page = render(found, [comparison_statistics(c) for c in found], runs=[] if found else [load(first)], more=more)
        write(parsed.output, page)
        if parsed.json:
            print_json({"report": parsed.output, "runs": len(parsed.run_folders)})
        output.announce(f"written to {output}", quiet=parsed.json)
