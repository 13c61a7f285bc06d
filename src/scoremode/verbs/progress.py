"""Progress: how much is done, and what is being waited for."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with forward tokens done and forward tokens in all. It may have more methods, which get words: ``phase`` what
is being waited for before the first token, ``label`` another name of what is under way, ``detail`` what each replica
does, and ``say`` a line that a user should see."""


def announce(progress: Progress | None, phase: str) -> None:
    """Tell what is being waited for now, as in "opening org/model with transformers".

    >>> announce(None, "opening a model")
    """
    tell = getattr(progress, "phase", None)
    if tell is not None:
        tell(phase)


def relabel(progress: Progress | None, words: str) -> None:
    """Other words for what is under way; how much is done stays.

    >>> relabel(None, "2 of 3 candidates scored")
    """
    tell = getattr(progress, "label", None)
    if tell is not None:
        tell(words)
