"""The flags of ``scoremode compare``, and what it prints."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from scoremode.cli import comparisons, options

EPILOG = (
    "A BASELINE may also be a reference or a .kld file of llama.cpp; both may be runs kept with --out. "
    "Exit code 1: a --fail-if rule holds."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("baseline", metavar="BASELINE", help="a model, a reference, a .kld file, or a run")
    parser.add_argument("candidates", metavar="CANDIDATE", nargs="+", help="models, or runs of the same plan")
    options.add_question(parser)
    options.add_engine(parser)
    options.add_replicas(parser)
    comparisons.add_baseline(parser)
    keep = parser.add_argument_group("comparison")
    keep.add_argument("--out", metavar="DIR", help="keep the runs there; an interrupted comparison resumes")
    keep.add_argument("--fresh", action="store_true", help="score again even if runs are there, and replace them")
    keep.add_argument(
        "--fail-if", action="append", metavar="RULE", help='as in "kl_mean > 0.02" or "same_top < 0.9 surely"'
    )
    keep.add_argument("--report", metavar="FILE", help="write the HTML report there")
    shown = parser.add_mutually_exclusive_group()
    comparisons.add_cards(shown)
    shown.add_argument("--llamacpp", action="store_true", help="print what llama.cpp's tool prints, by its formulas")
    shown.add_argument("--json", action="store_true", help="print the facts for machines, and nothing else")


def run(parsed: argparse.Namespace) -> int:
    from scoremode.cli.progress import progress_bar
    from scoremode.statistics import gate
    from scoremode.statistics.comparison import comparison_statistics
    from scoremode.verbs.compare import compare
    from scoremode.verbs.outputs import check_report

    rules = [gate.parse(text) for text in parsed.fail_if or ()]  # before an hour of scoring
    output = check_report(parsed.report, "--report", made_later=parsed.out) if parsed.report is not None else None
    with progress_bar("scoring") as progress:
        found = compare(
            parsed.baseline,
            *parsed.candidates,
            engine=parsed.engine,
            tokenizer=parsed.tokenizer,
            baseline_engine=parsed.baseline_engine,
            baseline_options=comparisons.baseline_options(parsed),
            out=parsed.out,
            fresh=parsed.fresh,
            progress=progress,
            **options.question(parsed),
            **options.engine_options(parsed),
        )
    found = [replace(c, manifest={**c.manifest, "command": comparisons.command_line()}) for c in found]
    statistics = [comparison_statistics(c) for c in found]
    _print(parsed, found, statistics)
    if output:
        from scoremode.report.html.page import write

        write(parsed.report, found, statistics, flag="--report")
        output.announce(f"\nreport written to {output}", quiet=comparisons.is_for_machines(parsed))
    failures = [why for rule in rules for one in statistics if (why := gate.check(rule, one))]
    return comparisons.verdict(failures)


def _print(parsed: argparse.Namespace, found: list[Any], statistics: list[dict[str, Any]]) -> None:
    from scoremode.report.modelcard import markdown, model_index
    from scoremode.report.terminal.compare import comparison_json, comparison_table, llamacpp_layout

    if parsed.json:
        options.print_json(comparison_json(found, statistics))
    elif parsed.markdown:
        print(markdown(found, statistics))
    elif parsed.llamacpp:
        print(llamacpp_layout(found))
    elif parsed.model_index:
        print("\n".join(model_index(c, s) for c, s in zip(found, statistics, strict=True)))
    else:
        options.print_parts(comparison_table(found, statistics))
