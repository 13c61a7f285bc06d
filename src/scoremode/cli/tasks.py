"""The flags of ``scoremode tasks``, and what it prints."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from scoremode.cli import comparisons, options

EPILOG = "Tasks are those of lm-eval that ask for log-likelihoods. Exit code 1: a --fail-if rule holds."


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    asked.add_argument("--num-fewshot", type=options.count, metavar="N", help="examples (default: what the task says)")
    asked.add_argument("--limit", type=options.count, metavar="N", help="only the first N documents of each task")
    asked.add_argument("--metric", metavar="NAME", help="of recovery and flips (default: acc_norm, else acc)")
    asked.add_argument(
        "--apply-chat-template", action="store_true", help="write questions as the model's chat template"
    )
    options.add_engine(parser)
    options.add_replicas(parser)
    comparisons.add_baseline(parser)
    keep = parser.add_argument_group("comparison")
    keep.add_argument("--out", metavar="DIR", help="keep the answers there (default: in the cache)")
    keep.add_argument("--fresh", action="store_true", help="ask again, even if answers are kept")
    keep.add_argument(
        "--fail-if", action="append", metavar="RULE", help='as in "recovery < 0.99 surely" or "arc_easy.flips > 0.05"'
    )
    keep.add_argument("--report", metavar="FILE", help="write the HTML report there")
    shown = parser.add_mutually_exclusive_group()
    comparisons.add_cards(shown)
    shown.add_argument("--json", action="store_true", help="print the facts for machines, and nothing else")


def run(parsed: argparse.Namespace) -> int:
    from scoremode.cli.progress import progress_bar
    from scoremode.harness.tasks import tasks
    from scoremode.statistics import gate
    from scoremode.verbs.outputs import check_report

    rules = [gate.parse_for_tasks(text) for text in parsed.fail_if or ()]  # before an hour of scoring
    output = check_report(parsed.report, "--report", made_later=parsed.out) if parsed.report is not None else None
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
            engine=parsed.engine,
            tokenizer=parsed.tokenizer,
            baseline_engine=parsed.baseline_engine,
            baseline_options=comparisons.baseline_options(parsed),
            out=parsed.out,
            fresh=parsed.fresh,
            rows=[rule.task for rule in rules if rule.task is not None],
            progress=progress,
            **options.engine_options(parsed),
        )
    found = [replace(c, manifest={"command": comparisons.command_line()}) for c in found]
    _print(parsed, found)
    if output:
        from scoremode.report.html.tasks import write_tasks

        write_tasks(parsed.report, found, flag="--report")
        output.announce(f"\nreport written to {output}", quiet=comparisons.is_for_machines(parsed))
    failures = [why for rule in rules for c in found if (why := _check(rule, c))]
    return comparisons.verdict(failures)


def _check(rule: Any, comparison: Any) -> str | None:
    from scoremode.statistics import gate

    row = comparison.overall if rule.task is None else comparison.row(rule.task)
    named = comparison.name if rule.task is None else f"{comparison.name}, {rule.task}"
    return gate.check(rule, {**row, "name": named})


def _print(parsed: argparse.Namespace, found: list[Any]) -> None:
    from scoremode.report.taskcard import tasks_markdown, tasks_model_index
    from scoremode.report.terminal.tasks import tasks_json, tasks_tables

    if parsed.json:
        options.print_json(tasks_json(found))
    elif parsed.markdown:
        print(tasks_markdown(found))
    elif parsed.model_index:
        print("\n".join(map(tasks_model_index, found)))
    else:
        options.print_parts(tasks_tables(found))
