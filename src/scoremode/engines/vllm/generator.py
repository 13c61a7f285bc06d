"""Stock ``vllm.LLM`` as a writer. It is opened for nothing else, and closed before anything is scored again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.engines.generation import Generator, Sampling
from scoremode.engines.plugin import Work
from scoremode.engines.vllm import support
from scoremode.engines.vllm.log import VllmLog
from scoremode.engines.vllm.processes import end
from scoremode.engines.vllm.start import KV_CACHE, QUIET, choose_dtype, one_line, start_guarded
from scoremode.engines.vllm.vllm_options import EngineArguments, VllmOptions
from scoremode.errors import EngineError, ModelError, OptionError
from scoremode.values import Ids


class VllmGenerator(Generator):
    """Writes with stock vLLM."""

    def __init__(self, folder: Path, options: VllmOptions, work: Work) -> None:
        given = EngineArguments.of(options, work)
        support.check_version(support.installed_version(), given.allow_untested)
        arguments = given.arguments()
        self.log = VllmLog()
        self.llm: Any
        self.llm, self._processes = start_guarded(lambda: self._start(str(folder), arguments, given.trust_remote_code))

    def _start(self, model: str, arguments: dict[str, Any], trust_remote_code: bool) -> Any:
        with self.log.taking_output(), support.environment({}, QUIET | KV_CACHE):
            from vllm import LLM
            from vllm.platforms import current_platform

            on_cpu = current_platform.is_cpu()
            chosen = {"dtype": choose_dtype(model, on_cpu, trust_remote_code), "use_tqdm_on_load": False} | arguments
            if on_cpu:
                chosen.setdefault("enforce_eager", True)  # compiling takes longer than most runs on a CPU
            try:
                return LLM(model=model, **chosen)
            except Exception as error:
                why = self.log.cause() or one_line(error)
                raise ModelError(f"vLLM cannot start {model} ({why})", fix=self.log.where()) from None

    def generate(self, prompts: Sequence[Ids], sampling: Sampling) -> Iterator[tuple[int, Ids]]:
        from vllm import SamplingParams

        try:
            chosen = SamplingParams(
                max_tokens=sampling.max_tokens,
                stop=list(sampling.stop),
                temperature=sampling.temperature,
                **sampling.more,
            )
        except (TypeError, ValueError) as error:
            reason = str(error).strip().split("\n")[0][:200]
            raise OptionError(f"vLLM cannot generate like this ({reason})", fix="check --gen_kwargs") from None
        asked = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        try:
            written = self.llm.generate(asked, chosen, use_tqdm=False)
        except Exception as error:
            why = self.log.cause() or one_line(error)
            raise EngineError(f"vLLM stopped ({why})", fix=self.log.where()) from None
        for index, output in enumerate(written):
            yield index, np.array(output.outputs[0].token_ids, dtype=np.int32)

    def close(self) -> None:
        llm, self.llm = self.llm, None
        if llm is not None:
            end(llm, self._processes, self.log)
