"""The verbs that compare: compare, tasks and report. Their flags, and what they print."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from typing import Any

from scoremode.cli import flags
from scoremode.cli.output import print_json, print_parts, progress_bar
from scoremode.errors import print_line

COMPARE_EPILOG = (
    "A BASELINE may also be a reference or a .kld file of llama.cpp; both may be runs kept with --out. "
    "Exit code 1: a --fail-if rule holds."
)
TASKS_EPILOG = "Tasks are those of lm-eval that ask for log-likelihoods. Exit code 1: a --fail-if rule holds."
RULE_HOLDS = 1


def add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("baseline", metavar="BASELINE", help="a model, a reference, a .kld file, or a run")
    parser.add_argument("candidates", metavar="CANDIDATE", nargs="+", help="models, or runs of the same plan")
    flags.add_question(parser)
    flags.add_engine(parser)
    flags.add_baseline(parser)
    keep = parser.add_argument_group("comparison")
    keep.add_argument("--out", metavar="DIR", help="keep the runs there; an interrupted comparison resumes")
    keep.add_argument("--fresh", action="store_true", help="score again even if runs are there, and replace them")
    keep.add_argument(
        "--fail-if", action="append", metavar="RULE", help='as in "kl_mean > 0.02" or "same_top < 0.9 surely"'
    )
    flags.add(keep, flags.REPORT)
    shown = parser.add_mutually_exclusive_group()
    flags.add(shown, flags.CARDS)
    shown.add_argument("--llamacpp", action="store_true", help="print what llama.cpp's tool prints, by its formulas")
    flags.add(shown, flags.JSON)


def run_compare(parsed: argparse.Namespace) -> int:
    from scoremode.statistics import gate
    from scoremode.statistics.comparison import comparison_statistics
    from scoremode.verbs.compare import compare

    rules = [gate.parse(text) for text in parsed.fail_if or ()]  # before an hour of scoring
    output = _checked_report(parsed)
    with progress_bar("scoring") as progress:
        found = compare(
            parsed.baseline,
            *parsed.candidates,
            out=parsed.out,
            fresh=parsed.fresh,
            progress=progress,
            **flags.question(parsed),
            **flags.model_arguments(parsed),
            **flags.baseline_arguments(parsed),
        )
    found = [replace(c, manifest={**c.manifest, "command": _command_line()}) for c in found]
    statistics = [comparison_statistics(c) for c in found]
    _print_comparisons(parsed, found, statistics)
    if output:
        from scoremode.report.html.page import render

        _write_report(parsed, output, render(found, statistics))
    return _verdict([gate.check(rule, one) for rule in rules for one in statistics])


def _print_comparisons(parsed: argparse.Namespace, found: list[Any], statistics: list[dict[str, Any]]) -> None:
    from scoremode.report.model_card import markdown, model_index
    from scoremode.report.terminal.comparison_tables import comparison_json, comparison_table, llamacpp_layout

    if parsed.json:
        print_json(comparison_json(found, statistics))
    elif parsed.markdown:
        print(markdown(found, statistics))
    elif parsed.llamacpp:
        print(llamacpp_layout(found))
    elif parsed.model_index:
        print("\n".join(model_index(c, s) for c, s in zip(found, statistics, strict=True)))
    else:
        print_parts(comparison_table(found, statistics))


def add_tasks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("baseline", metavar="BASELINE", help="a model")
    parser.add_argument("candidates", metavar="CANDIDATE", nargs="+", help="models")
    asked = parser.add_argument_group("tasks")
    asked.add_argument(
        "--tasks",
        metavar="NAMES",
        required=True,
        help="tasks, groups, tags, patterns or YAML files, as in arc_easy,piqa",
    )
    asked.add_argument("--task-data", metavar="DIR", help="local data: DIR/TASK_SPLIT.jsonl, one row per line")
    asked.add_argument(
        "--include-path", action="append", metavar="DIR", help="YAML files of your own tasks; their code is run"
    )
    asked.add_argument("--num-fewshot", type=flags.count, metavar="N", help="examples (default: what the task says)")
    asked.add_argument("--limit", type=flags.count, metavar="N", help="only the first N documents of each task")
    asked.add_argument("--metric", metavar="NAME", help="of recovery and flips (default: acc_norm, else acc)")
    asked.add_argument(
        "--apply-chat-template", action="store_true", help="write questions as the model's chat template"
    )
    flags.add_engine(parser)
    flags.add_baseline(parser)
    keep = parser.add_argument_group("comparison")
    keep.add_argument("--out", metavar="DIR", help="keep the answers there (default: in the cache)")
    keep.add_argument("--fresh", action="store_true", help="ask again, even if answers are kept")
    keep.add_argument(
        "--fail-if", action="append", metavar="RULE", help='as in "recovery < 0.99 surely" or "arc_easy.flips > 0.05"'
    )
    flags.add(keep, flags.REPORT)
    flags.add(parser.add_mutually_exclusive_group(), flags.CARDS, flags.JSON)


def run_tasks(parsed: argparse.Namespace) -> int:
    from scoremode.harness.tasks import tasks
    from scoremode.statistics import gate

    rules = [gate.parse_for_tasks(text) for text in parsed.fail_if or ()]  # before an hour of scoring
    output = _checked_report(parsed)
    with progress_bar("asking") as progress:
        found = tasks(
            parsed.baseline,
            *parsed.candidates,
            tasks=parsed.tasks,
            num_fewshot=parsed.num_fewshot,
            limit=parsed.limit,
            metric=parsed.metric,
            apply_chat_template=parsed.apply_chat_template,
            task_data=parsed.task_data,
            include_path=parsed.include_path or (),
            out=parsed.out,
            fresh=parsed.fresh,
            rows=[rule.task for rule in rules if rule.task is not None],
            progress=progress,
            **flags.model_arguments(parsed),
            **flags.baseline_arguments(parsed),
        )
    found = [replace(c, manifest={"command": _command_line()}) for c in found]
    _print_tasks(parsed, found)
    if output:
        from scoremode.report.html.tasks_page import render_tasks

        _write_report(parsed, output, render_tasks(found))
    failures = []
    for rule in rules:
        for c in found:
            row, named = (c.overall, c.name) if rule.task is None else (c.row(rule.task), f"{c.name}, {rule.task}")
            failures.append(gate.check(rule, {**row, "name": named}))
    return _verdict(failures)


def _print_tasks(parsed: argparse.Namespace, found: list[Any]) -> None:
    from scoremode.report.model_card import tasks_markdown, tasks_model_index
    from scoremode.report.terminal.comparison_tables import tasks_json, tasks_tables

    if parsed.json:
        print_json(tasks_json(found))
    elif parsed.markdown:
        print(tasks_markdown(found))
    elif parsed.model_index:
        print("\n".join(map(tasks_model_index, found)))
    else:
        print_parts(tasks_tables(found))


def _checked_report(parsed: argparse.Namespace) -> Any:
    """The file of ``--report``, checked before an hour of scoring; None if none was asked for."""
    from scoremode.store.outputs import check_report

    return None if parsed.report is None else check_report(parsed.report, "--report", made_later=parsed.out)


def _write_report(parsed: argparse.Namespace, output: Any, page: str) -> None:
    from scoremode.report.html.page import write

    write(parsed.report, page, "--report")
    for_machines = bool(parsed.json or parsed.markdown or parsed.model_index)
    output.announce(f"\nreport written to {output}", quiet=for_machines)


def _command_line() -> str:
    """What was typed, without secrets."""
    from scoremode.store.redaction import command_without_secrets

    return " ".join(["scoremode", *map(shlex.quote, command_without_secrets(sys.argv[1:]))])


def _verdict(checked: list[str | None]) -> int:
    """Print which rules hold; the exit code."""
    failures = [why for why in checked if why]
    for why in failures:
        print_line(f"scoremode: {why}")
    return RULE_HOLDS if failures else 0


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folders", metavar="RUN", nargs="+", help="folders written with --out; the first is the baseline"
    )
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the page, as in report.html")
    flags.add(parser, flags.JSON)


def run_report(parsed: argparse.Namespace) -> None:
    from scoremode.report.html.page import render, write
    from scoremode.statistics.comparison import comparison_statistics
    from scoremode.store.outputs import check_report
    from scoremode.store.runs import load
    from scoremode.verbs.compare import of_runs

    output = check_report(parsed.output)  # before columns are read
    first, *others = parsed.run_folders
    found = [of_runs(first, other) for other in others]
    page = render(found, [comparison_statistics(c) for c in found], runs=[] if found else [load(first)])
    write(parsed.output, page)
    if parsed.json:
        print_json({"report": parsed.output, "runs": len(parsed.run_folders)})
    output.announce(f"written to {output}", quiet=parsed.json)
