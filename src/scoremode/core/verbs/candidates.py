"""Many candidates, one after the other.

A candidate that fails does not stop the others. At the end, CandidatesError is raised, with the reason of each failure
and the results of the other candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from scoremode.core.verbs.compared_models import short
from scoremode.core.verbs.progress import Progress, announce
from scoremode.errors import (
    CandidatesError,
    CorpusError,
    EngineError,
    MethodError,
    OptionError,
    ScoremodeError,
    StorageError,
)

T = TypeVar("T")
FOR_ALL = (CorpusError, MethodError, OptionError)  # of the first candidate: the question is wrong, not the model


def score_in_turn(names: Sequence[str], score: Callable[[str], T], progress: Progress | None = None) -> dict[str, T]:
    """Scores every candidate, one after the other; returns the results by name.

    An error that every candidate would meet is raised at once: a question that cannot be asked, a storage that cannot
    be reached.
    """
    scored: dict[str, T] = {}
    failed: dict[str, ScoremodeError] = {}
    for name in names:
        if len(names) > 1:
            done = f"{len(scored)} of {len(names)} candidates scored" + (f", {len(failed)} failed" if failed else "")
            announce(progress, f"{done}; now {short(name)}", "label")
        try:
            scored[name] = score(name)
        except (ScoremodeError, OSError, MemoryError) as error:
            is_for_all = isinstance(error, StorageError) or (isinstance(error, FOR_ALL) and not scored)
            if len(names) == 1 or is_for_all:
                raise
            if isinstance(error, MemoryError):
                error = EngineError("this machine's memory is used up", fix="try a smaller --context-length")
            elif isinstance(error, OSError):
                error = EngineError(f"{type(error).__name__}: {error}", fix="run the same command again")
            failed[name] = error
    if failed:
        raise CandidatesError(scored, failed)
    return scored
