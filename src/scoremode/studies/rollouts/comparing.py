"""What a comparison on rollouts shows beside its numbers: see readings.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scoremode.errors import OptionError
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


DRAFTS = {"--drafts": "with rollouts: also what the candidates would save as draft models"}
PART = OfferedPart(DRAFTS, asked, ("rollouts", "drafts"), readings_part)
