"""Progress: how much is done, and what is being waited for."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with forward tokens done and forward tokens in all. One that has a method ``phase`` is told in words, before
the first token, what is being waited for; ``detail`` is told what each replica does, and ``say`` prints a line that a
user should see."""


def announce(progress: Progress | None, phase: str) -> None:
    """Tell what is being waited for now, as in "opening org/model with transformers".

    >>> announce(None, "opening a model")
    """
    tell = getattr(progress, "phase", None)
    if tell is not None:
        tell(phase)
