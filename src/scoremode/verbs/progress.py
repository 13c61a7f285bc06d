"""Progress: how much is done, and what is being waited for."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with forward tokens done and forward tokens in all. It may have more methods, which get words: ``phase`` what
is being waited for before the first token, ``label`` another name of what is under way, ``detail`` what each replica
does, and ``say`` a line that a user should see."""


def announce(progress: Progress | None, words: str, method: str = "phase") -> None:
    """Shows what is being waited for now, as in "opening org/model with transformers", if the progress can.

    >>> announce(None, "opening a model")
    """
    tell = getattr(progress, method, None)
    if tell is not None:
        tell(words)


def part_of(progress: Progress | None, before: int, total: int) -> Progress | None:
    """A callback that reports the progress of one part as that of the whole; ``before`` was done before the part."""
    return None if progress is None else lambda done, _: progress(before + done, total)
