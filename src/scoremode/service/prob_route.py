"""P(target | prompt) for clients that send text: the tokenizer and the boundary rule are the service's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from scoremode.engines.base import SCORES, Engine, Want
from scoremode.engines.messages import Asked
from scoremode.engines.options import Options
from scoremode.engines.registry import Chosen
from scoremode.errors import EngineError
from scoremode.models.subject import Subject
from scoremode.plan.windows import Answers, WindowSource
from scoremode.service.requests import TooLargeError
from scoremode.service.scorer import Scorer
from scoremode.text.tokenizer import HuggingFaceTokenizer, TextTokenizer
from scoremode.values import Bools
from scoremode.verbs.model import GivenEngine, LazyModel
from scoremode.verbs.prob.sequence import SequenceProbability, paired

EXAMPLE = 'send {"prompt": "The capital of France is", "targets": [" Paris", " London"]}'
AT_A_TIME = 4  # requests that are tokenized at once


class ProbForm(msgspec.Struct, forbid_unknown_fields=True):
    """The body of the prob route; the rules are those of ``scoremode prob``, and so are their defaults."""

    prompt: str | list[str]
    targets: str | list[str]
    leading_space: str | None = None
    spanning: str | None = None
    add_bos: bool | None = None


class ScorerEngine(Engine):
    """The service as an engine for code that waits for its answers, in a thread of its own."""

    def __init__(self, scorer: Scorer, loop: asyncio.AbstractEventLoop) -> None:
        self.scorer, self.loop, self.facts = scorer, loop, scorer.facts
        self._asking: Future[Any] | None = None
        self._stopped = False

    def score(self, source: WindowSource, done: Bools, want: Want = SCORES) -> Iterator[tuple[int, Answers]]:
        if want != SCORES:
            raise EngineError("this engine gives scores only", fix="leave out what else is wanted")
        todo = [int(i) for i in np.flatnonzero(~done)]
        groups = source.prefix_group
        shared = tuple(groups is not None and int((groups == groups[i]).sum()) > 1 for i in todo)
        most = self.scorer.limits.windows
        for first in range(0, len(todo), most):
            part = todo[first : first + most]
            windows = tuple(source.window(i) for i in part)
            answers = self._wait(Asked(windows, source.vocabulary or 0, shared[first : first + most]))
            yield from zip(part, answers, strict=True)

    def _wait(self, asked: Asked) -> Any:
        if self._stopped:
            raise EngineError("nobody waits for this answer", fix="ask again")
        self._asking = asyncio.run_coroutine_threadsafe(self.scorer.score(asked), self.loop)
        return self._asking.result()

    def stop(self) -> None:
        """The client is gone: what is in flight is forgotten."""
        self._stopped = True
        if self._asking is not None:
            self._asking.cancel()


class ProbScorer:
    """Answers the prob route."""

    def __init__(self, scorer: Scorer, name: str) -> None:
        self.scorer, self.name = scorer, name
        self._turns = asyncio.Semaphore(AT_A_TIME)

    async def answer(self, given: ProbForm) -> dict[str, Any]:
        """Results for each pair, as ``scoremode prob --json`` prints them."""
        async with self._turns:
            engine = ScorerEngine(self.scorer, asyncio.get_running_loop())
            try:
                return await asyncio.to_thread(self._answer, given, engine)
            except asyncio.CancelledError:
                engine.stop()
                raise

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        config = self.scorer.client.vllm_config.model_config
        return HuggingFaceTokenizer.load(config.tokenizer, trust_remote_code=bool(config.trust_remote_code))

    @cached_property
    def token_texts(self) -> list[str]:
        """What every id that has a probability stands for."""
        most = self.scorer.room.vocabulary
        known = min(most, self.tokenizer.facts.size)
        return [self.tokenizer.token_text(i) for i in range(known)] + [""] * (most - known)

    def _answer(self, given: ProbForm, engine: ScorerEngine) -> dict[str, Any]:
        name, facts = self.name, engine.facts
        subject = Subject(name, self.tokenizer, name, vocabulary=facts.vocabulary, context_length=facts.context_length)
        held = LazyModel(Chosen(GivenEngine(engine), Options(), subject))
        rules: dict[str, Any] = {rule: getattr(given, rule) for rule in ("leading_space", "spanning", "add_bos")}
        lm = SequenceProbability(held, **{rule: value for rule, value in rules.items() if value is not None})
        pairs = list(paired(given.prompt, given.targets))
        most = self.scorer.limits.windows
        if len(pairs) > most:
            raise TooLargeError(
                f"{len(pairs)} pairs are more than the {most} of a request", fix="send several requests"
            )
        return {"results": [found.as_json() for found in lm.score(lm.encode(pairs))]}
