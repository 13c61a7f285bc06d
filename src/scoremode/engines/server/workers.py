"""Threads that wait for answers. They end with the process, so that Ctrl-C waits for no server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Workers(Generic[T, R]):
    """``count`` threads that apply a function to items."""

    def __init__(self, count: int, work: Callable[[T], R]) -> None:
        self.count, self.work = count, work
        self._todo: SimpleQueue[tuple[T] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[T, R | None, BaseException | None]] = SimpleQueue()

    def run(self, items: Iterable[T]) -> Iterator[list[tuple[T, R]]]:
        """All that is finished, again and again, in any order. At most twice ``count`` items are taken ahead."""
        waiting, pending = iter(items), 0
        for _ in range(self.count):
            threading.Thread(target=self._serve, daemon=True, name="scoremode-request").start()
        try:
            pending += self._feed(waiting, 2 * self.count)
            while pending:
                found = [self._take()]
                while not self._done.empty():
                    found.append(self._take())
                pending += self._feed(waiting, len(found)) - len(found)
                yield found
        finally:
            for _ in range(self.count):
                self._todo.put(None)

    def _feed(self, waiting: Iterator[T], count: int) -> int:
        fed = 0
        while fed < count and (item := next(waiting, self)) is not self:
            self._todo.put((item,))  # type: ignore[arg-type]
            fed += 1
        return fed

    def _take(self) -> tuple[T, R]:
        item, result, error = self._done.get()
        if error is not None:
            raise error
        return item, result  # type: ignore[return-value]

    def _serve(self) -> None:
        while (taken := self._todo.get()) is not None:
            try:
                self._done.put((taken[0], self.work(taken[0]), None))
            except BaseException as error:  # it is raised where the answers are taken
                self._done.put((taken[0], None, error))
                return
