"""The engine: sends many windows at a time to vLLM's scheduler and yields each answer when its prompt is done."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from scoremode.core.engine.base import (
    SCORES,
    Baseline,
    Engine,
    NoiseFloor,
    StoredHead,
    Wanted,
    WholeDistributions,
    require_one_vocabulary,
)
from scoremode.core.engine.batching import in_groups
from scoremode.core.references.format import RAW_DTYPES as RAW
from scoremode.core.scores.answers import Answers, Window, WindowList, WindowSource
from scoremode.engines.vllm import support
from scoremode.engines.vllm.processes import VllmLog, end
from scoremode.engines.vllm.self_test import (
    HeadFacts,
    SelfTestVerdict,
    dtype_of,
    engine_facts,
    judge_answers,
    request_for_test,
    require_agreement,
)
from scoremode.engines.vllm.start import start
from scoremode.engines.vllm.support import LaunchArguments
from scoremode.engines.vllm.wire import (
    DIVERGENCE_WORDS,
    ExtraResults,
    Job,
    Request,
    Words,
    line_words,
    read_divergences,
    states_words,
)
from scoremode.errors import EngineError, InputError, ModelError, OptionError
from scoremode.values import Bools, Floats, Ids, Ints

logger = logging.getLogger(__name__)

STEPS_AHEAD = 8  # batches of prompts that wait after the one being computed, so that the scheduler never runs out
SMALLEST_BATCH = 256  # tokens
GRAPHS = 256  # tokens: vLLM pads steps up to this size to multiples of 8, and somewhat larger steps to multiples of 16
HEAD_BYTES = 16 << 20  # bytes of the head's matrix per answer


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    name: str
    words: Words
    cached_tokens: int  # tokens of the prompt that were in the prefix cache


class VllmEngine(Engine):
    """Scores with the kernels that vLLM uses for serving.

    >>> with VllmEngine("HuggingFaceTB/SmolLM2-135M") as engine:        # doctest: +SKIP
    ...     for index, answers in engine.score(plan, np.zeros(len(plan), bool)):
    ...         ...
    """

    def __init__(
        self,
        model: str,
        options: LaunchArguments | None = None,
        *,
        tokenizer: bool = False,
        context: int | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.model, self.options, self._tokenizer = model, options or LaunchArguments(), tokenizer
        self._own_context = context  # context length of the model; vLLM may be started for shorter windows
        self.cached_tokens = 0  # prompt tokens taken from the prefix cache so far
        self._notes, self._one_by_one = notes, False
        self._has_answered = False
        self.llm: Any = None
        self._begin()

    def _begin(self) -> None:
        """Start vLLM, and stop with an error unless our scores agree with those of its own ``compute_logits``."""
        arguments = self.options.arguments()
        version = support.installed_version()
        support.check_version(version, self.options.allow_untested)
        support.check_plugin()
        self.log = VllmLog()
        self.llm, self._processes = start(self.model, arguments, self.log, self.options, tokenizer=self._tokenizer)
        try:
            config = self.llm.llm_engine.vllm_config
            self._batch_tokens = int(config.scheduler_config.max_num_batched_tokens)
            self._most_requests = 2 * int(config.scheduler_config.max_num_seqs)
            self._block = int(config.cache_config.block_size)
            self._longest = self.longest = int(config.model_config.max_model_len)
            context = self._own_context or getattr(config.model_config.hf_text_config, "max_position_embeddings", 0)
            self._context = max(self._longest, int(context or 0))
            self._vocabulary = int(config.model_config.get_vocab_size())
            self._asked = 0
            self._gather = False
            self._attach()
            verdict = self._self_test(version)
            self._has_answered = True
            self._head = verdict.head
            facts = engine_facts(config, version, verdict, gathered=self._gather, path=self.path)
            self.facts = replace(facts, context_length=self._context, notes=(*self._notes, *facts.notes))
            wanted = self.options.head_kernel
            if wanted not in (None, facts.settings["head_kernel"]):
                reason = "this model's head is not a plain matrix, so the model's own logits are used"
                raise OptionError(f"--head-kernel {wanted}: {reason}", fix="leave --head-kernel out")
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        """Prepares vLLM's workers for requests, if they need it. Called after each start."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        """Answers of every window that is not ``done``, as they finish.

        vLLM forms batches from whatever is in flight, so a resumed run gives the same numbers only up to float noise.
        If memory runs out, vLLM is restarted with smaller batches, and only the missing windows are scored.
        """
        if want.records or isinstance(want.against, WholeDistributions):
            import torch

            from scoremode.core.engine.distributions import LogitsOfStates, with_distributions

            # on the CPU, from the workers' states and the model's head
            made = LogitsOfStates.by(self.stored_head(), self._head_facts().dtype, torch.device("cpu"))
            yield from with_distributions(self._with_states(source, done), source, want, made)
        elif want.states and want.against is not None:
            raise EngineError("vLLM gives hidden states or a divergence, not both at once", fix="ask for one of them")
        elif want.states:
            yield from self._with_states(source, done)
        elif want.against is not None:
            if want.against.place is None:
                raise EngineError("vLLM needs a reference to compare with", fix="make one with scoremode reference")
            require_one_vocabulary(want.against.head.vocabulary, self.facts.vocabulary)
            extra = ExtraResults("kl", DIVERGENCE_WORDS, *want.against.place)
            for index, answers, extras in self._score(source, done, extra):
                yield index, answers.apart(read_divergences(extras))
        else:
            for index, answers, _ in self._score(source, done, ExtraResults()):
                yield index, answers

    def _with_states(self, source: WindowSource, done: Bools) -> Iterator[tuple[int, Answers]]:
        head = self._head_facts()
        extra = ExtraResults("states", words=states_words(head.width, head.itemsize))
        for index, answers, extras in self._score(source, done, extra):
            raw = extras.view(RAW[head.dtype]).reshape(len(extras), -1)
            yield index, replace(answers, states=np.ascontiguousarray(raw[:, : head.width]))

    def noise_floor(self, baseline: Baseline, source: WindowSource, done: Bools) -> NoiseFloor:
        """Score shortened windows one by one."""
        if baseline.place is None:
            return NoiseFloor(None, "vLLM needs a reference to compare with")
        (folder, offsets), chosen = baseline.place, list[tuple[int, Window, Bools]]()
        measured = {} if self.measured is None else self.measured
        for index in np.flatnonzero(~done).tolist():
            whole = source.window(index)
            short = shortened(whole, self._batch_tokens)
            counted = rows_in_other_steps(whole, short, self._batch_tokens)
            if counted.any() and index not in measured:
                chosen.append((index, short, counted))
        if chosen:
            self._measure_one_by_one(chosen, source.vocabulary, folder, offsets, measured)
        if not measured:
            return NoiseFloor(None, "the windows are too short to be shortened further")
        return NoiseFloor(np.concatenate([*measured.values()]), "windows one by one, cut after half of their targets")

    def _measure_one_by_one(
        self,
        chosen: list[tuple[int, Window, Bools]],
        vocabulary: int | None,
        folder: str,
        offsets: Ints,
        measured: MutableMapping[int, Floats],
    ) -> None:
        """Adds the KL of the counted rows of windows, in the order in which they come."""
        indices, windows, counts = zip(*chosen, strict=True)
        extra = ExtraResults("kl", DIVERGENCE_WORDS, folder, offsets[list(indices)])
        self._one_by_one = True
        try:
            answers = self._score(WindowList(windows, vocabulary=vocabulary), np.zeros(len(windows), bool), extra)
            for place, _, extras in answers:
                measured[indices[place]] = read_divergences(extras)["kl"][counts[place]]
        finally:
            self._one_by_one = False

    def stored_head(self) -> StoredHead:
        head = self._head_facts()
        line = states_words(head.width, head.itemsize)
        weight = np.empty((head.rows, head.width), RAW[head.dtype])
        bias = np.empty(head.rows, np.float32)
        step = max(1, HEAD_BYTES // (4 * line))
        for first in range(0, head.rows, step):
            count = min(step, head.rows - first)
            nothing = Request(np.zeros(1, np.int32), np.zeros((1, 1), np.int32))
            request = replace(nothing, extra="head", first=first, count=count)
            lines = self._one(np.ones(2, np.int32), request)  # the prompt does not matter
            block = np.ascontiguousarray(lines[:, :line]).view(RAW[head.dtype])
            weight[first : first + count] = block.reshape(count, -1)[:, : head.width]
            bias[first : first + count] = np.ascontiguousarray(lines[:, line]).view(np.float32)
        stored_bias = bias if head.has_bias else None
        assert self.facts.vocabulary is not None
        return StoredHead(weight, stored_bias, head.dtype, "float32", self.facts.vocabulary, head.scale, head.softcap)

    def _head_facts(self) -> HeadFacts:
        if self._head is None:
            raise ModelError(
                "the head of this model is not a plain matrix of floats, so no reference can be kept",
                fix="use an unquantized baseline, and leave --head out",
            )
        return self._head

    def _one(self, ids: Ids, request: Request) -> Words:
        """Send one request and wait for its answer; no other request may be in flight."""
        name = self._submit(ids, request)
        answers: list[Finished] = []
        while not answers:
            answers = [answer for answer in self._step() if answer.name == name]
        return answers[0].words

    def _score(self, source: WindowSource, done: Bools, extra: ExtraResults) -> Iterator[tuple[int, Answers, Words]]:
        answered = done.copy()
        while not answered.all():
            try:
                for index, answers, extras in self._stream(source, answered.copy(), extra):
                    answered[index] = True
                    yield index, answers, extras
            except EngineError:
                if not self._begin_smaller():
                    raise

    def _begin_smaller(self) -> bool:
        """After running out of memory, restart vLLM with half the tokens per batch; False if that is not possible."""
        tokens = self._batch_tokens // 2
        if not self.log.ran_out_of_memory() or tokens < SMALLEST_BATCH:
            return False
        self.log.discard()
        logger.warning("out of memory; restarting vLLM with --max-num-batched-tokens %d", tokens)
        self.close()
        self.options = self.options.in_batches_of(tokens)
        self._begin()
        return True

    def _stream(self, source: WindowSource, done: Bools, extra: ExtraResults) -> Iterator[tuple[int, Answers, Words]]:
        """One pass over the windows that are not done, with a bounded number of prompts in flight."""
        jobs: deque[Job] = deque()  # missing rows of windows whose first rows were in the prefix cache
        flying: dict[str, Job] = {}
        fresh, waiting = self._jobs(source, done, extra), True
        try:
            while waiting or flying or jobs:
                while self._has_room(flying):
                    job = jobs.popleft() if jobs else next(fresh, None)
                    if job is None:
                        waiting = False
                        break
                    if len(job.window.rows) == 0:
                        job.lines = np.zeros((0, line_words(job.targets) + extra.words), np.int32)
                        yield job.index, *job.answers()
                        continue
                    flying[self._submit(job.window.ids, job.request(self._gather), job.read_cache)] = job
                for answer in self._step() if flying else ():
                    job = flying.pop(answer.name)
                    self.cached_tokens += answer.cached_tokens
                    rest = job.take(answer.words, self._block)
                    if rest is not None:
                        jobs.append(rest)
                    else:
                        yield job.index, *job.answers()
        except KeyboardInterrupt:
            flying.clear()  # the engine was interrupted too and may not respond: it will be closed
            raise
        finally:
            if flying:  # nobody reads the remaining answers
                self._abort(list(flying))

    def _abort(self, names: list[str]) -> None:
        with contextlib.suppress(Exception):  # a dead engine has forgotten them
            self.llm.llm_engine.abort_request(names)

    def _jobs(self, source: WindowSource, done: Bools, extra: ExtraResults) -> Iterator[Job]:
        """A job for each window that is not done, in plan order; windows with a common prefix follow each other."""
        order, shared = in_groups(source, done)
        for index in order.tolist():
            window = source.window(index)
            self._check(window, index)
            if len(window.rows):  # tokens after the last requested row change no answer
                window = replace(window, ids=window.ids[: int(window.rows[-1]) + 1])
            read_cache = self.options.prefix_caching and bool(shared[index])
            yield Job(index, window, read_cache, source.vocabulary or 0, extra)

    def _has_room(self, flying: dict[str, Job]) -> bool:
        if self._one_by_one:
            return not flying
        tokens = sum(len(job.window.ids) for job in flying.values())
        return len(flying) < 2 or (tokens < STEPS_AHEAD * self._batch_tokens and len(flying) < self._most_requests)

    def _check(self, window: Window, index: int) -> None:
        """Refuse windows that would crash vLLM's workers."""
        if len(window.ids) > self._longest:
            larger = f", or a --max-model-len of up to {self._context}" if self._context > self._longest else ""
            raise InputError(
                f"window {index} has {len(window.ids)} tokens, vLLM was started for {self._longest}",
                fix=f"give --context-length {self._longest}{larger}",
            )
        for ids in (window.ids, window.targets):
            if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < self._vocabulary):
                raise InputError(
                    f"window {index} has ids outside the model's {self._vocabulary} tokens", fix="check the tokenizer"
                )

    def _submit(self, ids: Ids, request: Request, read_cache: bool = False) -> str:
        from vllm import PoolingParams

        from scoremode.engines.vllm.pooler import TASK

        self._asked += 1
        name = f"scoremode-{self._asked}"
        params = PoolingParams(task=TASK, skip_reading_prefix_cache=not read_cache, extra_kwargs=request.to_kwargs())
        with self._explaining():
            # a dict with "type" is what vLLM's own renderer produces: nothing is tokenized, truncated or copied again
            self.llm.llm_engine.add_request(name, {"type": "token", "prompt_token_ids": ids.tolist()}, params)
        return name

    def _step(self) -> list[Finished]:
        """Lets vLLM compute one step, and returns the answers of the requests that it finished."""
        with self._explaining():
            finished = [output for output in self.llm.llm_engine.step() if output.finished]
        return [
            Finished(o.request_id, np.asarray(o.outputs.data), int(getattr(o, "num_cached_tokens", 0) or 0))
            for o in finished
        ]

    def _explaining(self) -> contextlib.AbstractContextManager[None]:
        """Explains exceptions of vLLM: a dead engine may show up on a request or on a step."""
        if self._has_answered:
            fix = "run the same command again to resume"
        else:  # it cannot run this model, and would stop again
            fix = "use --engine transformers, or other options of vLLM"
        return self.log.explaining("vLLM stopped", EngineError, fix)

    # ── start and end ────────────────────────────────────────────────────────────────────────────────────────────────
    def _self_test(self, version: str) -> SelfTestVerdict:
        """Compare our scores with those of the model's own ``compute_logits``; raise an error if they disagree."""
        config, tried = self.llm.llm_engine.vllm_config, list[SelfTestVerdict]()
        for gather in (False, True) if config.parallel_config.tensor_parallel_size > 1 else (False,):
            lines = self._one(*request_for_test(self._vocabulary, self._longest, gather=gather))
            tried.append(judge_answers(lines, dtype_of(config)))
            if tried[-1].agrees:
                # models that mask logits by index are wrong on shards but right on gathered logits
                self._gather = gather
                break
        return require_agreement(tried, version)

    def close(self) -> None:
        """Stop every process that vLLM started, and wait for them; after an interruption, kill them at once."""
        llm, self.llm = self.llm, None
        if llm is not None:
            end(llm, self._processes, self.log)


