"""``scoremode attribute``: which layers and matrices of a candidate do the damage."""

from __future__ import annotations

import argparse

from scoremode.cli import flags
from scoremode.cli.comparing_verbs import checked_report, write_report
from scoremode.cli.output import progress_bar, show
from scoremode.cli.parser import Verb

BUDGET: flags.Flags = {
    "--bits-budget B": "choose a mixture of the candidates: mean bits per weight, embedding and head included",
    "--kl-budget K": "the same with the fewest bits for a KL",
}


class AttributeVerb(Verb):
    summary = "which layers and matrices of a candidate do the damage"
    examples = (
        "scoremode attribute org/model org/model-W4A16 --corpus wikitext2 --report layers.html",
        "scoremode attribute org/model model-Q4_K_M.gguf --by matrix --bits-budget 5 --write-recipe recipe",
    )
    everyday = (
        *(*flags.EVERYDAY_TEXT, "--context-length", "--by", "--bits-budget", "--write-recipe"),
        *(*flags.EVERYDAY_ENGINE, "--out", "--fresh", "--report", "--json"),
    )
    epilog = (
        "The baseline is computed by Transformers. --engine serves the candidate as well: then the account says how "
        "much of its damage is not in the weights."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        versions = "versions of it: checkpoints, GGUF files, adapters, or rtn:BITS:GROUP (it is rounded to nearest)"
        flags.add(
            parser, {"baseline BASELINE": "a checkpoint that is not quantized", "candidates CANDIDATE …": versions}
        )
        group = parser.add_argument_group("attribution")
        flags.add(group, {"--by UNIT": "layer (default), kind (of matrix, in all layers) or matrix"})
        kept = {
            "--out DIR": "keep every finished unit there; an interrupted one resumes",
            "--fresh": "measure again, and replace what is there",
            **flags.REPORT,
        }
        flags.add(group, BUDGET, type=flags.amount)
        flags.add(group, {"--write-recipe PREFIX": "write it for llm-compressor, llama-quantize and ExLlamaV3", **kept})
        flags.add_question(parser)
        flags.add_engine(parser)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.report.terminal.attribution_tables import attribution_tables
        from scoremode.verbs.attribute import attribute

        output = checked_report(parsed)
        with progress_bar("swapping") as progress:
            found = attribute(
                parsed.baseline,
                *parsed.candidates,
                by=parsed.by or "layer",
                bits_budget=parsed.bits_budget,
                kl_budget=parsed.kl_budget,
                write_recipe=parsed.write_recipe,
                out=parsed.out,
                fresh=parsed.fresh,
                progress=progress,
                **flags.question(parsed),
                **flags.model_arguments(parsed),
            )
        facts = found.as_json()
        show(parsed, lambda: facts, lambda: attribution_tables(facts))
        if output:
            from scoremode.report.html.attribution_page import render_attribution

            write_report(parsed, output, render_attribution(found))
