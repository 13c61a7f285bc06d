"""The engine of the decode path: sends texts to vLLM's generate runner, which is told every token that it samples.

engine ──SamplingParams──▶ vLLM's scheduler, decode kernels, K/V cache, sampler ──token ids──▶ engine (checked)
         (wire.Replay)        └─ replay.py: a step's rows are scored, the next token is forced ─▶ lines, fetched later

The smallest design that needs no fork:

- A window is one request. Its prompt is the first ``prefill_tokens`` tokens, its "answer" the rest, forced.
- A prompt gives logits after its last token alone. Earlier rows are requested like rows of a cached prefix: each with a
  prompt that ends there, so each of them costs a prefill of its own (``Job.take``).
- Requests, jobs, divergences, hidden states and the self-test are those of the prefill path (engine.py). Only what is
  sent and how lines come back differs. So both paths share one head, one set of columns and one self-test.
- A finished request brings the token ids that vLLM sampled. They must be the window's own: if vLLM did not do as it
  was told, the run stops instead of storing numbers of another text.
- What cannot be right is refused before vLLM starts (``support.check_decode``).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np

from scoremode.core.engine.base import Baseline, NoiseFloor
from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import Window, WindowSource
from scoremode.engines.vllm.engine import Finished, VllmEngine
from scoremode.engines.vllm.wire import Job, Replay, Request
from scoremode.errors import EngineError, InputError
from scoremode.values import Bools, Ids


class VllmDecodeEngine(VllmEngine):
    """Scores every token of a window from the decode step that would have generated it."""

    path: DecodePath

    def _attach(self) -> None:
        assert self.options.path is not None, "an engine of the decode path is started with one"
        self.path = self.path or self.options.path  # after a restart, as before it
        self._side_by_side = self.options.path.sequences
        self._forced: dict[str, Ids] = {}  # by request
        self._fed = 0  # tokens of requests that have not finished, about
        self._returns = 0
        self._call_workers("scoremode_attach")

    def feed_by(self, path: DecodePath) -> None:
        self.path = path
        sizes = {"sequences": path.sequences, "max_num_seqs": self._side_by_side}
        self.facts = replace(self.facts, settings={**self.facts.settings, **sizes})

    def noise_floor(self, baseline: Baseline, source: WindowSource, done: Bools) -> NoiseFloor:
        return NoiseFloor(None, "the decode path of vLLM is computed in one way: compare two values of --sequences")

    def account(self) -> dict[str, Any]:
        returns, self._returns = self._returns, 0
        if not returns:
            return {}
        phrase = "a sequence was" if returns == 1 else f"sequences were {returns} times"
        why = "vLLM then computed the keys and values of its tokens again by prefill"
        return {"notes": [f"{phrase} preempted for lack of K/V cache: {why}"]}

    def _begin_smaller(self) -> bool:
        # a step must have room for a token of each sequence
        return self._batch_tokens // 2 >= self._side_by_side and super()._begin_smaller()

    def _has_room(self, flying: dict[str, Job]) -> bool:
        ahead = 2 if self.path.sequences == self._side_by_side else 1  # else vLLM would let none of them wait
        return len(flying) < ahead * self.path.sequences

    def _check(self, window: Window, index: int) -> None:
        super()._check(window, index)
        needed = int(window.rows[-1]) + 2 if len(window.rows) else 0  # vLLM also samples a token after the last row
        if needed > self._longest:
            raise InputError(
                f"window {index} needs {needed} tokens to be decoded, and vLLM was started for {self._longest}",
                fix=f"give --context-length {self._longest - 1}",
            )

    def _submit(self, ids: Ids, request: Request, read_cache: bool = False) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._asked += 1
        name = f"scoremode-{self._asked}"
        is_our_own = request.self_test or request.extra == "head"  # not a window
        prompt = 1 if is_our_own else min(self.path.prefill_tokens, len(ids))
        earlier = int(np.searchsorted(request.rows, prompt - 1))
        answered = replace(
            request, rows=request.rows[earlier:], targets=request.targets[earlier:], first=request.first + earlier
        )
        replay = Replay(name, prompt, np.asarray(ids[prompt:], np.int32), answered)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=len(replay.forced) + 1,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=not read_cache,
            extra_args=replay.to_kwargs(),
        )
        self._forced[name] = replay.forced
        with self._explaining():
            self.llm.llm_engine.add_request(name, {"type": "token", "prompt_token_ids": ids[:prompt].tolist()}, params)
        return name

    def _step(self) -> list[Finished]:
        with self._explaining():
            outputs = [output for output in self.llm.llm_engine.step() if output.finished]
        self._fed += min(len(self._forced), self.path.sequences)  # a step feeds one token of each
        if not outputs:
            if self.watch is not None:
                self.watch(self._fed)
            return []
        for output in outputs:
            self._fed = max(0, self._fed - len(output.outputs[0].token_ids))
            self._require_forced(self._forced.pop(output.request_id), output.outputs[0].token_ids)
        fetched = self._call_workers("scoremode_take", [output.request_id for output in outputs])
        finished = []
        for output, (raw, width, returns) in zip(outputs, fetched, strict=True):
            lines = np.frombuffer(raw, np.int32).reshape(-1, width)
            finished.append(Finished(output.request_id, lines, int(output.num_cached_tokens or 0)))
            self._returns += int(returns)
        return finished

    def _require_forced(self, forced: Ids, sampled: Any) -> None:
        """Stops the run if vLLM sampled other tokens than the window has: its scores would belong to another text."""
        if len(sampled) != len(forced) + 1 or not np.array_equal(np.asarray(sampled[:-1]), forced):
            raise EngineError(
                f"vLLM sampled {len(sampled)} tokens that are not the {len(forced) + 1} that it was told to sample",
                fix="use --path prefill, and please report the model and the version of vLLM",
            )

    def _abort(self, names: list[str]) -> None:
        super()._abort(names)
        self._forced.clear()
        self._fed = 0
        with contextlib.suppress(Exception):
            self._call_workers("scoremode_forget")

    def _call_workers(self, method: str, *arguments: Any) -> Any:
        """Calls a method of ``ReplayWorker`` in the worker and returns its result. There is only one worker."""
        with self._explaining():
            (result,) = self.llm.llm_engine.collective_rpc(method, args=arguments)
        return result
