"""What a comparison shows beside its main table. To show another kind of result, add a ``ResultPart`` to the list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.equivalence import Equivalence
from scoremode.reports.served import are_variants
from scoremode.reports.terminal.part_tables import depth_json, depth_table, slices_json, slices_table
from scoremode.studies.rollouts.candidates_on_texts import OwnWords
from scoremode.studies.rollouts.tables import equivalence_lines, own_words_tables


@dataclass(frozen=True, slots=True)
class ResultPart:
    """One kind of result: a field of each candidate in the JSON, and lines below the table."""

    field: str
    facts: Callable[[], Sequence[Any]]  # for each candidate; an empty one is left out
    lines: Callable[[], Sequence[Any]]


def comparison_parts(
    found: Sequence[Comparison], *, by_depth: bool, words: Sequence[OwnWords], tested: Sequence[Equivalence]
) -> list[ResultPart]:
    """The parts that these comparisons have, in the order in which they are shown."""
    parts = {
        ResultPart("by_depth", lambda: depth_json(found), lambda: depth_table(found)): by_depth or are_variants(found),
        ResultPart("by_slice", lambda: slices_json(found), lambda: slices_table(found)): True,
        ResultPart("own_words", lambda: [one.as_json() for one in words], lambda: own_words_tables(words)): words,
        ResultPart("equivalence", lambda: [one.as_json() for one in tested], lambda: equivalence_lines(tested)): tested,
    }
    return [part for part, has_it in parts.items() if has_it]
