"""``scoremode tasks``: its flags, and what it prints."""

from __future__ import annotations

import argparse
from dataclasses import replace

from scoremode.console import flags
from scoremode.console.flags import Verb
from scoremode.console.output import checked_report, command_line, show, verdict, write_report


class TasksVerb(Verb):
    examples = (
        "scoremode tasks logs/model logs/model-W4A16",
        "scoremode tasks logs/model logs/Q4_K_M --tasks mmlu --report tasks.html",
    )
    epilog = (
        "lm-eval runs the models, as in scoremode lm-eval --tasks arc_easy --model_args model=MODEL "
        "--output_path DIR --log_samples. Exit code 1: a --fail-if rule holds."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        folder = "lm-eval wrote with --output_path DIR --log_samples"
        flags.add(parser, {"baseline BASELINE": f"a folder that {folder}"})
        flags.add(parser, {"candidates CANDIDATE …": f"folders that {folder}"})
        comparison_flags = {
            "--tasks NAMES": "only these tasks and groups, as in arc_easy,piqa (default: all)",
            "--metric NAME": "of recovery and flips (default: acc_norm, else acc)",
            "--fail-if RULE …": 'as in "recovery < 0.99 surely" or "arc_easy.flips > 0.05"',
            **flags.REPORT,
        }
        flags.add(parser.add_argument_group("comparison"), comparison_flags)
        flags.add(parser.add_mutually_exclusive_group(), {**flags.CARDS, **flags.JSON})

    def instead(self, flag: str) -> str:
        from scoremode.studies.tasks.logs import RUN

        return RUN

    def run(self, parsed: argparse.Namespace) -> int:
        from scoremode.studies.tasks.results import parse
        from scoremode.studies.tasks.tasks import tasks

        rules = [parse(text) for text in parsed.fail_if or ()]
        output = checked_report(parsed)
        comparisons = tasks(parsed.baseline, *parsed.candidates, tasks=parsed.tasks, metric=parsed.metric)
        from scoremode.studies.tasks.tables import tasks_blocks, tasks_json, tasks_markdown, tasks_model_index

        comparisons = [replace(c, manifest={"command": command_line()}) for c in comparisons]
        if parsed.markdown:
            print(tasks_markdown(comparisons))
        elif parsed.model_index:
            print("\n".join(map(tasks_model_index, comparisons)))
        else:
            show(parsed, lambda: tasks_json(comparisons), lambda: tasks_blocks(comparisons))
        if output:
            from scoremode.studies.tasks.page import render_tasks

            write_report(parsed, output, render_tasks(comparisons))
        return verdict([rule.check(c) for rule in rules for c in comparisons])
