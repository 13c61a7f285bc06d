"""Generates text with stock vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from scoremode.core.engine.plugin import Work
from scoremode.core.models.subject import Subject
from scoremode.engines.vllm import VllmPlugin, support
from scoremode.engines.vllm.processes import VllmLog, end
from scoremode.engines.vllm.start import start
from scoremode.engines.vllm.support import LaunchArguments, VllmOptions
from scoremode.errors import EngineError, OptionError
from scoremode.studies.tasks.generation import Generator, Sampling
from scoremode.values import Ids


class VllmGenerator(Generator):
    """Generates text with stock vLLM, which is opened only for this and closed before anything is scored again."""

    def __init__(self, plugin: VllmPlugin, subject: Subject, options: VllmOptions, work: Work) -> None:
        assert subject.checkpoint is not None
        given = LaunchArguments.of(options, work)
        support.check_version(support.installed_version(), given.allow_untested)
        self.log = VllmLog()
        self.llm: Any
        self.llm, self._processes = start(str(subject.checkpoint.path), given.arguments(), self.log)

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
        with self.log.explaining("vLLM stopped", EngineError):
            written = self.llm.generate(asked, chosen, use_tqdm=False)
        for index, output in enumerate(written):
            yield index, np.array(output.outputs[0].token_ids, dtype=np.int32)

    def close(self) -> None:
        llm, self.llm = self.llm, None
        if llm is not None:
            end(llm, self._processes, self.log)
