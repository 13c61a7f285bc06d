"""Scores windows of many clients with one vLLM, whose scheduler decides what is computed when.

Also scores P(target | prompt) for clients that send text, with the service's own tokenizer and boundary rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from scoremode.core.engine.base import SCORES, Engine, EngineFacts, Wanted
from scoremode.core.engine.options import Options
from scoremode.core.engine.registry import ChosenEngine
from scoremode.core.models.subject import Subject
from scoremode.core.scores.answers import Answers, WindowSource
from scoremode.core.scores.messages import Asked, TooLargeError
from scoremode.core.text.tokenizer import HuggingFaceTokenizer, TextTokenizer
from scoremode.core.verbs.model import GivenEngine, LazyModel
from scoremode.core.verbs.prob.sequence import SequenceProbability, paired
from scoremode.engines.vllm import support
from scoremode.engines.vllm.self_test import (
    TEST_TARGETS,
    SelfTestVerdict,
    dtype_of,
    engine_facts,
    judge_answers,
    request_for_test,
    require_agreement,
)
from scoremode.engines.vllm.wire import ExtraResults, Job, Request, Words, line_words, read_lines
from scoremode.errors import EngineError
from scoremode.remote.service.requests import MOST_WINDOWS, ModelLimits, check
from scoremode.values import Bools, Ids

PROB_EXAMPLE = 'send {"prompt": "The capital of France is", "targets": [" Paris", " London"]}'
AT_A_TIME = 4  # requests of the prob route that are answered at once
NO_EXTRA = ExtraResults()


class Scorer:
    """vLLM's ``EngineClient`` in score mode. It answers requests only after its self-test has passed."""

    facts: EngineFacts
    probe: list[float]  # scores of the self-test's prompt; other weights give other scores

    def __init__(self, client: Any) -> None:
        self.client, config = client, client.vllm_config
        model, scheduler = config.model_config, config.scheduler_config
        self.batch_tokens = int(scheduler.max_num_batched_tokens)
        longest, inputs = int(model.max_model_len), int(model.get_vocab_size())
        self.room = ModelLimits(longest, inputs, inputs)
        self._replicas = int(config.parallel_config.data_parallel_size)
        self._block = int(config.cache_config.block_size)
        self._caches = bool(config.cache_config.enable_prefix_caching)
        self._ranks = int(config.parallel_config.tensor_parallel_size)
        self._gather, self._asked = False, 0

    async def start(self) -> None:
        """Runs the self-test: on every replica, our scores must agree with the model's own ``compute_logits``."""
        version, config = support.installed_version(), self.client.vllm_config
        tried: list[SelfTestVerdict] = []
        answers: list[Words] = []
        for gather in (False, True) if self._ranks > 1 else (False,):
            ids, request = request_for_test(self.room.inputs, self.room.longest, gather=gather)
            # send one request per replica at once, because vLLM gives one to each replica
            answers = await asyncio.gather(*(self._submit(ids, request) for _ in range(self._replicas)))
            verdicts = [judge_answers(answer, dtype_of(config)) for answer in answers]
            tried.append(max(verdicts, key=lambda verdict: verdict.error - verdict.allowed))
            if tried[-1].agrees:
                self._gather = gather
                break
        verdict = require_agreement(tried, version)
        self.probe = read_lines(answers[0], TEST_TARGETS).logprob[:, 0].tolist()
        self.room = replace(self.room, vocabulary=verdict.vocabulary)
        self.facts = engine_facts(config, version, verdict, gathered=self._gather)

    async def score(self, score_request: Asked) -> list[Answers]:
        check(score_request, self.room)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._window(score_request, index)) for index in range(len(score_request.windows))
            ]
        return [task.result() for task in tasks]

    async def _window(self, score_request: Asked, index: int) -> Answers:
        window = score_request.windows[index]
        if not len(window.rows):
            k = window.targets.shape[1]
            return read_lines(np.zeros((0, line_words(k)), np.int32), k)
        shared = bool(score_request.shared) and score_request.shared[index] and self._caches
        # tokens after the last requested row change no answer
        fed = replace(window, ids=window.ids[: int(window.rows[-1]) + 1])
        job = Job(index, fed, shared, score_request.vocabulary, NO_EXTRA)
        while True:
            answer = await self._submit(job.window.ids, job.request(self._gather), job.read_cache)
            rest = job.take(answer, self._block)
            if rest is None:
                return job.answers()[0]
            job = rest

    async def _submit(self, ids: Ids, request: Request, read_cache: bool = False) -> Words:
        from vllm import PoolingParams

        from scoremode.engines.vllm.pooler import TASK

        self._asked += 1
        params = PoolingParams(task=TASK, skip_reading_prefix_cache=not read_cache, extra_kwargs=request.to_kwargs())
        prompt = {"type": "token", "prompt_token_ids": ids.tolist()}  # the same form as from vLLM's own renderer
        async for output in self.client.encode(prompt, params, f"scoremode-{self._asked}"):
            if output.finished:
                return np.asarray(output.outputs.data)
        raise EngineError("vLLM ended a request without an answer", fix="see the server's log")


