"""``scoremode attribute``: which layers and matrices of a candidate do the damage."""

from __future__ import annotations

import argparse
from typing import Any

from scoremode.console import flags, signals
from scoremode.console.flags import Verb
from scoremode.console.output import checked_report, progress_bar, show, write_report
from scoremode.errors import OptionError

OTHERWISE = ("served", "routes")  # what --by may be beside units of weights
MADE = "rtn:"  # nothing serves these

BY = "layer (default), kind of matrix, matrix; served: states between layers; routes: of experts"
BUDGET: flags.Flags = {
    "--bits-budget B": "choose a mixture: mean bits per weight",
    "--kl-budget K": "choose a mixture: the fewest bits for a KL",
}


class AttributeVerb(Verb):
    examples = (
        "scoremode attribute org/model model-W4A16 --corpus wikitext2 --report x.html",
        "scoremode attribute org/model rtn:3:32 rtn:5:32 --bits-budget 6 --corpus notes",
    )
    everyday = (
        *("--corpus", "--num-samples", "--by", "--bits-budget", "--write-recipe"),
        *(*flags.EVERYDAY_ENGINE, "--out", "--report", "--json"),
    )
    epilog = (
        "The baseline is computed by Transformers. --engine serves the candidate as well: then the account says how "
        "much of its damage is not in the weights."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        versions = "checkpoints or GGUF files of it, or rtn:BITS:GROUP (rounded to nearest)"
        flags.add(
            parser, {"baseline BASELINE": "a checkpoint that is not quantized", "candidates CANDIDATE …": versions}
        )
        group = parser.add_argument_group("attribution")
        flags.add(group, {"--by UNIT": BY})
        output_flags = {
            "--out DIR": "keep finished units there, not in the cache",
            "--fresh": "measure again, and replace what is there",
            **flags.REPORT,
        }
        flags.add(group, BUDGET, type=flags.amount)
        flags.add(group, {"--write-recipe PREFIX": "write the mixture for other tools", **output_flags})
        flags.add_question(parser)
        flags.add_engine(parser)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        output = checked_report(parsed)
        if parsed.by in OTHERWISE:
            _require_alone(parsed)
            signals.nothing_is_kept("run it again")
            self._unswapped(parsed, output)
            return
        from scoremode.studies.attribution.attribute import attribute
        from scoremode.studies.attribution.recipe import Budget, write_tools
        from scoremode.studies.attribution.tables import attribution_blocks

        Budget(parsed.bits_budget, parsed.kl_budget).check(parsed.write_recipe)
        with progress_bar("swapping") as progress:
            attribution = attribute(
                parsed.baseline,
                *parsed.candidates,
                by=parsed.by or "layer",
                bits_budget=parsed.bits_budget,
                kl_budget=parsed.kl_budget,
                out=parsed.out,
                fresh=parsed.fresh,
                progress=progress,
                **flags.question(parsed),
                **flags.model_arguments(parsed),
            )
        show(parsed, attribution.as_json, lambda: attribution_blocks(attribution))
        if parsed.write_recipe is not None and attribution.recipe is not None:  # the table is shown whatever happens
            write_tools(attribution.recipe, parsed.write_recipe)
        if output:
            from scoremode.studies.attribution.page import render_attribution

            write_report(parsed, output, render_attribution(attribution))

    def _unswapped(self, parsed: argparse.Namespace, output: Any) -> None:
        """Compares two whole models: their states between layers, or the routes of their experts."""
        from scoremode.studies.attribution.layer_profile import layer_profile
        from scoremode.studies.attribution.routing import routing
        from scoremode.studies.attribution.tables import depth_profile_blocks, routing_blocks

        with progress_bar("comparing layers") as progress:
            models = (parsed.baseline, parsed.candidates[0])
            arguments = {**flags.question(parsed), **flags.model_arguments(parsed), "progress": progress}
            if parsed.by == "served":
                profile = layer_profile(*models, **arguments)
                facts, blocks, lead = profile.as_json(), depth_profile_blocks(profile), profile.verdict
            else:
                routes = routing(*models, **arguments)
                facts, blocks, lead = routes.as_json(), routing_blocks(routes), "which tokens go to other experts"
        show(parsed, lambda: facts, lambda: blocks)
        if output:
            from scoremode.studies.attribution.page import render_blocks

            title = f"{facts['candidate']} against {facts['baseline']}"
            about = [parsed.by, *models, flags.question(parsed)]
            write_report(parsed, output, render_blocks(title, lead, blocks, about))


def _require_alone(parsed: argparse.Namespace) -> None:
    """Refuses what --by served and --by routes do not take."""
    if len(parsed.candidates) > 1:
        raise OptionError(f"--by {parsed.by} takes one candidate", fix="run it once for each")
    if parsed.candidates[0].startswith(MADE):
        raise OptionError(f"--by {parsed.by} needs a model, and {parsed.candidates[0]} is none", fix="give --by layer")
    for name in ("bits_budget", "kl_budget", "write_recipe", "out"):
        if getattr(parsed, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(f"{flag} does not fit --by {parsed.by}", fix=f"leave {flag} out, or give --by layer")
