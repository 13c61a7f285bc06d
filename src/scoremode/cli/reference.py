"""The flags of ``scoremode reference``, and what it prints."""

from __future__ import annotations

import argparse

from scoremode.cli import options

EPILOG = (
    "A reference holds the exact distributions of every target: scoremode compare DIR CANDIDATE needs nothing else. "
    "A .kld file holds them in 16 bits, for llama-perplexity --kl-divergence."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_question(parser)
    options.add_engine(parser)
    options.add_replicas(parser)
    keep = parser.add_argument_group("reference")
    keep.add_argument("--out", metavar="DIR", help="keep it there; an interrupted one resumes")
    keep.add_argument("--kld", metavar="FILE", help="write a file for llama.cpp's tool, by the method llamacpp")
    keep.add_argument("--fresh", action="store_true", help="make it again even if one is there, and replace it")
    options.add_json(parser)


def run(parsed: argparse.Namespace) -> None:
    from scoremode.cli.progress import progress_bar
    from scoremode.errors import OptionError
    from scoremode.report.terminal.run import run_table
    from scoremode.verbs.reference import reference

    if parsed.out is None and parsed.kld is None:
        raise OptionError("the reference has no place to go", fix="give --out DIR, --kld FILE, or both")
    with progress_bar("scoring") as progress:
        result = reference(
            parsed.model,
            parsed.out,
            kld=parsed.kld,
            engine=parsed.engine,
            tokenizer=parsed.tokenizer,
            fresh=parsed.fresh,
            progress=progress,
            **options.question(parsed),
            **options.engine_options(parsed),
        )
    if parsed.json:
        options.print_json({**result.summary(), "reference": parsed.out, "kld": parsed.kld})
        return
    kept = [f"kept in {parsed.out}; scoremode compare {parsed.out} CANDIDATE"] if parsed.out else []
    if parsed.kld:
        kept.append(f"written to {parsed.kld}; scoremode compare {parsed.kld} CANDIDATE, or")
        kept.append(f"llama-perplexity --kl-divergence-base {parsed.kld} --kl-divergence -m CANDIDATE.gguf")
    options.print_parts([*run_table(result, 0), "", *kept])
