"""What comparisons show beside their numbers: computed once, and shown in the terminal, in JSON and on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from scoremode.core import extensions

if TYPE_CHECKING:
    import argparse

    from scoremode.core.statistics.comparison import Comparison
    from scoremode.core.statistics.equivalence import Equivalence
    from scoremode.core.statistics.parts import PairedPart
    from scoremode.core.verbs.shared_flags import Flags
    from scoremode.reports.table import Block


@dataclass(frozen=True, slots=True)
class ResultPart:
    """A field of each candidate in the JSON, blocks below the table, and a section of the page."""

    field: str
    facts: Callable[[], Sequence[Any]]  # for each candidate; an empty one is left out
    blocks: Callable[[], Sequence[Block]]
    title: str = ""  # of the section
    section: Callable[[], str] = str  # HTML; '' if it has none


@dataclass(frozen=True, slots=True)
class OfferedPart:
    """A part that only some comparisons have: a value of the kind "part" that a wing offers."""

    flags: Flags  # of ``scoremode compare``
    asked: Callable[[argparse.Namespace], Mapping[str, Any]]
    """What ``make`` needs, checked and read before anything is scored; nothing if these comparisons lack the part."""
    arguments: tuple[str, ...]  # of ``sm.report``, for ``make``
    make: Callable[..., ResultPart]  # of comparisons
    instead: Callable[[argparse.Namespace], int | None]
    """Answers a command whose baseline is of a kind of its own, and returns the exit code; None for all others."""


def offered_parts() -> list[OfferedPart]:
    return extensions.offered("part")


class ReportInput(Protocol):
    """Files, not runs, that ``scoremode report`` can show: wings offer such values as "report-input"."""

    about: str  # for the help: what they are

    def claims(self, names: Sequence[str]) -> bool:
        """Are these its files? InputError if only some of them are."""

    def show(self, parsed: argparse.Namespace) -> None:
        """Does what the verb was asked for."""

    def render(self, names: Sequence[str], page: str) -> str:
        """The HTML page; ``page`` is the file that it will be written to."""


def report_input(names: Sequence[str]) -> ReportInput | None:
    """What shows these files; None: they are runs."""
    return next((kind for kind in extensions.offered("report-input") if kind.claims(names)), None)


def comparison_parts(
    comparisons: Sequence[Comparison], *, by_depth: bool, beside: Sequence[ResultPart], tested: Sequence[Equivalence]
) -> list[ResultPart]:
    """The parts that these comparisons have, in the order in which they are shown; ``beside`` are those of wings."""
    from scoremode.reports.comparisons import depth_blocks, equivalence_blocks, slices_blocks
    from scoremode.reports.served import are_variants

    def json_of(means: Callable[[Comparison], Sequence[PairedPart]]) -> Callable[[], Sequence[Any]]:
        return lambda: [[part.as_json() for part in means(c)] for c in comparisons]

    facts = [test.as_json() for test in tested]
    depth = ResultPart("by_depth", json_of(lambda c: c.by_depth()), lambda: depth_blocks(comparisons))
    slices = ResultPart("by_slice", json_of(lambda c: c.by_slice()), lambda: slices_blocks(comparisons))
    equivalence = ResultPart("equivalence", lambda: facts, lambda: equivalence_blocks(tested))
    first = [depth] if by_depth or are_variants(comparisons) else []
    return [*first, slices, *beside, *([equivalence] if tested else [])]
