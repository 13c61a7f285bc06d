"""Scores through a server that is already running: one request a window, many at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from scoremode.engines.base import SCORES, Engine, EngineFacts, Want
from scoremode.engines.server.checks import Description, SameServer, changed, probe, probe_ids
from scoremode.engines.server.forms import PromptScores
from scoremode.engines.server.link import Link
from scoremode.engines.server.served import look, score
from scoremode.engines.server.server_options import CONCURRENCY
from scoremode.engines.server.subject import ServedSubject
from scoremode.errors import EngineError, ModelError
from scoremode.plan.windows import Answers, Window, WindowSource
from scoremode.values import Bools, Ids

CHECK_SECONDS = 60.0  # between two checks that the server is the same, where nothing hints at another
T = TypeVar("T")
R = TypeVar("R")


class RequestEngine(Engine):
    """An engine that sends windows to a server."""

    def __init__(self, subject: ServedSubject, concurrency: int) -> None:
        self.subject, self.concurrency = subject, concurrency
        self._asking = subject.connect(1)  # for questions about the server itself

    def _common_facts(self, form: str) -> dict[str, Any]:
        """What is known of every server."""
        subject, served = self.subject, self.subject.served
        return {
            "engine": "server",
            "context_length": subject.context_length,
            "versions": {} if served.version is None else {"server": served.version},
            "settings": {"address": subject.root, **served.facts(), "form": form, "concurrency": self.concurrency},
        }

    def _require_room(self, source: WindowSource, done: Bools) -> None:
        """Refuse windows that are too long, before one is sent."""
        longest, room = int(source.lengths[~done].max(initial=0)), self.facts.context_length
        if room is not None and longest > room:
            raise ModelError(
                f"a window of {longest} tokens is longer than the {room} that this server takes",
                fix=f"give --context-length {room}",
            )

    def close(self) -> None:
        self._asking.close()


class ServerEngine(RequestEngine):
    """A model behind an address.

    An answer is kept only if the server was found unchanged at a time after it came. What is looked at: the name and
    fingerprint in every answer, new connections (a server that was started again cannot have the old ones), and, at
    every one of these and now and then, what the server says of itself and its scores of the probe.
    """

    def __init__(self, subject: ServedSubject, concurrency: int | None) -> None:
        super().__init__(subject, concurrency or CONCURRENCY)
        assert subject.form is not None, "a server that scores prompts in a form"
        self.form, served = subject.form, subject.served
        try:
            room = None if served.max_model_len is None else served.max_model_len - 1
            found = probe(self._asking, self.form, served.model, probe_ids(subject.tokenizer, room))
            self._probe_ids = found.ids
            self._same = SameServer(subject.root, Description(served.facts(), found.scores), self._describe)
            self._same.check()
        except BaseException:
            self._asking.close()
            raise
        self._covered: tuple[Link | None, int] = (None, 0)  # the connections that an earlier check covers
        self._checked = time.monotonic()
        facts = self._common_facts(self.form.name)
        if found.mass is not None:
            facts["settings"]["probe_mass"] = [round(m, 6) for m in found.mass]
        self.facts = EngineFacts(
            **facts,
            dtype="as served",
            device=subject.root,
            head="as-served",
            vocabulary=None,
            notes=subject.notes_with(found.notes),
        )

    def score(self, source: WindowSource, done: Bools, want: Want = SCORES) -> Iterator[tuple[int, Answers]]:
        if want.states or want.against is not None:
            raise EngineError("a server gives no hidden states", fix="use an engine that loads the model itself")
        if source.vocabulary is not None:
            raise EngineError(
                "this method leaves out ids that have no token, and a server does not",
                fix="use another --method, such as sliding-once",
            )
        self._require_room(source, done)
        missing = np.flatnonzero(~done).tolist()
        link = self.subject.connect(self.concurrency)
        count = min(self.concurrency, max(1, len(missing)))
        try:
            for finished in in_threads(count, lambda index: self._answers(link, source.window(index)), missing):
                self._confirm(link)
                yield from finished
            self._same.check()
        finally:
            link.close()

    def _answers(self, link: Link, window: Window) -> Answers:
        found = score(link, self.form, self.subject.served.model, _prompt(window).tolist())
        self._require_names(found)
        return Answers(logprob=found.logprob[window.rows][:, None])

    # ── is it the same server? ───────────────────────────────────────────────────────────────────────────────────────
    def _require_names(self, found: PromptScores) -> None:
        """Require that an answer names the server and the model that the run began with."""
        served = self.subject.served
        if found.fingerprint != served.system_fingerprint:
            raise changed(
                self.subject.root,
                f"its system_fingerprint was {served.system_fingerprint} and is {str(found.fingerprint)[:200]}",
            )
        if found.model is not None and found.model != served.model:
            raise changed(self.subject.root, f"its model was {served.model} and is {found.model[:200]}")

    def _describe(self) -> Description:
        name = self.subject.served.model
        try:
            now = look(self._asking, name)
        except ModelError as gone:
            raise changed(self.subject.root, f"it does not serve '{name}' any more; {gone.fix}") from None
        found = score(self._asking, self.form, name, self._probe_ids)
        self._require_names(found)
        return Description(replace(now, system_fingerprint=found.fingerprint).facts(), found.logprob)

    def _confirm(self, link: Link) -> None:
        """Check the server if the workers have new connections, or if the last check was long ago."""
        now = link, link.made
        is_new = now != self._covered
        if is_new or time.monotonic() - self._checked > CHECK_SECONDS:
            try:
                self._same.check()
            except EngineError as error:
                fix = error.fix if is_new else "the last minute's scores may be of either: score again with --fresh"
                raise EngineError(error.message, fix=fix) from None
            self._covered, self._checked = now, time.monotonic()


def _prompt(window: Window) -> Ids:
    """The tokens to send: those that are fed, and the target of the last row, which a window need not feed."""
    rows, targets = window.rows, window.targets
    prompt = window.ids
    if len(rows) and int(rows[-1]) == len(window.ids) - 1:
        prompt = np.concatenate([window.ids, targets[-1, :1]])
    if targets.shape[1] != 1 or not np.array_equal(prompt[rows + 1], targets[:, 0]):
        raise EngineError(
            "a server scores the tokens of a text and no others", fix="use an engine that loads the model itself"
        )
    return prompt


def in_threads(count: int, work: Callable[[T], R], items: Iterable[T]) -> Iterator[list[tuple[T, R]]]:
    """Apply a function to items in threads. Yields all that is finished, again and again, in any order.

    At most twice ``count`` items are taken ahead. The threads end with the process, so that Ctrl-C waits for no server.
    """
    todo: SimpleQueue[tuple[T] | None] = SimpleQueue()
    done: SimpleQueue[tuple[T, R] | BaseException] = SimpleQueue()

    def work_on_items() -> None:
        while (taken := todo.get()) is not None:
            try:
                done.put((taken[0], work(taken[0])))
            except BaseException as error:  # it is raised where the answers are taken
                done.put(error)
                return

    def take() -> tuple[T, R]:
        found = done.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def feed(room: int) -> int:
        fed = 0
        for item in islice(waiting, room):
            todo.put((item,))
            fed += 1
        return fed

    waiting = iter(items)
    for _ in range(count):
        threading.Thread(target=work_on_items, daemon=True, name="scoremode-request").start()
    try:
        pending = feed(2 * count)
        while pending:
            finished = [take()]
            while not done.empty():
                finished.append(take())
            pending += feed(len(finished)) - len(finished)
            yield finished
    finally:
        for _ in range(count):
            todo.put(None)
