"""The flags of ``scoremode report``, and what it prints."""

from __future__ import annotations

import argparse

from scoremode.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folders", metavar="RUN", nargs="+", help="folders written with --out; the first is the baseline"
    )
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the page, as in report.html")
    options.add_json(parser)


def run(parsed: argparse.Namespace) -> None:
    from scoremode.report.html.page import write
    from scoremode.statistics.comparison import comparison_statistics
    from scoremode.store.runs import load
    from scoremode.verbs.compare import of_runs
    from scoremode.verbs.outputs import check_report

    output = check_report(parsed.output)  # before columns are read
    first, *others = parsed.run_folders
    found = [of_runs(first, other) for other in others]
    write(parsed.output, found, [comparison_statistics(c) for c in found], runs=[] if found else [load(first)])
    if parsed.json:
        options.print_json({"report": parsed.output, "runs": len(parsed.run_folders)})
    output.announce(f"written to {output}", quiet=parsed.json)
