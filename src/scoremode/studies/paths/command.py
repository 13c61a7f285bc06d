"""``scoremode paths`` and ``scoremode noise``: their flags, and what they print."""

from __future__ import annotations

import argparse
from dataclasses import replace

from scoremode.reports.command import flags
from scoremode.reports.command.output import checked_report, command_line, progress_bar, show, write_report
from scoremode.reports.command.verb import Verb


class PathsVerb(Verb):
    summary = "a model decoded, or fed in other ways, against its prefill"
    examples = (
        "scoremode paths smollm2-135m --corpus python-docs --sequences 1,16",
        "scoremode paths model.gguf --vary decode,chunked --corpus wikitext2",
    )
    everyday = (
        *flags.EVERYDAY_TEXT,
        "--context-length",
        "--vary",
        "--sequences",
        "--chunk-tokens",
        *flags.EVERYDAY_ENGINE,
        "--out",
        "--report",
        "--json",
    )
    epilog = "The baseline is the prefill path. A few windows are computed again, to tell differences from noise."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add_model(parser, several_sequences=True)
        group = parser.add_argument_group("comparison")
        about = "decode (default), chunked, cache-hit; several with commas"
        flags.add(group, {"--vary WAYS": about}, type=lambda text: text.split(","))
        flags.add(group, {"--chunk-tokens N,…": "of chunked and cache-hit (default: 256)"})
        kept = {
            "--out DIR": "keep all runs there; an interrupted one resumes",
            "--fresh": "score again even if runs are there, and replace them",
            **flags.REPORT,
        }
        flags.add(group, kept)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.studies.paths.paths import paths

        output = checked_report(parsed)
        with progress_bar("scoring") as progress:
            made = paths(
                parsed.model,
                vary=parsed.vary or "decode",
                chunk_tokens=parsed.chunk_tokens,
                out=parsed.out,
                fresh=parsed.fresh,
                progress=progress,
                **flags.question(parsed),
                **flags.model_arguments(parsed),
            )
        from scoremode.reports.comparisons import comparison_json, summary

        found = [replace(c, manifest={**c.manifest, "command": command_line()}) for c in made]
        statistics = [c.statistics() for c in found]
        show(parsed, lambda: comparison_json(found, statistics), lambda: summary(found, statistics).blocks())
        if output:
            from scoremode.reports.html.page import render

            write_report(parsed, output, render(found, statistics))


class NoiseVerb(Verb):
    summary = "how far scores move when only the engine's settings do"
    examples = (
        "scoremode noise org/model --corpus wikitext2 --max-windows 20",
        "scoremode noise org/model --vary dtype=float32,bfloat16 --corpus wikitext2",
    )
    everyday = (
        *flags.EVERYDAY_TEXT,
        "--method",
        "--max-windows",
        *flags.EVERYDAY_ENGINE,
        "--vary",
        "--repeat",
        "--json",
    )
    epilog = "The first value of each --vary makes the reference. Nothing is read from the cache."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add_model(parser)
        compare = parser.add_argument_group("compare")
        values = "score under each value: dtype=float32,bfloat16, batch-tokens=512,2048, engine=A,B, …"
        flags.add(compare, {"--vary FLAG=A,B,… …": values})
        flags.add(compare, {"--repeat N": "passes over each setting (default: 2)"}, type=int, default=2)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.studies.paths.noise import noise, parse_vary
        from scoremode.studies.paths.tables import noise_blocks

        vary = parse_vary(parsed.vary or ())
        question, given = flags.question(parsed), flags.model_arguments(parsed)
        with progress_bar("scoring") as progress:
            found = noise(parsed.model, vary=vary, repeat=parsed.repeat, progress=progress, **question, **given)
        show(parsed, found.as_json, lambda: noise_blocks(found))
