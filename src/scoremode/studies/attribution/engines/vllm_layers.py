"""Hidden states between layers in vLLM's workers: hooks keep those of a step, and the pooler takes the rows it needs.

Loaded only inside vLLM's processes. The pooler knows which rows of a step belong to which request, so chunks, batches
and preemption need nothing more. Every tensor-parallel rank has the same states, after its exchanges.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scoremode.studies.attribution.engines.layer_hooks import LayerHooks


class WorkerLayers:
    """The states of the last forward pass, as lines of int32 words: a row's states at all places, one after another."""

    def __init__(self, model: Any) -> None:
        self._hooks = LayerHooks(model)
        self._places: list[Tensor] = []
        self._is_checked = False

    def begin_step(self, hidden_states: Tensor) -> None:
        """Takes the states of the step whose final hidden states these are."""
        self._places = self._hooks.take()
        if not self._is_checked:
            rows = slice(0, len(hidden_states))
            self._hooks.require_before_norm(self._places[-1][rows], hidden_states)
            self._is_checked = True

    def rows(self, index: Tensor) -> Tensor:
        return torch.cat([place[index] for place in self._places], dim=1).contiguous().view(torch.int32)
