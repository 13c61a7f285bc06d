"""``scoremode mismatch``: a trainer against rollouts, with a page and a gate."""

from __future__ import annotations

import argparse

from scoremode.reports.command import flags
from scoremode.reports.command.output import progress_bar, show
from scoremode.reports.command.results import checked_report, verdict, write_report
from scoremode.reports.command.verb import Verb


class MismatchVerb(Verb):
    summary = "a trainer against rollouts: estimates of KL, importance ratios"
    examples = (
        "scoremode mismatch written org/model --dtype bfloat16",
        "scoremode mismatch written org/model --clip-high 1.28 --report page.html",
    )
    everyday = ("--clip-low", "--clip-high", *flags.EVERYDAY_ENGINE, "--fail-if", "--report", "--json")
    epilog = "Exit code 1: a --fail-if rule holds."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add(parser, {"rollouts ROLLOUTS": "a folder that scoremode rollouts wrote"})
        flags.add(parser, {"trainer TRAINER": "a model that reads the texts by prefill, or a run that scored them"})
        group = parser.add_argument_group("mismatch")
        clip = {"--clip-low RATIO": "smallest ratio (default: 0.8)", "--clip-high RATIO": "largest (default: 1.2)"}
        flags.add(group, clip, type=flags.amount)
        flags.add(group, {"--fail-if RULE …": 'as in "k3 > 0.015 surely" or "outside_clip > 0.01"', **flags.REPORT})
        flags.add_engine(parser)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> int:
        from scoremode.core.statistics import gate
        from scoremode.core.store.runs import is_run, load
        from scoremode.studies.rollouts.mismatch import mismatch
        from scoremode.studies.rollouts.mismatch_statistics import CLIP, EXAMPLE, FIELDS
        from scoremode.studies.rollouts.tables import mismatch_tables

        for text in parsed.fail_if or ():
            gate.parse(text, FIELDS, EXAMPLE)  # refuses a wrong rule before an hour of scoring
        output = checked_report(parsed)
        low, high = (CLIP[i] if given is None else given for i, given in enumerate((parsed.clip_low, parsed.clip_high)))
        with progress_bar("scoring") as progress:
            found = mismatch(
                parsed.rollouts,
                load(parsed.trainer) if is_run(parsed.trainer) else parsed.trainer,
                clip=(low, high),
                progress=progress,
                **flags.model_arguments(parsed),
            )
        s, by_position, by_slice = found.statistics(), found.by_position(), found.by_slice()
        facts = {**s, "by_position": by_position, "by_slice": by_slice}
        show(parsed, lambda: facts, lambda: mismatch_tables(s, by_position, by_slice))
        if output:
            from scoremode.studies.rollouts.page import render_mismatch

            write_report(parsed, output, render_mismatch(found))
        return verdict(found.failures(*(parsed.fail_if or ())))
