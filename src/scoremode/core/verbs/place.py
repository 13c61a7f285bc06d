"""Where the results of a verb go and who is told of its progress: one value, handed through every verb."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from scoremode.core.disk.uri import RemotePath, located, name_in
from scoremode.core.verbs.progress import Progress


@dataclass(frozen=True, slots=True)
class Place:
    """Where results go, whether they replace those that are there, and who is told how much is done."""

    out: Path | RemotePath | None = None  # None: the cache
    fresh: bool = False
    progress: Progress | None = None
    command: str = ""  # that asks for the same comparison; '' if there is none
    few_documents: bool = False  # as in a Comparison

    @staticmethod
    def at(out: str | Path | RemotePath | None, *, fresh: bool = False, progress: Progress | None = None) -> Place:
        """The place that a user named: a folder or a URI; None for the cache."""
        return Place(None if out is None else located(out), fresh, progress)

    def folder(self, name: str) -> Path | RemotePath | None:
        """The folder for the run of that name. Of a name that is a path, the last part is used."""
        return None if self.out is None else self.out / (name_in(name) or "candidate")

    def within(self, name: str) -> Place:
        """The place of one of several runs."""
        return replace(self, out=self.folder(name))
