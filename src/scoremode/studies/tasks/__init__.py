"""Runs tasks of lm-evaluation-harness on any engine of scoremode.

``from scoremode.studies.tasks import ScoremodeLM`` is a model for ``lm_eval.simple_evaluate``. The class is loaded on
first use, because it imports lm-eval.
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
