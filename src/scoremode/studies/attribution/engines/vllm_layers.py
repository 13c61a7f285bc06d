"""Hidden states between the layers of a model that vLLM serves, for profiles by depth.

engine ──prompts──▶ vLLM's scheduler and kernels ──hooks on the layers──▶ pooler ──rows of each prompt──▶ engine

``WorkerLayers`` lives in vLLM's processes: hooks keep the states of a step, and the pooler takes the rows it needs. The
pooler knows which rows of a step belong to which request, so chunks, batches and preemption need nothing more. Every
tensor-parallel rank has the same states, after its exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.plugin import Work
from scoremode.core.models.subject import Subject
from scoremode.core.scores.answers import Window
from scoremode.engines.vllm import VllmPlugin
from scoremode.engines.vllm.engine import VllmEngine
from scoremode.engines.vllm.support import LaunchArguments, VllmOptions
from scoremode.engines.vllm.wire import Request, Words
from scoremode.errors import OptionError
from scoremode.studies.attribution.engines.layer_hooks import LayerHooks
from scoremode.studies.attribution.layer_profile import LayerStates, States, fed_tokens

KEEPER = "studies.attribution.engines.vllm_layers:WorkerLayers"
EAGER = "without compilation and CUDA graphs (--enforce-eager), as hooks on layers need"


def open_layers(plugin: VllmPlugin, subject: Subject, options: VllmOptions, work: Work) -> VllmLayers:
    assert subject.checkpoint is not None
    facts = subject.checkpoint
    taken = LaunchArguments.for_work(options, work, facts.context_length)
    return VllmLayers(str(facts.path), taken, context=facts.context_length, notes=facts.notes)


class VllmLayers(VllmEngine, LayerStates):
    """An engine whose workers keep the states between layers. vLLM runs eagerly: compiled code calls no hooks."""

    def __init__(self, model: str, options: LaunchArguments, **more: Any) -> None:
        if options.arguments().get("pipeline_parallel_size", 1) != 1:
            raise OptionError(
                "--pipeline-parallel-size: a stage knows the states of its own layers only",
                fix="use --tensor-parallel-size",
            )
        others = tuple(pair for pair in options.engine_args or () if pair[0] != "enforce_eager")
        super().__init__(model, replace(options, step_keeper=KEEPER, enforce_eager=True, engine_args=others), **more)
        config = self.llm.llm_engine.vllm_config.model_config.hf_text_config
        self.layers, self.width = int(config.num_hidden_layers), int(config.hidden_size)
        self.facts = replace(self.facts, notes=(*self.facts.notes, f"vLLM ran {EAGER}"))

    def states(self, windows: Sequence[Window]) -> Iterator[States]:
        waiting: dict[str, int] = {}
        for index, window in enumerate(windows):
            self._check(window, index)
            rows = np.arange(fed_tokens(window), dtype=np.int32)
            request = Request(rows, np.zeros((len(rows), 1), np.int32), extra="kept")
            waiting[self._submit(window.ids[: len(rows)], request)] = index
        words_by_window: dict[int, Words] = {}
        for index in range(len(windows)):
            while index not in words_by_window:
                words_by_window |= {waiting[answer.name]: answer.words for answer in self._step()}
            lines = words_by_window.pop(index).view(np.float32).reshape(-1, self.layers + 1, self.width)
            yield np.ascontiguousarray(lines.swapaxes(0, 1))


class WorkerLayers:
    """The states of the last forward pass, as lines of int32 words: a row's states at all places, one after another."""

    def __init__(self, model: Any) -> None:
        self._hooks = LayerHooks(model)
        self._places: list[Tensor] = []

    def begin_step(self, hidden_states: Tensor) -> None:
        """Takes the states of the step whose final hidden states these are."""
        self._places = self._hooks.take()
        self._hooks.require_before_norm(self._places[-1][: len(hidden_states)], hidden_states)

    def rows(self, index: Tensor) -> Tensor:
        return torch.cat([place[index] for place in self._places], dim=1).contiguous().view(torch.int32)
