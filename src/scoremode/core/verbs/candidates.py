"""Many candidates: one after the other, or on a cluster, where each is scored as soon as there is room for it.

candidates   a b c d e          two slots
slot 1       a a a d d d
slot 2       b b c c c e e      all against one reference, which lies on disk and is read once by each node

A candidate that fails does not stop the others. At the end, CandidatesError is raised, with the reason of each failure
and the results of the other candidates. An error that scoremode does not expect is raised as it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

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
POLL_SECONDS = 0.05  # a signal that comes just before a wait without end would not be seen until something else happens
STOP_SECONDS = 6.0  # for candidates that are being scored to end their replicas

FOR_ALL = (CorpusError, MethodError, OptionError)  # of the first candidate: the question is wrong, not the model
ScoreOne = Callable[[str, Progress], T]
"""Scores the candidate of that name, and tells its progress."""


def score_in_turn(names: Sequence[str], score: Callable[[str], T], progress: Progress | None = None) -> dict[str, T]:
    """Scores every candidate, one after the other; returns the results by name.

    An error that every candidate would meet is raised at once: a question that cannot be asked, a storage that cannot
    be reached.
    """
    scored: dict[str, T] = {}
    failed: dict[str, BaseException] = {}
    for name in names:
        if len(names) > 1:
            announce(progress, _state(len(scored), len(failed), len(names), [name]), "label")
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


def slots_and_shares(candidates: int, replicas: int) -> tuple[int, int]:
    """How many candidates are scored at a time, and how many replicas each of them gets.

    >>> slots_and_shares(40, 8), slots_and_shares(3, 8), slots_and_shares(1, 8)
    ((8, 1), (3, 2), (1, 8))
    """
    slots = min(candidates, replicas)
    return slots, replicas // slots


def score_together(names: Sequence[str], score: ScoreOne[T], slots: int, progress: Progress | None = None) -> list[T]:
    """Scores every candidate, ``slots`` of them at a time; returns the results in the order of the names."""
    queue = _CandidateQueue(names, score, progress)
    # daemons: an interrupted comparison must not wait forever for an engine that starts
    # events, not Thread.join: a join that was interrupted takes the thread for ended (Python 3.11)
    ended = [threading.Event() for _ in range(slots)]
    workers = [
        threading.Thread(target=queue.work, args=(event,), name=f"scoremode-slot-{n}", daemon=True)
        for n, event in enumerate(ended)
    ]
    try:
        for worker in workers:
            worker.start()
        while not all(event.is_set() for event in ended):
            time.sleep(POLL_SECONDS)
    except BaseException:
        queue.stopped.set()
        until = time.monotonic() + STOP_SECONDS
        for worker, event in zip(workers, ended, strict=True):
            if worker.ident is not None:  # before Ray ends: a worker that asks Ray something later would start it again
                event.wait(max(0.0, until - time.monotonic()))
        raise
    return queue.results()


class _StoppedError(Exception):
    """Raised inside a candidate's scoring because the whole comparison was interrupted."""


class _CandidateQueue(Generic[T]):
    """The candidates of a comparison: those that wait, are being scored, are scored or have failed."""

    def __init__(self, names: Sequence[str], score: ScoreOne[T], progress: Progress | None) -> None:
        self.names, self.score, self.progress = names, score, progress
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._waiting = iter(names)
        self._running: list[str] = []
        self._scored: dict[str, T] = {}
        self._failed: dict[str, BaseException] = {}
        self._tokens = dict.fromkeys(names, (0, 0))  # done, and in all

    def work(self, ended: threading.Event) -> None:
        """Scores waiting candidates, one after the other, until none is left; then sets ``ended``."""
        try:
            self._work()
        finally:
            ended.set()

    def _work(self) -> None:
        while not self.stopped.is_set():
            with self._lock:
                name = next(self._waiting, None)
                if name is None:
                    return
                self._running.append(name)
                self._relabel()
            try:
                self._scored[name] = self.score(name, _CandidateProgress(self, name))
            except _StoppedError:
                return
            except BaseException as error:
                self._failed[name] = error
            with self._lock:
                self._running.remove(name)
                self._relabel()

    def _relabel(self) -> None:
        state = _state(len(self._scored), len(self._failed), len(self.names), self._running)
        announce(self.progress, state, "label")

    def check(self) -> None:
        """Raises _StoppedError if the comparison was interrupted."""
        if self.stopped.is_set():
            raise _StoppedError

    def tell(self, name: str, done: int, total: int) -> None:
        """Reports the progress of all candidates together. Waiting ones, of the same plan, count like the longest."""
        self.check()
        with self._lock:
            self._tokens[name] = (done, total)
            if self.progress is not None:
                longest = max(of for _, of in self._tokens.values())
                whole = sum(of or longest for _, of in self._tokens.values())
                self.progress(sum(fed for fed, _ in self._tokens.values()), whole)

    def results(self) -> list[T]:
        """Returns all results, or raises the errors of the candidates that failed."""
        raise_failures(self.names, self._scored, self._failed)
        return [self._scored[name] for name in self.names]


def _state(scored: int, failed: int, of: int, running: Sequence[str]) -> str:
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


class _CandidateProgress:
    """The progress of one of several candidates. Every call raises _StoppedError if the comparison was interrupted."""

    def __init__(self, queue: _CandidateQueue[T], name: str) -> None:
        self._queue, self._name = queue, name

    def __call__(self, done: int, total: int) -> None:
        self._queue.tell(self._name, done, total)

    def detail(self, _: str) -> None:
        """Shows nothing: the progress line names the candidates being scored, not what each of them waits for."""
        self._queue.check()

    phase = detail

    def say(self, line: str) -> None:
        """Logs a line with the candidate's name, because each candidate has a replica 1."""
        logger.warning("%s: %s", self._name, line)
