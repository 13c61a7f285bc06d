"""A model for ``lm_eval.simple_evaluate``: ``from scoremode.harness import ScoremodeLM``.

The code is in scoremode/studies/tasks/model.py. It is loaded on first use, because it imports lm-eval.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scoremode.studies.tasks.model import ScoremodeLM

__all__ = ["ScoremodeLM"]


def __getattr__(name: str) -> Any:
    if name == "ScoremodeLM":
        from scoremode.studies.tasks.model import ScoremodeLM

        return ScoremodeLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
