"""Asks a server for the scores of a prompt, as the checks of invariants.py need them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from scoremode.core.scores.answers import Answers, Window, measured, own_tokens
from scoremode.core.scores.messages import Asked
from scoremode.engines.server.forms import Form, PromptScores, WrongAnswerError
from scoremode.engines.server.invariants import Ask, altered
from scoremode.engines.server.link import Link
from scoremode.engines.server.served import MOST, RefusedError, ask, score
from scoremode.errors import EngineError
from scoremode.values import Floats

REFUSED = frozenset({500, 501})  # how some servers refuse an unknown kind of request: it is not sent again
MOST_BYTES = 64 << 20  # of a list of all tokens
MOST_TARGETS = 4096  # of one row of a service, which counts the rank of each
MOST_ANSWERS = 1 << 17  # of one request of a check
SERVICE_FIX = "it is no service as it is released: see to the server, or use an engine that loads the model itself"
CLOSE = 1e-2  # nats; columns of one row agree that well


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAsk(Ask):
    """Asks a server that scores a prompt in a form."""

    link: Link
    form: Form
    model: str

    def __call__(self, ids: Sequence[int], *, likely: bool = False) -> PromptScores:
        return score(self.link, self.form, self.model, ids, self.most if likely else 0)

    def every(self, ids: Sequence[int]) -> Floats | None:
        if not self.form.every:
            return None
        try:
            prompt, how = [*ids, ids[0]], {"largest": MOST_BYTES, "final": REFUSED}
            likely = ask(self.link, self.form, self.model, prompt, self.form.every, **how).likely
        except (RefusedError, WrongAnswerError, EngineError):  # also an answer that is too large
            return None
        # a server that lists fewer than there are gives the same as one that refuses
        return np.array(list(likely[-1].values())) if likely and len(likely[-1]) > self.form.last else None


def prompt_ask(link: Link, form: Form, model: str, ids: Sequence[int]) -> PromptAsk:
    """Finds out how many of the likeliest tokens a server gives."""
    listed = 0
    for most in (MOST, 5, 1):
        with contextlib.suppress(RefusedError, WrongAnswerError):
            answer = ask(link, form, model, ids, most, largest=MOST_BYTES, final=REFUSED)
            listed = most if answer.likely else 0
            break
    return PromptAsk(root=link.root, fix=form.fix, most=listed, link=link, form=form, model=model)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAsk(Ask):
    """Asks a scoring service. It lists the likeliest token alone, so those of earlier answers are asked for as well."""

    send: Callable[[Asked], Sequence[Answers]]
    vocabulary: int
    limit: int = 0  # ids from this one on get no probability; 0: all get one
    tops: list[int] = field(default_factory=list)  # ids that were likeliest somewhere

    def __call__(self, ids: Sequence[int], *, likely: bool = False) -> PromptScores:
        window = own_tokens(np.array(ids, np.int32))
        room = max(0, MOST_ANSWERS // max(1, len(window.rows)) - 1)
        others = np.array(self.tops[: min(MOST, room)] if likely else (), np.int32)
        targets = np.concatenate([window.targets, np.tile(others, (len(window.rows), 1))], axis=1)
        answers = self._answers(Window(window.ids[:-1], window.rows, targets))  # nothing is scored after the last id
        if answers.top is not None:
            self.tops.extend(set(answers.top.tolist()) - set(self.tops))
        rows = zip(targets.tolist(), answers.logprob.tolist(), strict=True)
        listed = [dict(zip(map(str, tokens), row, strict=True)) for tokens, row in rows]
        return PromptScores(answers.logprob[:, 0], None, None, listed if likely else None)

    def every(self, ids: Sequence[int]) -> Floats | None:
        """Also compares the other columns of the row with the probabilities of all tokens."""
        count = self.limit or self.vocabulary
        if count > MOST_TARGETS:
            return None
        last, targets = np.array([len(ids) - 1], np.int32), np.arange(count, dtype=np.int32)[None]
        row = self._answers(Window(np.array(ids, np.int32), last, targets))
        logprob: Floats = row.logprob[0]
        p = np.exp(logprob)
        if row.rank is not None and not (np.diff(logprob[np.argsort(row.rank[0])]) <= CLOSE).all():
            raise altered(self, "its ranks are not those of its probabilities")
        entropy = -float(np.sum(p * logprob, where=p > 0))
        if row.entropy is not None and not abs(float(measured(row.entropy)[0]) - entropy) <= CLOSE * max(1.0, entropy):
            raise altered(self, f"an entropy of {row.entropy[0]:.4g} is {entropy:.4g} by its probabilities")
        return logprob

    def _answers(self, window: Window) -> Answers:
        (answers,) = self.send(Asked((window,), self.limit))
        return answers
