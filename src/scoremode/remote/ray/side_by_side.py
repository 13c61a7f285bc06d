"""Several candidates on one cluster, where each is scored as soon as there is room for it.

candidates   a b c d e          two slots
slot 1       a a a d d d
slot 2       b b c c c e e      all against one reference, which lies on disk and is read once by each node
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from scoremode.core.verbs.candidates import raise_failures, state_of_candidates
from scoremode.core.verbs.progress import Progress, announce

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_SECONDS = 0.05  # a signal that comes just before a wait without end would not be seen until something else happens
STOP_SECONDS = 6.0  # for candidates that are being scored to end their replicas
ScoreOne = Callable[[str, Progress], T]
"""Scores the candidate of that name, and tells its progress."""


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
    workers = [threading.Thread(target=queue.work, name=f"scoremode-slot-{n}", daemon=True) for n in range(slots)]
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            time.sleep(POLL_SECONDS)
    except BaseException:
        queue.is_stopped = True
        until = time.monotonic() + STOP_SECONDS  # before Ray ends: a worker that asks Ray later would start it again
        while any(worker.is_alive() for worker in workers) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        raise
    raise_failures(names, queue.scored, queue.failed)
    return [queue.scored[name] for name in names]


class _StoppedError(Exception):
    """Raised inside a candidate's scoring because the whole comparison was interrupted."""


class _CandidateQueue(Generic[T]):
    """The candidates of a comparison: those that wait, are being scored, are scored or have failed."""

    def __init__(self, names: Sequence[str], score: ScoreOne[T], progress: Progress | None) -> None:
        self.names, self.score, self.progress = names, score, progress
        self.is_stopped = False
        self.scored: dict[str, T] = {}
        self.failed: dict[str, BaseException] = {}
        self._lock = threading.Lock()
        self._waiting = iter(names)
        self._running: list[str] = []
        self._tokens = dict.fromkeys(names, (0, 0))  # done, and in all

    def work(self) -> None:
        """Scores waiting candidates, one after the other, until none is left."""
        name = self._next()
        while name is not None:
            try:
                self.scored[name] = self.score(name, _CandidateProgress(self, name))
            except BaseException as error:
                self.failed[name] = error
            name = self._next(after=name)

    def _next(self, after: str | None = None) -> str | None:
        with self._lock:
            name = None if self.is_stopped else next(self._waiting, None)
            self._running = [one for one in (*self._running, name) if one not in (after, None)]
            if not self.is_stopped:
                state = state_of_candidates(len(self.scored), len(self.failed), len(self.names), self._running)
                announce(self.progress, state, "label")
            return name

    def tell(self, name: str, done: int, total: int) -> None:
        """Reports the progress of all candidates together. Waiting ones, of the same plan, count like the longest."""
        with self._lock:
            self._tokens[name] = (done, total)
            if self.progress is not None:
                longest = max(of for _, of in self._tokens.values())
                whole = sum(of or longest for _, of in self._tokens.values())
                self.progress(sum(fed for fed, _ in self._tokens.values()), whole)


class _CandidateProgress:
    """The progress of one of several candidates. Every call raises _StoppedError if the comparison was interrupted."""

    def __init__(self, queue: _CandidateQueue[T], name: str) -> None:
        self._queue, self._name = queue, name

    def __call__(self, done: int, total: int) -> None:
        self.detail("")
        self._queue.tell(self._name, done, total)

    def detail(self, _: str) -> None:
        """Shows nothing: the progress line names the candidates being scored, not what each of them waits for."""
        if self._queue.is_stopped:
            raise _StoppedError

    phase = detail

    def say(self, line: str) -> None:
        """Logs a line with the candidate's name, because each candidate has a replica 1."""
        logger.warning("%s: %s", self._name, line)