# ── the noise floor ──────────────────────────────────────────────────────────────────────────────────────────────────
# A window is scored again without its last tokens and the rows at those tokens. vLLM certainly computes its last rows
# in a different step than usual. It fills each step with whatever is waiting, up to ``max_num_batched_tokens``, and
# does not tell which prompts shared a step. But if a prompt of c tokens is the only one in flight, the size of its last
# step is known. The whole window has more than c tokens, so its rows were never computed in such a step: the step had
# more tokens, or the rows were elsewhere in it.
def shortened(whole: Window, step: int) -> Window:
    """A window of which half of the requested rows remain, and whose last step, of ``step`` tokens, is not full."""
    end = 0
    if len(whole.rows):
        first = int(whole.rows[0]) + 1
        end = first + (len(whole.ids) - first) // 2
        end -= end % step == 0
    count = int(np.searchsorted(whole.rows, end))
    return replace(whole, ids=whole.ids[:end], rows=whole.rows[:count], targets=whole.targets[:count])


def rows_in_other_steps(whole: Window, short: Window, step: int) -> Bools:
    """Which remaining rows are certainly computed in a different step: those of the last step, if it is shorter."""
    missing = len(whole.ids) - len(short.ids)
    if missing < (8 if len(whole.ids) <= GRAPHS else 16):  # padding could make up for so few missing tokens
        return np.zeros(len(short.rows), np.bool_)
    last_step: Bools = short.rows >= (len(short.ids) - 1) // step * step
    return last_step
