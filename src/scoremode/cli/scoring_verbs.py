"""The verbs that score a text with one model: ppl, plan, reference and noise. Their flags, and what they print."""

from __future__ import annotations

import argparse

from scoremode.cli import flags
from scoremode.cli.output import progress_bar, show
from scoremode.errors import OptionError

PPL_EPILOG = "Without --out the run is kept in the cache folder; asking the same again reads it back."
REFERENCE_EPILOG = (
    "A reference holds the exact distributions of every target: scoremode compare DIR CANDIDATE needs nothing else. "
    "A .kld file holds them in 16 bits, for llama-perplexity --kl-divergence."
)
NOISE_EPILOG = "The first value of each --vary makes the reference. Nothing is read from the cache."


def add_ppl(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, flags.MODEL)
    flags.add_question(parser, several=True)
    flags.add_engine(parser)
    keep = parser.add_argument_group("run")
    keep.add_argument(
        "--out",
        metavar="DIR",
        help="keep the run there; an interrupted one resumes (of several questions, each has a folder in DIR)",
    )
    keep.add_argument("--fresh", action="store_true", help="score again even if a run is there, and replace it")
    flags.add(keep, flags.WORST)
    flags.add(parser, flags.JSON)


def run_ppl(parsed: argparse.Namespace) -> None:
    from scoremode.report.terminal.run_tables import questions_table, run_table
    from scoremode.verbs.session import ppl_many

    questions = flags.questions(parsed)
    with progress_bar("scoring") as progress:
        found = ppl_many(
            parsed.model,
            questions,
            engine=parsed.engine,
            tokenizer=parsed.tokenizer,
            options=flags.engine_options(parsed),
            out=parsed.out,
            fresh=parsed.fresh,
            progress=progress,
        )
    first = found[0]
    if len(found) > 1:
        show(parsed, lambda: [run.summary() for run in found], lambda: questions_table(found))
        return
    again = ["", f"read from {first.path}, where it was scored before; --fresh scores it again"]
    show(parsed, first.summary, lambda: run_table(first, parsed.worst) + (again if first.cached else []))


def add_plan(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, flags.MODEL)
    flags.add_question(parser, several=True)
    flags.add_engine(parser, replicas=False)
    flags.add(parser, flags.JSON)


def run_plan(parsed: argparse.Namespace) -> None:
    from scoremode.report.terminal.run_tables import plan_table
    from scoremode.verbs.plan import plan

    given = flags.model_arguments(parsed)
    made = [plan(parsed.model, **question, **given) for question in flags.questions(parsed)]
    parts = [part for one in made for part in ("", *plan_table(one))]
    show(parsed, lambda: made[0] if len(made) == 1 else made, lambda: parts[1:])


def add_reference(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, flags.MODEL)
    flags.add_question(parser)
    flags.add_engine(parser)
    keep = parser.add_argument_group("reference")
    keep.add_argument("--out", metavar="DIR", help="keep it there; an interrupted one resumes")
    keep.add_argument("--kld", metavar="FILE", help="write a file for llama.cpp's tool, by the method llamacpp")
    keep.add_argument("--fresh", action="store_true", help="make it again even if one is there, and replace it")
    flags.add(parser, flags.JSON)


def run_reference(parsed: argparse.Namespace) -> None:
    from scoremode.report.terminal.run_tables import run_table
    from scoremode.verbs.reference import reference

    if parsed.out is None and parsed.kld is None:
        raise OptionError("the reference has no place to go", fix="give --out DIR, --kld FILE, or both")
    with progress_bar("scoring") as progress:
        result = reference(
            parsed.model,
            parsed.out,
            kld=parsed.kld,
            fresh=parsed.fresh,
            progress=progress,
            **flags.question(parsed),
            **flags.model_arguments(parsed),
        )
    kept = [f"kept in {parsed.out}; scoremode compare {parsed.out} CANDIDATE"] if parsed.out else []
    if parsed.kld:
        kept.append(f"written to {parsed.kld}; scoremode compare {parsed.kld} CANDIDATE, or")
        kept.append(f"llama-perplexity --kl-divergence-base {parsed.kld} --kl-divergence -m CANDIDATE.gguf")
    facts = {**result.summary(), "reference": parsed.out, "kld": parsed.kld}
    show(parsed, lambda: facts, lambda: [*run_table(result, 0), "", *kept])


def add_noise(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, flags.MODEL)
    flags.add_question(parser)
    flags.add_engine(parser)
    compare = parser.add_argument_group("compare")
    compare.add_argument(
        "--vary",
        action="append",
        metavar="FLAG=A,B,…",
        help="score under each value: dtype=float32,bfloat16, tensor-parallel-size=1,2, engine=A,B, …",
    )
    compare.add_argument("--repeat", type=int, default=2, metavar="N", help="passes over each setting (default: 2)")
    flags.add(parser, flags.JSON)


def run_noise(parsed: argparse.Namespace) -> None:
    from scoremode.report.terminal.run_tables import noise_table
    from scoremode.verbs.noise import noise, parse_vary

    vary = {}
    for name, values in map(parse_vary, parsed.vary or ()):
        if name in vary:
            flag = name.replace("_", "-")
            raise OptionError(f"--vary {flag} is given twice", fix=f"put all its values in one --vary {flag}=A,B")
        vary[name] = values
    question, given = flags.question(parsed), flags.model_arguments(parsed)
    with progress_bar("scoring") as progress:
        found = noise(parsed.model, vary=vary, repeat=parsed.repeat, progress=progress, **question, **given)
    show(parsed, found.as_json, lambda: noise_table(found))
