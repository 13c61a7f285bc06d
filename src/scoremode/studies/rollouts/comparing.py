"""What rollouts add to ``scoremode compare``: readings beside its numbers, and rollouts as a trainer's baseline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scoremode.errors import InputError, OptionError
from scoremode.reports.command import flags
from scoremode.reports.command.output import checked_report, progress_bar, show, verdict, write_report
from scoremode.reports.parts import OfferedPart, ResultPart

if TYPE_CHECKING:
    from scoremode.core.statistics.comparison import Comparison
    from scoremode.studies.rollouts.texts import Rollouts


def asked(parsed: argparse.Namespace) -> dict[str, Any]:
    """The rollouts on which models are compared, read once for all; {} for other texts."""
    from scoremode.studies.rollouts.texts import PREFIX, Rollouts

    named = parsed.corpus or []
    if len(named) != 1 or not named[0].startswith(PREFIX):
        if parsed.drafts:
            raise OptionError("--drafts is about texts that a model wrote", fix="give --corpus rollouts:DIR")
        return {}
    rollouts = Rollouts.open(named[0].removeprefix(PREFIX))
    parsed.corpus = [rollouts]
    return {"rollouts": rollouts, "count": parsed.num_samples, "drafts": parsed.drafts}


def readings_part(
    found: Sequence[Comparison], rollouts: Rollouts | None = None, count: int | None = None, *, drafts: bool = False
) -> ResultPart:
    from scoremode.studies.rollouts.readings import readings

    if rollouts is None:
        raise OptionError("drafts are about texts that a model wrote", fix="give rollouts=, too")
    words = readings(found, rollouts, count, drafts=drafts)

    def blocks() -> list[Any]:
        from scoremode.studies.rollouts.tables import readings_blocks

        return readings_blocks(words)

    def section() -> str:
        from scoremode.studies.rollouts.page import readings_section

        return readings_section(words)

    return ResultPart("own_words", lambda: [one.as_json() for one in words], blocks, "Own words", section)


# ── a trainer against rollouts ───────────────────────────────────────────────────────────────────────────────────────
def compare_trainer(parsed: argparse.Namespace) -> int | None:
    """Answers ``compare rollouts:DIR TRAINER``; None for every other baseline."""
    from scoremode.studies.rollouts.texts import PREFIX

    if parsed.baseline.startswith(PREFIX):
        _require_trainer_alone(parsed)
        return _show_mismatch(parsed, parsed.baseline.removeprefix(PREFIX))
    if (parsed.clip_low, parsed.clip_high) != (None, None):
        raise OptionError("--clip-low and --clip-high are about rollouts", fix=f"give {PREFIX}DIR as the BASELINE")
    return None


def _show_mismatch(parsed: argparse.Namespace, folder: str) -> int:
    from scoremode.core.store.runs import is_run, load
    from scoremode.reports import gate
    from scoremode.studies.rollouts.mismatch import CLIP, EXAMPLE, FIELDS, mismatch
    from scoremode.studies.rollouts.tables import mismatch_blocks

    for text in parsed.fail_if or ():
        gate.parse(text, FIELDS, EXAMPLE)  # refuses a wrong rule before an hour of scoring
    output, (trainer,) = checked_report(parsed), parsed.candidates
    low, high = (CLIP[i] if given is None else given for i, given in enumerate((parsed.clip_low, parsed.clip_high)))
    with progress_bar("scoring") as progress:
        found = mismatch(
            folder,
            load(trainer) if is_run(trainer) else trainer,
            clip=(low, high),
            progress=progress,
            **flags.model_arguments(parsed),
        )
    s, by_position, by_slice = found.statistics(), found.by_position(), found.by_slice()
    facts = {**s, "by_position": by_position, "by_slice": by_slice}
    show(parsed, lambda: facts, lambda: mismatch_blocks(s, by_position, by_slice))
    if output:
        from scoremode.studies.rollouts.page import render_mismatch

        write_report(parsed, output, render_mismatch(found))
    return verdict(found.failures(*(parsed.fail_if or ())))


def _require_trainer_alone(parsed: argparse.Namespace) -> None:
    from scoremode.core.verbs.baselines import require_none
    from scoremode.reports.publish import layouts

    if len(parsed.candidates or ()) != 1:
        raise InputError(f"{parsed.baseline} is compared with one trainer", fix="name one model, or a run that read it")
    unused = (*flags.QUESTION, *NOT_OF_TRAINERS, *layouts())
    given = {name: getattr(parsed, name) for name in unused}
    require_none(given, f"{parsed.baseline} has its own text, and statistics of its own")


FLAGS = {
    "--drafts": "with rollouts: also what the candidates would save as draft models",
    "--clip-low RATIO": "with the baseline rollouts:DIR: smallest importance ratio (default: 0.8)",
    "--clip-high RATIO": "with the baseline rollouts:DIR: largest (default: 1.2)",
}
NOT_OF_TRAINERS = (
    *("baseline_engine", "baseline_dtype", "out", "fresh", "keep", "by_depth", "drafts", "columns", "no_worse_than"),
    *("markdown", "model_index"),
)
PART = OfferedPart(FLAGS, asked, ("rollouts", "drafts"), readings_part, compare_trainer)
