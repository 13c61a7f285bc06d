"""What comparisons show beside their numbers: computed once, and shown in the terminal, in JSON and on the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scoremode.core.disk.folders import MANIFEST
from scoremode.core.extensions import ComparisonPart, Format, FormatOffer, PartOffer, ResultPart, offered
from scoremode.core.verbs.shared_flags import name_of

if TYPE_CHECKING:
    import argparse

    from scoremode.core.statistics.comparison import Comparison
    from scoremode.core.statistics.equivalence import Equivalence
    from scoremode.core.statistics.parts import PairedPart


def parts_meant(parsed: argparse.Namespace) -> list[ComparisonPart]:
    """The parts of wings that a ``compare`` command is about: by its text, its baseline or a flag."""
    names = tuple(map(str, (parsed.baseline, *(parsed.corpus or ()))))
    return [
        part.load()
        for part in offered(PartOffer)
        if any(name.startswith(part.prefix) for name in names)
        or any(getattr(parsed, name_of(flag)) is not None for flag in part.flags)
    ]


def format_shown(names: Sequence[str]) -> Format | None:
    """What shows these files; None: they are runs."""
    formats = (kind for kind in offered(FormatOffer) if kind.report and any(_may_be(name, kind) for name in names))
    return next((files for kind in formats if (files := kind.load()).claims(names)), None)


def _may_be(name: str, kind: FormatOffer) -> bool:
    path = Path(name)
    return name.lower().endswith(kind.suffix) or (path.is_dir() and not (path / MANIFEST).exists())


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
