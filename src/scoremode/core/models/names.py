"""Names of models that are not paths of this machine, such as those of a hub. Wings offer readers of them.

A reader is offered as "model-names". Its models are GGUF files; the user's name stays the model's name everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from scoremode.core import extensions
from scoremode.core.arguments import user_path


class ModelNames(Protocol):
    """Reads names of one form."""

    def claims(self, name: str) -> bool:
        """Has the name this form? Nothing outside this machine is asked."""

    def expand(self, name: str, baseline: str) -> list[str]:
        """All models of a pattern but the baseline, the smallest first; the name itself if it is no pattern."""

    def models_in(self, repo: str) -> list[str]:
        """The names of the models in a repository, with their sizes; none if it is no repository."""

    def find(self, name: str) -> Path:
        """The model's (first) file on this machine; it is fetched if it is not there."""

    def release(self, name: str) -> None:
        """Removes the files that ``find`` has fetched in this process."""


def reader_of(name: str) -> ModelNames | None:
    """What reads a name; None if it is a path, or the name of a checkpoint."""
    if user_path(name).exists():
        return None
    reader: ModelNames | None = next((names for names in extensions.offered("model-names") if names.claims(name)), None)
    return reader
