"""Writes texts with stock vLLM: its scheduler, CUDA graphs and sampler, as they are deployed.

Our wrapper around the sampler (vllm_written_tokens.py) keeps the log-probability of each token in the model's own
distribution, and in the one that it was drawn from. What it kept of texts that have ended is fetched for many of them
at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scoremode.core.engine.plugin import Work
from scoremode.core.models.facts import ModelFacts
from scoremode.core.models.subject import Subject
from scoremode.engines.vllm import VllmPlugin, support
from scoremode.engines.vllm.processes import VllmLog, end
from scoremode.engines.vllm.self_test import SelfTestVerdict, engine_facts
from scoremode.engines.vllm.start import start
from scoremode.engines.vllm.support import LaunchArguments, VllmOptions
from scoremode.errors import EngineError
from scoremode.studies.rollouts.texts import WrittenTokens
from scoremode.studies.rollouts.writing import DrawingRules, Tell, Writer, WritingRequest, end_tokens
from scoremode.values import Bools, Ids

FETCHED = 64  # texts that have ended, at most, before what belongs to them is fetched: each time, vLLM stands still
PATIENCE = 5.0  # seconds; the longest that a finished text waits to be fetched: a kill loses what waits

NOT_WHILE_WRITING = {
    "speculative_config": "tokens that are guessed ahead are drawn by another rule",
    "worker_extension_cls": "rollouts have an extension of their own",
    "logits_processors": "texts would be those of another distribution",
}


def open_writer(
    plugin: VllmPlugin, subject: Subject, options: VllmOptions, work: Work, rules: DrawingRules
) -> VllmWriter:
    assert subject.checkpoint is not None
    return VllmWriter(subject.checkpoint, options, work, rules, end_tokens(subject))


class VllmWriter(Writer):
    """Writes texts with stock vLLM, which is started for this alone."""

    def __init__(
        self, facts: ModelFacts, options: VllmOptions, work: Work, rules: DrawingRules, ends: frozenset[int]
    ) -> None:
        launch = LaunchArguments.for_work(options, replace(work, path=None))
        version = support.installed_version()
        support.check_version(version, launch.allow_untested)
        arguments = _arguments(launch, work, rules)
        self.rules, self.ends, self.log = rules, ends, VllmLog()
        self.llm: Any
        self.llm, self._processes = start(str(facts.path), arguments, self.log)
        try:
            config = self.llm.llm_engine.vllm_config
            self._most_requests = 2 * int(config.scheduler_config.max_num_seqs)
            served = SelfTestVerdict(0.0, 0.0, False, int(config.model_config.get_vocab_size()), {})
            llm_facts = engine_facts(config, version, served, gathered=False)
            self.facts = replace(llm_facts, context_length=facts.context_length, notes=(*facts.notes, *llm_facts.notes))
            self._call_workers("scoremode_write", _draws_its_own(rules))
        except BaseException:
            self.close()
            raise

    def write(self, requests: Sequence[WritingRequest], done: Bools, tell: Tell) -> Iterator[tuple[int, WrittenTokens]]:
        """vLLM forms batches from whatever is in flight: a resumed run writes the same texts only if its kernels do."""
        waiting, engine = iter(np.flatnonzero(~done).tolist()), self.llm.llm_engine
        flying: dict[str, int] = {}
        ended: dict[int, Ids] = {}  # texts whose log-probabilities are not fetched yet
        fetched = time.monotonic()
        while True:
            while len(flying) < self._most_requests and (index := next(waiting, None)) is not None:
                with self.log.explaining("vLLM refused a prompt", EngineError):
                    prompt = {"type": "token", "prompt_token_ids": requests[index].prompt.tolist()}
                    engine.add_request(name := f"scoremode-{index}", prompt, self._params(requests[index]))
                flying[name] = index
            if flying:
                with self.log.explaining("vLLM stopped", EngineError):
                    finished = [output for output in engine.step() if output.finished]
                for output in finished:
                    ids = np.array(output.outputs[0].token_ids, np.int32)
                    ended[flying.pop(output.request_id)] = ids
                    tell(len(ids))
            if ended and (not flying or len(ended) >= FETCHED or time.monotonic() - fetched > PATIENCE):
                yield from self._fetch(requests, ended)
                ended, fetched = {}, time.monotonic()
            if not flying:
                return

    def _fetch(self, requests: Sequence[WritingRequest], ended: dict[int, Ids]) -> Iterator[tuple[int, WrittenTokens]]:
        prompts = [len(requests[index].prompt) for index in ended]
        lengths = [len(ids) for ids in ended.values()]
        ranks = self._call_workers("scoremode_take", list(ended), prompts, lengths)
        parts: list[bytes] = next(filter(any, ranks), [b""] * len(ended))  # ranks that do not sample have no lines
        for (index, ids), part in zip(ended.items(), parts, strict=True):
            lines = np.frombuffer(part, np.float32).reshape(-1, 3)
            if not np.array_equal(np.ascontiguousarray(lines[:, 2]).view(np.int32), ids):
                raise EngineError(
                    "the log-probabilities are of other tokens than vLLM gave",
                    fix="please report the model and the version of vLLM",
                )
            drawn, raw = np.minimum(lines[:, :2].astype(np.float64), 0.0).T
            yield index, WrittenTokens(ids, np.zeros(len(ids)) if self.rules.is_greedy else drawn, raw)

    def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        with self.log.explaining("vLLM stopped", EngineError):
            answers: list[Any] = self.llm.llm_engine.collective_rpc(method, args=arguments)
        return answers

    def _params(self, request: WritingRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        rules = self.rules
        return SamplingParams(
            temperature=rules.temperature,
            top_p=rules.top_p,
            top_k=rules.top_k,
            min_p=rules.min_p,
            seed=request.seed,
            max_tokens=request.room,
            ignore_eos=True,  # the end tokens are named, so that every engine ends its texts at the same ones
            stop_token_ids=sorted(self.ends),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def close(self) -> None:
        llm, self.llm = self.llm, None
        if llm is not None:
            end(llm, self._processes, self.log)


def _draws_its_own(rules: DrawingRules) -> bool:
    """Are tokens drawn from the model's own distribution, or greedily?"""
    return rules.is_greedy or rules.is_own


def _arguments(launch: LaunchArguments, work: Work, rules: DrawingRules) -> dict[str, Any]:
    from vllm.platforms import current_platform

    support.refuse_arguments(launch.extra, NOT_WHILE_WRITING)
    extension = "scoremode.studies.rollouts.engines.vllm_written_tokens.WritingWorker"
    arguments: dict[str, Any] = {"skip_tokenizer_init": True, "worker_extension_cls": extension}
    if not _draws_its_own(rules):  # a sampler that does not show its filters is not chosen then
        arguments["logprobs_mode"] = "processed_logprobs"
    if not rules.is_greedy and current_platform.is_cpu():
        # vLLM takes a draw back that belongs to a chunk of a prompt, and a generator on a CPU cannot do that
        arguments["enable_chunked_prefill"] = False
    if work.path is not None:
        arguments["max_num_seqs"] = work.path.sequences
    return {**launch.arguments(), **arguments}
