"""scoremode plan: a dry run, windows, targets, work and memory, with no weight loaded"""

from __future__ import annotations

import argparse

from scoremode.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_question(parser)
    options.add_engine(parser)
    options.add_vllm(parser)
    options.add_json(parser)


def run(parsed: argparse.Namespace) -> None:
    from scoremode.report.terminal.plan import plan_table
    from scoremode.verbs.plan import plan

    made = plan(parsed.model, engine=parsed.engine, options=options.engine_options(parsed), **options.question(parsed))
    if parsed.json:
        options.print_json(made)
    else:
        options.print_parts(plan_table(made))
