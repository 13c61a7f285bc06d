"""The flags of ``scoremode noise``, and what it prints."""

from __future__ import annotations

import argparse

from scoremode.cli import options
from scoremode.errors import OptionError

EPILOG = "The first value of each --vary makes the reference. Nothing is read from the cache."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_question(parser)
    options.add_engine(parser)
    options.add_replicas(parser)
    compare = parser.add_argument_group("compare")
    compare.add_argument(
        "--vary",
        action="append",
        metavar="FLAG=A,B,…",
        help="score under each value: dtype=float32,bfloat16, tensor-parallel-size=1,2, engine=A,B, …",
    )
    compare.add_argument("--repeat", type=int, default=2, metavar="N", help="passes over each setting (default: 2)")
    options.add_json(parser)


def run(parsed: argparse.Namespace) -> None:
    from scoremode.cli.progress import progress_bar
    from scoremode.report.terminal.noise import noise_table
    from scoremode.verbs.noise import noise, parse_vary

    vary = {}
    for name, values in map(parse_vary, parsed.vary or ()):
        if name in vary:
            flag = name.replace("_", "-")
            raise OptionError(f"--vary {flag} is given twice", fix=f"put all its values in one --vary {flag}=A,B")
        vary[name] = values
    with progress_bar("scoring") as progress:
        found = noise(
            parsed.model,
            vary=vary,
            repeat=parsed.repeat,
            engine=parsed.engine,
            tokenizer=parsed.tokenizer,
            progress=progress,
            **options.question(parsed),
            **options.engine_options(parsed),
        )
    if parsed.json:
        options.print_json(found.as_json())
    else:
        options.print_parts(noise_table(found))
