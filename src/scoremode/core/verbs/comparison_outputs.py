"""Files that every comparison leaves besides its runs, on the command line and in Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from scoremode.core import extensions

if TYPE_CHECKING:
    from scoremode.core.disk.uri import RemotePath
    from scoremode.core.statistics.comparison import Comparison


class ComparisonOutput(Protocol):
    """Files of one kind: wings offer such values as "comparison-output"."""

    name: str  # of the argument of ``compare`` that names one more place for them
    flags: Mapping[str, str]

    def check(self, place: str | Path | None) -> None:
        """Refuses a place that cannot be written, before anything is scored."""

    def write(self, found: Sequence[Comparison], out: Path | RemotePath | None, place: str | Path | None) -> None:
        """Writes the files into the runs below ``out``, and to the place that was named; None: there is none."""


Outputs = list[tuple[ComparisonOutput, Any]]


class OutputArguments(TypedDict, total=False):
    """Places of such files, named here for editors and type checkers alone."""

    records: str | Path | None  # a folder for the record of each candidate


def comparison_outputs() -> list[ComparisonOutput]:
    return extensions.offered("comparison-output")


def split_outputs(arguments: Mapping[str, Any]) -> tuple[Outputs, dict[str, Any]]:
    """Splits arguments into the files that are left, with their places, which are checked, and all others."""
    rest = dict(arguments)
    places = [(output, rest.pop(output.name, None)) for output in comparison_outputs()]
    for output, place in places:
        output.check(place)
    return places, rest


def leave(outputs: Outputs, found: Sequence[Comparison], out: Path | RemotePath | None) -> None:
    for output, place in outputs if found else ():
        output.write(found, out, place)
