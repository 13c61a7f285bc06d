"""The flags of ``scoremode ppl``, and what it prints."""

from __future__ import annotations

import argparse

from scoremode.cli import options

EPILOG = "Without --out the run is kept in the cache folder; asking the same again reads it back."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_question(parser, several=True)
    options.add_engine(parser)
    options.add_replicas(parser)
    keep = parser.add_argument_group("run")
    keep.add_argument(
        "--out",
        metavar="DIR",
        help="keep the run there; an interrupted one resumes (of several questions, each has a folder in DIR)",
    )
    keep.add_argument("--fresh", action="store_true", help="score again even if a run is there, and replace it")
    keep.add_argument(
        "--worst", type=options.count, default=8, metavar="N", help="worst-predicted tokens to show (default: 8)"
    )
    options.add_json(parser)


def run(parsed: argparse.Namespace) -> None:
    from scoremode.cli.progress import progress_bar
    from scoremode.report.terminal.run import questions_table, run_table
    from scoremode.verbs.session import ppl_many

    questions = options.questions(parsed)
    with progress_bar("scoring") as progress:
        found = ppl_many(
            parsed.model,
            questions,
            engine=parsed.engine,
            tokenizer=parsed.tokenizer,
            options=options.engine_options(parsed),
            out=parsed.out,
            fresh=parsed.fresh,
            progress=progress,
        )
    if parsed.json:
        summaries = [result.summary() for result in found]
        options.print_json(summaries[0] if len(found) == 1 else summaries)
        return
    if len(found) > 1:
        options.print_parts(questions_table(found))
        return
    (result,) = found
    parts = run_table(result, parsed.worst)
    if result.cached:
        parts += ["", f"read from {result.path}, where it was scored before; --fresh scores it again"]
    options.print_parts(parts)
