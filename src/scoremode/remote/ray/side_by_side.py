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
        state = state_of_candidates(len(self._scored), len(self._failed), len(self.names), self._running)
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
