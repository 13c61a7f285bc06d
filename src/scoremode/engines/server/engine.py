"""Scores through a server that is already running: one request a window, many at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scoremode.engines.base import SCORES, Engine, EngineFacts, Want
from scoremode.engines.server.guard import Guard
from scoremode.engines.server.link import Link
from scoremode.engines.server.probe import as_settings, probe, probe_ids
from scoremode.engines.server.served import score
from scoremode.engines.server.server_options import CONCURRENCY
from scoremode.engines.server.subject import ServedSubject
from scoremode.engines.server.workers import Workers
from scoremode.errors import EngineError, ModelError
from scoremode.plan.windows import Answers, Window, WindowSource
from scoremode.values import Bools, Ids


class ServerEngine(Engine):
    """A model behind an address."""

    def __init__(self, subject: ServedSubject, concurrency: int | None) -> None:
        self.subject, self.concurrency = subject, concurrency or CONCURRENCY
        served, form = subject.served, subject.form
        assert form is not None, "a server that scores prompts in a form"
        self.form = form
        self._asking = subject.connect(1)
        try:
            room = None if served.max_model_len is None else served.max_model_len - 1
            found = probe(self._asking, form, served.model, probe_ids(subject.tokenizer, room))
            self._guard = Guard(self._asking, served, form, found)
            self._guard.check()
        except BaseException:
            self._asking.close()
            raise
        self.facts = EngineFacts(
            engine="server",
            dtype="as served",
            device=subject.root,
            head="as-served",
            vocabulary=None,
            context_length=subject.context_length,
            versions={} if served.version is None else {"server": served.version},
            settings={
                "address": subject.root,
                **served.facts(),
                "form": form.name,
                "concurrency": self.concurrency,
                **as_settings(found),
            },
            notes=tuple(note for note in (*found.notes, subject.tokenizer_note()) if note),
        )

    def score(self, source: WindowSource, done: Bools, want: Want = SCORES) -> Iterator[tuple[int, Answers]]:
        if want.states or want.against is not None:
            raise EngineError("a server gives no hidden states", fix="use an engine that loads the model itself")
        if source.vocabulary is not None:
            raise EngineError(
                "this method leaves out ids that have no token, and a server does not",
                fix="use another --method, such as sliding-once",
            )
        missing = np.flatnonzero(~done).tolist()
        self._require_room(source, done)
        link = self.subject.connect(self.concurrency)
        workers: Workers[int, Answers] = Workers(
            min(self.concurrency, max(1, len(missing))), lambda index: self._answers(link, source.window(index))
        )
        try:
            for finished in workers.run(missing):
                self._guard.confirm(link)
                yield from finished
            self._guard.check()
        finally:
            link.close()

    def _answers(self, link: Link, window: Window) -> Answers:
        prompt = _prompt(window)
        found = score(link, self.form, self.subject.served.model, prompt.tolist())
        self._guard.see(found)
        return Answers(logprob=found.logprob[window.rows][:, None])

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
