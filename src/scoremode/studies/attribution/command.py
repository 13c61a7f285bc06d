"""``scoremode attribute``: which layers and matrices of a candidate do the damage."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from scoremode.errors import OptionError, ScoremodeError
from scoremode.reports.command import flags, signals
from scoremode.reports.command.output import checked_report, progress_bar, show, write_report
from scoremode.reports.command.verb import Verb

if TYPE_CHECKING:
    from scoremode.core.verbs.progress import Progress
    from scoremode.studies.attribution.depth_profile import DepthProfile

OTHERWISE = ("served", "routes")  # what --by may be beside units of weights
MADE = "rtn:"  # nothing serves these

BY = "layer (default), kind of matrix, matrix; served: states between layers; routes: of experts"
BUDGET: flags.Flags = {
    "--bits-budget B": "choose a mixture: mean bits per weight",
    "--kl-budget K": "choose a mixture: the fewest bits for a KL",
}


class AttributeVerb(Verb):
    summary = "which layers and matrices of a candidate do the damage"
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
        kept = {
            "--out DIR": "keep finished units there, not in the cache",
            "--fresh": "measure again, and replace what is there",
            **flags.REPORT,
        }
        flags.add(group, BUDGET, type=flags.amount)
        flags.add(group, {"--write-recipe PREFIX": "write the mixture for other tools", **kept})
        flags.add_question(parser)
        flags.add_engine(parser)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        output = checked_report(parsed)
        if parsed.by in OTHERWISE:
            _require_alone(parsed)
            signals.nothing_is_kept("run it again")
            (self._served if parsed.by == "served" else self._routes)(parsed, output)
            return
        from scoremode.studies.attribution.attribute import attribute
        from scoremode.studies.attribution.tables import attribution_blocks, depth_profile_blocks

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
            profiles, notes = _profiles(parsed, progress) if parsed.engine else ([], [])
        facts = found.as_json()
        facts["notes"] += notes
        facts["profiles"] = [profile.as_json() for profile in profiles]
        tables = [part for profile in profiles for part in ("", *depth_profile_blocks(profile))]
        show(parsed, lambda: facts, lambda: [*attribution_blocks(facts), *tables])
        if output:
            from scoremode.studies.attribution.page import render_attribution

            write_report(parsed, output, render_attribution(found, profiles, notes))

    def _served(self, parsed: argparse.Namespace, output: Any) -> None:
        from scoremode.studies.attribution.tables import depth_profile_blocks

        with progress_bar("comparing layers") as progress:
            found = _profile(parsed, parsed.candidates[0], progress)
        show(parsed, found.as_json, lambda: depth_profile_blocks(found))
        if output:
            from scoremode.studies.attribution.page import render_profile

            write_report(parsed, output, render_profile(found))

    def _routes(self, parsed: argparse.Namespace, output: Any) -> None:
        from scoremode.studies.attribution.routing import routing
        from scoremode.studies.attribution.tables import routing_blocks

        if output:
            raise OptionError("--by routes has no page", fix="leave --report out, or give --json")
        arguments = {**flags.question(parsed), **flags.model_arguments(parsed)}
        with progress_bar("scoring") as progress:
            found = routing(parsed.baseline, parsed.candidates[0], progress=progress, **arguments)
        show(parsed, found.as_json, lambda: routing_blocks(found))


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


def _profile(parsed: argparse.Namespace, candidate: str, progress: Progress | None) -> DepthProfile:
    from scoremode.studies.attribution.layer_profile import layer_profile

    arguments = {**flags.question(parsed), **flags.model_arguments(parsed)}
    return layer_profile(parsed.baseline, candidate, progress=progress, **arguments)


def _profiles(parsed: argparse.Namespace, progress: Progress | None) -> tuple[list[DepthProfile], list[str]]:
    """The profiles of candidates that the engine serves, and why there is none of some."""
    found, notes = [], []
    for candidate in parsed.candidates:
        if candidate.startswith(MADE):
            continue
        try:
            found.append(_profile(parsed, candidate, progress))
        except ScoremodeError as error:  # the engine may not give its states; the rest is measured
            notes.append(f"no profile by layer of {candidate}: {error.message}")
    return found, notes
