"""The flags of ``scoremode plan``, and what it prints."""

from __future__ import annotations

import argparse

from scoremode.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_question(parser, several=True)
    options.add_engine(parser)
    options.add_json(parser)


def run(parsed: argparse.Namespace) -> None:
    from scoremode.report.terminal.plan import plan_table
    from scoremode.verbs.plan import plan

    given = options.engine_options(parsed)
    made = [
        plan(parsed.model, engine=parsed.engine, tokenizer=parsed.tokenizer, **question, **given)
        for question in options.questions(parsed)
    ]
    if parsed.json:
        options.print_json(made[0] if len(made) == 1 else made)
        return
    for number, one in enumerate(made):
        options.print_parts(["" if number else None, *plan_table(one)][not number :])
