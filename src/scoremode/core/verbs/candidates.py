"""Many candidates, one after the other.

A candidate that fails does not stop the others. At the end, CandidatesError is raised, with the reason of each failure
and the results of the other candidates. An error that scoremode does not expect is raised as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from scoremode.core.verbs.progress import Progress, announce
from scoremode.core.verbs.sides import short
from scoremode.errors import (
    CandidatesError,
    CorpusError,
    EngineError,
    MethodError,
    OptionError,
    ScoremodeError,
    StorageError,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
SHOWN = 2  # candidates that the progress line names
FOR_ALL = (CorpusError, MethodError, OptionError)  # of the first candidate: the question is wrong, not the model


def score_in_turn(names: Sequence[str], score: Callable[[str], T], progress: Progress | None = None) -> dict[str, T]:
    """Scores every candidate, one after the other; returns the results by name.

    An error that every candidate would meet is raised at once: a question that cannot be asked, a storage that cannot
    be reached.
    """
    scored: dict[str, T] = {}
    failed: dict[str, BaseException] = {}
    for name in names:
        if len(names) > 1:
            announce(progress, state_of_candidates(len(scored), len(failed), len(names), [name]), "label")
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
    raise_failures(names, scored, failed)
    return scored


def raise_failures(names: Sequence[str], scored: Mapping[str, T], failed: Mapping[str, BaseException]) -> None:
    """Raises CandidatesError if candidates failed; if one failed unexpectedly, logs the others and raises its error."""
    expected = {name: failed[name] for name in names if name in failed and isinstance(failed[name], ScoremodeError)}
    bugs = [name for name in names if name in failed and name not in expected]
    if not bugs:
        if failed:
            raise CandidatesError(scored, expected)  # type: ignore[arg-type]  # only ScoremodeErrors are expected
        return
    for name in names:
        if name in failed and name != bugs[0]:
            logger.error("%s: %s", name, failed[name])
    logger.error(
        "%s could not be scored; %d of %d candidates were scored and are kept", bugs[0], len(scored), len(names)
    )
    raise failed[bugs[0]]


def state_of_candidates(scored: int, failed: int, of: int, running: Sequence[str]) -> str:
    """The label of the progress line: how many candidates are done, and which are being scored."""
    some_failed = f", {failed} failed" if failed else ""
    return f"{scored} of {of} candidates scored{some_failed}; now {_few([short(name) for name in running])}"


def _few(names: list[str]) -> str:
    """``a, b and 6 more``: a line of a terminal has room for two.

    >>> _few(["a", "b", "c"]), _few([])
    ('a, b and 1 more', 'none')
    """
    shown = ", ".join(names[:SHOWN]) or "none"
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown
