"""P(target | prompt) for clients that send text: the tokenizer and the boundary rule are the service's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np

from scoremode.engines.base import SCORES, Engine, Want
from scoremode.engines.messages import Asked
from scoremode.engines.options import Options
from scoremode.engines.registry import Chosen
from scoremode.errors import EngineError, InputError
from scoremode.models.subject import Subject
from scoremode.plan.windows import Answers, WindowSource
from scoremode.service.forms import take
from scoremode.service.limits import TooLargeError
from scoremode.service.scoring import Scorer
from scoremode.text.tokenizer import HuggingFaceTokenizer, TextTokenizer
from scoremode.values import Bools
from scoremode.verbs.model import GivenEngine, HeldModel
from scoremode.verbs.prob.sequence import SequenceProbability, paired

EXAMPLE = 'send {"prompt": "The capital of France is", "targets": [" Paris", " London"]}'
FIELDS: dict[str, type | tuple[type, ...]] = {
    "prompt": (str, list),
    "targets": (str, list),
    "leading_space": str,
    "spanning": str,
    "add_bos": bool,
}
AT_A_TIME = 4  # requests that are tokenized at once


class ServedEngine(Engine):
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


class Prober:
    """Answers the prob route."""

    def __init__(self, scorer: Scorer, name: str) -> None:
        self.scorer, self.name = scorer, name
        self._tokenizer: TextTokenizer | None = None
        self._texts: list[str] | None = None
        self._turns = asyncio.Semaphore(AT_A_TIME)

    async def answer(self, value: dict[str, Any]) -> dict[str, Any]:
        """Results for each pair, as ``scoremode prob --json`` prints them."""
        given = take(value, FIELDS, EXAMPLE)
        if "prompt" not in given or "targets" not in given:
            raise InputError("prompt and targets are not both there", fix=EXAMPLE)
        for name in ("prompt", "targets"):
            if not all(isinstance(text, str) for text in given[name]):
                raise InputError(f"{name} is not text, or a list of texts", fix=EXAMPLE)
        async with self._turns:
            engine = ServedEngine(self.scorer, asyncio.get_running_loop())
            try:
                return await asyncio.to_thread(self._answer, given, engine)
            except asyncio.CancelledError:
                engine.stop()
                raise

    def texts(self) -> list[str]:
        """What every id that has a probability stands for."""
        if self._texts is None:
            tokenizer, most = self.tokenizer(), self.scorer.room.vocabulary
            known = min(most, tokenizer.facts.size)
            self._texts = [tokenizer.token_text(i) for i in range(known)] + [""] * (most - known)
        return self._texts

    def _answer(self, given: dict[str, Any], engine: ServedEngine) -> dict[str, Any]:
        held = HeldModel(Chosen(GivenEngine(engine), Options(), self._subject(engine)))
        rules = {name: given[name] for name in ("leading_space", "spanning", "add_bos") if name in given}
        lm = SequenceProbability(held, **rules)
        pairs = list(paired(given["prompt"], given["targets"]))
        most = self.scorer.limits.windows
        if len(pairs) > most:
            raise TooLargeError(
                f"{len(pairs)} pairs are more than the {most} of a request", fix="send several requests"
            )
        return {"results": [found.as_json() for found in lm.score(lm.encode(pairs))]}

    def tokenizer(self) -> TextTokenizer:
        if self._tokenizer is None:
            config = self.scorer.client.vllm_config.model_config
            self._tokenizer = HuggingFaceTokenizer.load(
                config.tokenizer, trust_remote_code=bool(config.trust_remote_code)
            )
        return self._tokenizer

    def _subject(self, engine: ServedEngine) -> Subject:
        facts = engine.facts
        return Subject(
            self.name, self.tokenizer(), self.name, vocabulary=facts.vocabulary, context_length=facts.context_length
        )
