"""Many candidates on a cluster: each is scored as soon as there is room for it.

candidates   a b c d e          two slots
slot 1       a a a d d d
slot 2       b b c c c e e      all against one reference, which lies on disk and is read once by each node

A candidate that fails does not stop the others: what they scored is kept, and the error is raised at the end. If
several fail, there is a line for each of the others before.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from scoremode.errors import ScoremodeError, print_line
from scoremode.verbs.progress import Progress, relabel
from scoremode.verbs.sides import short

T = TypeVar("T")
SHOWN = 2  # candidates that the progress line names
FAREWELL = 6.0  # seconds for candidates that are being scored to end their replicas

Scored = Callable[[str, Progress], T]
"""Scores the candidate of that name, and tells how far it is."""


def slots_and_shares(candidates: int, replicas: int) -> tuple[int, int]:
    """How many candidates are scored at a time, and how many replicas each of them gets.

    >>> slots_and_shares(40, 8), slots_and_shares(3, 8), slots_and_shares(1, 8)
    ((8, 1), (3, 2), (1, 8))
    """
    slots = min(candidates, replicas)
    return slots, replicas // slots


def score_together(names: Sequence[str], score: Scored[T], slots: int, progress: Progress | None = None) -> list[T]:
    """What ``score`` gives for every name, in the order of the names, ``slots`` of them at a time."""
    return _Together(names, score, progress).run(slots)


class _StoppedError(Exception):
    """Raised inside a candidate's scoring because the whole comparison was interrupted."""


class _Together(Generic[T]):
    def __init__(self, names: Sequence[str], score: Scored[T], progress: Progress | None) -> None:
        self.names, self.score, self.progress = names, score, progress
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._fed = dict.fromkeys(names, (0, 0))
        self._running: list[str] = []
        self._waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: a thread has nothing left to do
        self._found: dict[str, T] = {}
        self._failed: dict[str, BaseException] = {}

    def run(self, slots: int) -> list[T]:
        for name in self.names:
            self._waiting.put(name)
        names = [f"scoremode-slot-{number}" for number in range(slots)]
        # daemons: an interrupted comparison must not wait forever for an engine that starts
        workers = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        try:
            for worker in workers:
                worker.start()
            left = slots
            while left:
                left -= self._ended.get() is None
        except BaseException:
            self.stopped.set()
            until = time.monotonic() + FAREWELL
            for worker in workers:  # before Ray ends: whoever asks it something afterwards would start it again
                if worker.ident is not None:
                    worker.join(max(0.0, until - time.monotonic()))
            raise
        self._raise_failures()
        return [self._found[name] for name in self.names]

    def _work(self) -> None:
        """One slot: the next candidate that waits, until none does."""
        while not self.stopped.is_set():
            try:
                name = self._waiting.get_nowait()
            except queue.Empty:
                break
            self._announce(name, begins=True)
            try:
                self._found[name] = self.score(name, _Turn(self, name))
            except _StoppedError:
                break
            except BaseException as error:
                self._failed[name] = error
            self._announce(name, begins=False)
            self._ended.put(name)
        self._ended.put(None)

    def _announce(self, name: str, *, begins: bool) -> None:
        with self._lock:
            self._running.append(name) if begins else self._running.remove(name)
            failed = f", {len(self._failed)} failed" if self._failed else ""
            done = f"{len(self._found)} of {len(self.names)} candidates scored{failed}"
            relabel(self.progress, f"{done}; now {_few([short(one) for one in self._running])}")

    def check(self) -> None:
        """Leave what is being done if the comparison was interrupted."""
        if self.stopped.is_set():
            raise _StoppedError

    def tell(self, name: str, done: int, total: int) -> None:
        """Candidates that wait count as much as those that are known already: they have the same plan."""
        self.check()
        with self._lock:
            self._fed[name] = (done, total)
            if self.progress is not None:
                longest = max(of for _, of in self._fed.values())
                whole = sum(of or longest for _, of in self._fed.values())
                self.progress(sum(fed for fed, _ in self._fed.values()), whole)

    def _raise_failures(self) -> None:
        """The first error, with the name of its candidate. One that is not ours is raised as it is, before ours."""
        failed = [(name, self._failed[name]) for name in self.names if name in self._failed]
        if not failed:
            return
        name, first = next((pair for pair in failed if not isinstance(pair[1], ScoremodeError)), failed[0])
        for other, error in failed:
            if error is not first:
                _say(f"{other}: {error}")
        others = f"{len(self._found)} of {len(self.names)} candidates were scored and are kept"
        if isinstance(first, ScoremodeError):
            first.message = f"{name}: {first.message} ({others})"
        else:
            _say(f"{name} could not be scored; {others}")
        raise first


def _few(names: list[str]) -> str:
    """``a, b and 6 more``: a line of a terminal has room for two.

    >>> _few(["a", "b", "c"]), _few([])
    ('a, b and 1 more', 'none')
    """
    shown = ", ".join(names[:SHOWN]) or "none"
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown


def _say(line: str) -> None:
    print_line(f"scoremode: {line}")


class _Turn:
    """The progress of one of several candidates."""

    def __init__(self, together: _Together[T], name: str) -> None:
        self._together, self._name = together, name

    def __call__(self, done: int, total: int) -> None:
        self._together.tell(self._name, done, total)

    def phase(self, _: str) -> None:
        """Others are scored meanwhile: the line says who is, not what each waits for."""
        self._together.check()

    def detail(self, _: str) -> None:
        self._together.check()

    def say(self, line: str) -> None:
        """All candidates have a replica 1."""
        _say(f"{self._name}: {line}")
