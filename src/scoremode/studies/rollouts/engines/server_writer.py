"""Texts that a running server writes, with the log-probabilities that it gives for its own tokens.

prompt ids ──▶ /v1/completions ──▶ tokens as ids, and one log-probability for each

A server has one log-probability for a token. Two requests tell which: before temperature and filters, or after them.
The other one is the same for temperature 1 without filters, and 0 after greedy choices. Else it is not known.

Of the filters, top_p alone belongs to the API of OpenAI: a server may ignore others, so they are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np

from scoremode.core.engine.plugin import Work
from scoremode.core.models.subject import Subject
from scoremode.engines.server import ServerPlugin
from scoremode.engines.server.engine import ServerEngine, in_threads
from scoremode.engines.server.forms import COMPLETIONS, ROUNDING
from scoremode.engines.server.link import SMALL, Link
from scoremode.engines.server.served import BYTES_PER_TOKEN
from scoremode.engines.server.server_options import ServerOptions
from scoremode.errors import EngineError, OptionError
from scoremode.studies.rollouts.texts import WrittenTokens
from scoremode.studies.rollouts.writing import DrawingRules, Tell, Writer, WritingRequest
from scoremode.values import Bools

LIKELY = 5  # tokens whose log-probabilities are compared
MOVED = 0.05  # nats; more than batches change
IDS = "token_id:"  # how a token is named if ids are asked for


Likely = list[dict[str, float]]
"""Of each token the likeliest ones at its place, as the server gave them; empty if it gave none."""


class _Request(msgspec.Struct):
    model: str
    prompt: list[int]
    max_tokens: int
    seed: int
    temperature: float
    top_p: float
    logprobs: int  # of how many tokens
    return_tokens_as_token_ids: bool = True
    top_k: int = -1  # this and what follows: else defaults of the served model would apply
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: Likely | None = None


class _Choice(msgspec.Struct):
    logprobs: _Logprobs
    finish_reason: Literal["stop", "length"]


class _Answer(msgspec.Struct):
    choices: tuple[_Choice]


def open_writer(
    plugin: ServerPlugin, subject: Subject, options: ServerOptions, work: Work, rules: DrawingRules
) -> ServerWriter:
    concurrency = options.concurrency if work.path is None else work.path.sequences
    engine = plugin.open(subject, replace(options, concurrency=concurrency), work)
    assert isinstance(engine, ServerEngine), "a scoring service does not write"
    return ServerWriter(engine, rules)


class ServerWriter(Writer):
    """Writes texts through a server, many requests at a time. Closes the engine when it is closed."""

    def __init__(self, engine: ServerEngine, rules: DrawingRules) -> None:
        self.engine, self.rules, self.facts = engine, rules, engine.facts
        eos = engine.subject.tokenizer.facts.eos
        self.ends = frozenset[int]() if eos is None else frozenset([eos])
        self._link = engine.subject.connect(engine.concurrency)
        self.missing = () if rules.is_own or rules.is_greedy else ("logprob",)
        try:
            engine.subject.tokenizer.pieces()  # refuses a tokenizer that only the server has
            if rules.top_k or rules.min_p:
                raise OptionError("a server may ignore --top-k and --min-p", fix="leave them out")
            if not rules.is_own:
                self._require_raw()
        except BaseException:
            self.close()
            raise

    def _require_raw(self) -> None:
        """Refuses numbers that depend on the temperature: two temperatures tell."""
        probe = list(self.engine.probe_ids)
        both = [self._complete(self._request(probe, 1, 0, temperature=t))[1] for t in (1.0, 0.5)]
        first, second = (likely[0] if likely else {} for likely in both)
        moved = [abs(first[name] - second[name]) for name in first.keys() & second.keys()]
        if not moved or not np.max(moved) <= MOVED:  # NaN, too
            raise OptionError(
                f"{self._link.root} gives log-probabilities after the temperature, and those before it are needed",
                fix="give --temperature 1 without filters, or start the server so that it gives them "
                "(--logprobs-mode raw_logprobs)",
            )

    def account(self) -> list[str]:
        notes = ["drawn by the server's own sampler: a near-tie may fall otherwise in another batch"]
        if self.missing:
            notes.append("the server gives log-probabilities before temperature and filters: those after are not known")
        return notes

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def write(self, requests: Sequence[WritingRequest], done: Bools, tell: Tell) -> Iterator[tuple[int, WrittenTokens]]:
        missing = np.flatnonzero(~done).tolist()
        count = min(self.engine.concurrency, max(1, len(missing)))
        for number, text in in_threads(count, lambda number: self._written(requests[number]), missing):
            self.engine.confirm(self._link)
            tell(len(text.ids))
            yield number, text
        self.engine.require_same()

    def _written(self, request: WritingRequest) -> WrittenTokens:
        text, _ = self._complete(self._request(request.prompt.tolist(), request.room, request.seed))
        if self.rules.is_greedy or self.missing:
            text = replace(text, logprob=np.full(len(text.ids), 0.0 if self.rules.is_greedy else np.nan))
        return text

    def _request(self, prompt: list[int], room: int, seed: int, *, temperature: float | None = None) -> _Request:
        """A request by the rules; with ``temperature``, one that asks for the likeliest tokens at it, unfiltered."""
        model, rules = self.engine.subject.served.model, self.rules
        if temperature is not None:
            return _Request(model, prompt, room, seed, temperature, 1.0, LIKELY)
        return _Request(model, prompt, room, seed, rules.temperature, rules.top_p, 1)

    def _complete(self, request: _Request) -> tuple[WrittenTokens, Likely]:
        largest = SMALL + BYTES_PER_TOKEN * (len(request.prompt) + LIKELY * request.max_tokens)
        reply = self._link.post(COMPLETIONS, msgspec.to_builtins(request), largest=largest)
        if not reply.good:
            raise EngineError(
                f"the server refuses to write ({reply.status}: {reply.words})",
                fix="see to it, then run this again",
            )
        self.engine.require_names(reply.fields)
        return _read(self._link, reply.value, request.max_tokens)

    def close(self) -> None:
        self._link.close()
        self.engine.close()


def _read(link: Link, value: object, room: int) -> tuple[WrittenTokens, Likely]:
    """Reads an answer; EngineError if it has not the ids and the log-probabilities of a text."""
    try:
        (choice,) = msgspec.convert(value, _Answer).choices
        ids = np.array([int(name.removeprefix(IDS)) for name in choice.logprobs.tokens], np.int32)
    except msgspec.ValidationError:
        raise _unusable(link, "it has no tokens with log-probabilities") from None
    except (ValueError, OverflowError):
        raise EngineError(
            f"{link.root} does not give the ids of the tokens that it writes",
            fix="use a server that knows return_tokens_as_token_ids",
        ) from None
    logprob, likely = np.array(choice.logprobs.token_logprobs), choice.logprobs.top_logprobs or []
    if not 0 < len(ids) == len(logprob) <= room:
        raise _unusable(link, "its text has another length or end than was asked for")
    if not (logprob <= ROUNDING).all() or not np.isfinite(logprob).all():  # written so that NaN is refused
        raise _unusable(link, "it gives numbers that are no log-probabilities")
    logprob = np.minimum(logprob, 0.0)
    return WrittenTokens(ids, logprob, logprob, "stop" if choice.finish_reason == "stop" else ""), likely


def _unusable(link: Link, why: str) -> EngineError:
    return EngineError(f"{link.root} gave a text that cannot be used: {why}", fix="use another server")
