"""The verbs that score a text with one model: ppl, plan, reference and noise. Their flags, and what they print."""

from __future__ import annotations

import argparse

from scoremode.cli import flags
from scoremode.cli.output import progress_bar, show
from scoremode.cli.parser import Verb
from scoremode.errors import OptionError


class PplVerb(Verb):
    summary = "perplexity of a text by a named method"
    epilog = "Without --out the run is kept in the cache folder; asking the same again reads it back."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add_model(parser, several=True)
        keep = parser.add_argument_group("run")
        several = "(of several questions, each has a folder in DIR)"
        flags.add(keep, {"--out DIR": f"keep the run there; an interrupted one resumes {several}"})
        flags.add(keep, {"--fresh": "score again even if a run is there, and replace it"})
        flags.add_worst(keep)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
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


class PlanVerb(Verb):
    summary = "a dry run, windows, targets, work and memory, with no weight loaded"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add_model(parser, several=True, replicas=False)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.report.terminal.run_tables import plan_table
        from scoremode.verbs.plan import plan

        given = flags.model_arguments(parsed)
        made = [plan(parsed.model, **question, **given) for question in flags.questions(parsed)]
        parts = [part for one in made for part in ("", *plan_table(one))]
        show(parsed, lambda: made[0] if len(made) == 1 else made, lambda: parts[1:])


class ReferenceVerb(Verb):
    summary = "score a text with a baseline and keep its hidden states for comparisons"
    epilog = (
        "A reference holds the exact distributions of every target: scoremode compare DIR CANDIDATE needs nothing "
        "else. A .kld file holds them in 16 bits, for llama-perplexity --kl-divergence."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add_model(parser)
        kept = {
            "--out DIR": "keep it there; an interrupted one resumes",
            "--kld FILE": "write a file for llama.cpp's tool, by the method llamacpp",
            "--fresh": "make it again even if one is there, and replace it",
        }
        flags.add(parser.add_argument_group("reference"), kept)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
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


class NoiseVerb(Verb):
    summary = "how far scores move when only the engine's settings do"
    epilog = "The first value of each --vary makes the reference. Nothing is read from the cache."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add_model(parser)
        compare = parser.add_argument_group("compare")
        values = "score under each value: dtype=float32,bfloat16, tensor-parallel-size=1,2, engine=A,B, …"
        flags.add(compare, {"--vary FLAG=A,B,… …": values})
        flags.add(compare, {"--repeat N": "passes over each setting (default: 2)"}, type=int, default=2)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
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
