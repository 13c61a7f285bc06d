"""Hidden states between the layers of a model that Transformers loaded: as a candidate, and as the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.plugin import Work
from scoremode.core.models.subject import Subject
from scoremode.core.scores.answers import Window
from scoremode.engines.transformers import TransformersPlugin
from scoremode.engines.transformers.batches import PADDING, other_threads
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.errors import EngineError
from scoremode.head.precision import full_float32
from scoremode.studies.attribution.engines.layer_hooks import LayerHooks
from scoremode.studies.attribution.layer_states import LayerStates, States, fed_tokens
from scoremode.values import Ids


def open_layers(
    plugin: TransformersPlugin, subject: Subject, options: TransformersOptions, work: Work
) -> TransformersLayers:
    return TransformersLayers(plugin.open(subject, options, work))


class TransformersLayers(LayerStates):
    """Keeps the states of forward passes by hooks on the decoder layers. The model itself is not changed.

    It can be a baseline: its layers can also be fed the states of another model.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine, self.facts = engine, engine.facts
        self._hooks = LayerHooks(engine.model)
        self.layers = len(self._hooks.layers)
        self.width = int(engine.model.config.get_text_config().hidden_size)
        self._is_checked = False

    def states(self, windows: Sequence[Window]) -> Iterator[States]:
        """One forward pass per window: on some CPUs the bits of a window depend on what is in the batch beside it."""
        for window in windows:
            places = self._pass(window.ids[None, : fed_tokens(window)])
            yield np.stack([place[0].cpu().numpy() for place in places])

    def states_otherwise(self, window: Window) -> States:
        """The states of a window, computed in ``unusual_way``."""
        ids = window.ids[: fed_tokens(window)]
        context = self.facts.context_length
        padding = PADDING if context is None or len(ids) + PADDING <= context else 0
        padded = np.concatenate([ids, np.zeros(padding, ids.dtype)])
        with other_threads(self.engine.model.device):
            places = self._pass(np.stack([padded] * 3))
        return np.stack([place[1, : len(ids)].cpu().numpy() for place in places])

    @cached_property
    def unusual_way(self) -> str:
        with other_threads(self.engine.model.device) as threads:
            return ", ".join(["each window three times in a batch, with padding", *([threads] if threads else [])])

    def replayed(self, window: Window, states: States) -> States:
        """One forward pass in which every layer gets the other model's states instead of those of the layer before."""
        device, dtype = self.engine.model.device, self.engine.model.dtype
        self._hooks.replacing = [torch.from_numpy(place)[None].to(device, dtype) for place in states[:-1]]
        try:
            places = self._pass(window.ids[None, : fed_tokens(window)])
        finally:
            self._hooks.replacing = None
        return np.stack([place[0].cpu().numpy() for place in places[1:]])

    @full_float32()
    @torch.inference_mode()
    def _pass(self, ids: Ids) -> list[Tensor]:
        """States (windows, tokens, d) at every place, for ids (windows, tokens)."""
        tokens = torch.from_numpy(ids.astype(np.int64)).to(self.engine.model.device)
        try:
            output = self.engine.body(input_ids=tokens, use_cache=False).last_hidden_state
            places = self._hooks.take()
        except torch.OutOfMemoryError:
            raise EngineError(
                f"the states of {ids.size:,} tokens do not fit in this device's memory",
                fix="give a smaller --context-length, or --device cpu",
            ) from None
        if not self._is_checked:
            self._hooks.require_before_norm(places[-1][0], output[0])
            self._is_checked = True
        return places

    def close(self) -> None:
        self._hooks.remove()
        self.engine.close()
