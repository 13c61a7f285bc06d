"""Writes texts with stock vLLM: its scheduler, CUDA graphs and sampler, as they are deployed.

vLLM gives one log-probability of a sampled token. Drawn greedily, or from the model's own distribution, the other one
follows from it. Else vLLM gives that of the distribution which was drawn from, and our wrapper around its sampler
(written_tokens.py) adds the model's own: as the bits of a float32, in the field of the token's rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scoremode.engines.plugin import Work
from scoremode.engines.vllm import support
from scoremode.engines.vllm.processes import VllmLog, end
from scoremode.engines.vllm.self_test import Verdict, engine_facts
from scoremode.engines.vllm.start import start
from scoremode.engines.vllm.support import LaunchArguments, VllmOptions
from scoremode.engines.writing import DrawingRules, Tell, Writer, WritingRequest, WrittenTokens
from scoremode.errors import EngineError
from scoremode.models.facts import ModelFacts
from scoremode.values import Bools

NOT_WHILE_WRITING = {
    "speculative_config": "tokens that are guessed ahead are drawn by another rule",
    "worker_extension_cls": "rollouts have an extension of their own",
    "logits_processors": "texts would be those of another distribution",
}


class VllmWriter(Writer):
    """Writes texts with stock vLLM, which is started for this alone."""

    def __init__(
        self, facts: ModelFacts, options: VllmOptions, work: Work, rules: DrawingRules, ends: frozenset[int]
    ) -> None:
        given = LaunchArguments.of(options, replace(work, path=None))
        version = support.installed_version()
        support.check_version(version, given.allow_untested)
        arguments = _arguments(given, work, rules)
        self.rules, self.ends, self.log = rules, ends, VllmLog()
        self.llm: Any
        self.llm, self._processes = start(str(facts.path), arguments, self.log)
        try:
            config = self.llm.llm_engine.vllm_config
            self._most_requests = 2 * int(config.scheduler_config.max_num_seqs)
            served = Verdict(0.0, 0.0, False, int(config.model_config.get_vocab_size()), {})
            found = engine_facts(config, version, served, gathered=False)
            self.facts = replace(found, context_length=facts.context_length, notes=(*facts.notes, *found.notes))
            if not _needs_one_logprob(rules):
                with self.log.explaining("vLLM stopped", EngineError):
                    self.llm.llm_engine.collective_rpc("scoremode_write")
        except BaseException:
            self.close()
            raise

    def write(self, asked: Sequence[WritingRequest], done: Bools, tell: Tell) -> Iterator[tuple[int, WrittenTokens]]:
        """vLLM forms batches from whatever is in flight: a resumed run writes the same texts only if its kernels do."""
        waiting, engine = iter(np.flatnonzero(~done).tolist()), self.llm.llm_engine
        flying: dict[str, int] = {}
        while True:
            while len(flying) < self._most_requests and (index := next(waiting, None)) is not None:
                with self.log.explaining("vLLM refused a prompt", EngineError):
                    prompt = {"type": "token", "prompt_token_ids": asked[index].prompt.tolist()}
                    engine.add_request(name := f"scoremode-{index}", prompt, self._params(asked[index]))
                flying[name] = index
            if not flying:
                return
            with self.log.explaining("vLLM stopped", EngineError):
                finished = [output for output in engine.step() if output.finished]
            for output in finished:
                index = flying.pop(output.request_id)
                written = self._written(output.outputs[0])
                tell(len(written.ids))
                yield index, written

    def _params(self, asked: WritingRequest) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        rules = self.rules
        return SamplingParams(
            temperature=rules.temperature,
            top_p=rules.top_p,
            top_k=rules.top_k,
            min_p=rules.min_p,
            seed=asked.seed,
            max_tokens=asked.room,
            ignore_eos=True,  # the end tokens are named, so that every engine ends its texts at the same ones
            stop_token_ids=sorted(self.ends),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _written(self, output: Any) -> WrittenTokens:
        ids, given = np.array(output.token_ids, np.int32), output.logprobs
        if given is None or list(given.token_ids) != ids.tolist():
            raise EngineError(
                "vLLM gave log-probabilities of other tokens than it sampled",
                fix="please report the model and the version of vLLM",
            )
        drawn = np.minimum(np.array(given.logprobs, np.float64), 0.0)
        if self.rules.is_greedy:
            return WrittenTokens(ids, np.zeros(len(ids)), drawn)
        raw = drawn
        if not self.rules.is_own:
            raw = np.minimum(np.array(given.ranks, np.int64).astype(np.int32).view(np.float32).astype(np.float64), 0.0)
        return WrittenTokens(ids, drawn, raw)

    def close(self) -> None:
        llm, self.llm = self.llm, None
        if llm is not None:
            end(llm, self._processes, self.log)


def _needs_one_logprob(rules: DrawingRules) -> bool:
    return rules.is_greedy or rules.is_own


def _arguments(given: LaunchArguments, work: Work, rules: DrawingRules) -> dict[str, Any]:
    """The arguments of ``vllm.LLM``."""
    support.refuse_arguments(given.extra, NOT_WHILE_WRITING)
    found: dict[str, Any] = {"logprobs_mode": "raw_logprobs", "skip_tokenizer_init": True}
    if not _needs_one_logprob(rules):
        extension = "scoremode.engines.vllm.written_tokens.WritingWorker"
        found |= {"logprobs_mode": "processed_logprobs", "worker_extension_cls": extension}
    if work.path is not None:
        found["max_num_seqs"] = work.path.sequences
    return {**given.arguments(), **found}