# ── text ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class ProbForm(msgspec.Struct, forbid_unknown_fields=True):
    """The body of the prob route, with the options of ``scoremode prob`` and their defaults."""

    prompt: str | list[str]
    targets: str | list[str]
    leading_space: str | None = None
    spanning: str | None = None
    add_bos: bool | None = None


class ScorerEngine(Engine):
    """The service as an engine for synchronous code, which runs in its own thread and waits for answers."""

    def __init__(self, scorer: Scorer, loop: asyncio.AbstractEventLoop) -> None:
        self.scorer, self.loop, self.facts = scorer, loop, scorer.facts

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        if want != SCORES:
            raise EngineError("this engine gives scores only", fix="leave out what else is wanted")
        todo = [int(i) for i in np.flatnonzero(~done)]
        groups = source.prefix_group
        shared = tuple(groups is not None and int((groups == groups[i]).sum()) > 1 for i in todo)
        for first in range(0, len(todo), MOST_WINDOWS):
            part = todo[first : first + MOST_WINDOWS]
            windows = tuple(source.window(i) for i in part)
            score_request = Asked(windows, source.vocabulary or 0, shared[first : first + MOST_WINDOWS])
            answers = asyncio.run_coroutine_threadsafe(self.scorer.score(score_request), self.loop).result()
            yield from zip(part, answers, strict=True)


class ProbScorer:
    def __init__(self, scorer: Scorer, name: str) -> None:
        self.scorer, self.name = scorer, name
        self._turns = asyncio.Semaphore(AT_A_TIME)

    async def answer(self, form: ProbForm) -> dict[str, Any]:
        """Returns the result for each pair of prompt and target, in the form of ``scoremode prob --json``."""
        async with self._turns:
            engine = ScorerEngine(self.scorer, asyncio.get_running_loop())
            return await asyncio.to_thread(self._answer, form, engine)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        config = self.scorer.client.vllm_config.model_config
        return HuggingFaceTokenizer.load(config.tokenizer, trust_remote_code=bool(config.trust_remote_code))

    @cached_property
    def token_texts(self) -> list[str]:
        most = self.scorer.room.vocabulary
        size = min(most, self.tokenizer.facts.size)
        return [self.tokenizer.token_text(i) for i in range(size)] + [""] * (most - size)

    def _answer(self, form: ProbForm, engine: ScorerEngine) -> dict[str, Any]:
        name, facts = self.name, engine.facts
        subject = Subject(name, self.tokenizer, name, vocabulary=facts.vocabulary, context_length=facts.context_length)
        held = LazyModel.of(ChosenEngine(GivenEngine(engine, subject), Options(), subject))
        rules: dict[str, Any] = {rule: getattr(form, rule) for rule in ("leading_space", "spanning", "add_bos")}
        lm = SequenceProbability(held, **{rule: value for rule, value in rules.items() if value is not None})
        pairs = list(paired(form.prompt, form.targets))
        if len(pairs) > MOST_WINDOWS:
            raise TooLargeError(
                f"{len(pairs)} pairs are more than the {MOST_WINDOWS} of a request", fix="send several requests"
            )
        return {"results": [result.as_json() for result in lm.score(lm.encode(pairs))]}
