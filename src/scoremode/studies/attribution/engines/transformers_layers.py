"""Hidden states between the layers of a model that Transformers loaded, and the experts that its routers chose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scoremode.core.engine.plugin import Work
from scoremode.core.models.subject import Subject
from scoremode.core.scores.answers import Window
from scoremode.engines.transformers import TransformersPlugin
from scoremode.engines.transformers.batches import fed
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.errors import EngineError, ModelError
from scoremode.head.precision import full_float32
from scoremode.studies.attribution.engines.layer_hooks import LayerHooks, decoder_layers
from scoremode.studies.attribution.layer_profile import LayerStates, States

RECORDED = "router_logits"  # what Transformers calls the output of a router


def open_layers(
    plugin: TransformersPlugin, subject: Subject, options: TransformersOptions, work: Work
) -> TransformersLayers:
    return TransformersLayers(plugin.open(subject, options, work))


@full_float32()
@torch.inference_mode()
def final_states(engine: TransformersEngine, window: Window) -> Tensor:
    """One forward pass of a window: (tokens, d). Alone, because on some CPUs its bits depend on others in its batch."""
    ids = torch.from_numpy(fed(window).astype(np.int64))[None].to(engine.model.device)
    try:
        states: Tensor = engine.body(input_ids=ids, use_cache=False).last_hidden_state[0]
    except torch.OutOfMemoryError:
        raise EngineError(
            f"the states of {ids.numel():,} tokens do not fit in this device's memory",
            fix="give a smaller --context-length, or --device cpu",
        ) from None
    return states


class TransformersLayers(LayerStates):
    """Keeps the states of forward passes by hooks on the decoder layers. The model itself is not changed.

    It can be a baseline: its layers can also be fed the states of another model.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine, self.facts = engine, engine.facts
        self._hooks = LayerHooks(engine.model)
        self.layers = len(self._hooks.layers)
        self.width = int(engine.model.config.get_text_config().hidden_size)

    def states(self, windows: Sequence[Window]) -> Iterator[States]:
        return map(self._pass, windows)

    def replayed(self, window: Window, states: States) -> States:
        """One forward pass in which every layer gets the other model's states instead of those of the layer before."""
        device, dtype = self.engine.model.device, self.engine.model.dtype
        self._hooks.replacing = [torch.from_numpy(place)[None].to(device, dtype) for place in states[:-1]]
        try:
            return self._pass(window)[1:]
        finally:
            self._hooks.replacing = None

    def _pass(self, window: Window) -> States:
        final = final_states(self.engine, window)
        places = [place[0] for place in self._hooks.take()]
        self._hooks.require_before_norm(places[-1], final)
        return np.stack([place.cpu().numpy() for place in places])

    def close(self) -> None:
        self.engine.close()


def open_routes(plugin: TransformersPlugin, subject: Subject, options: TransformersOptions, work: Work) -> RouterHooks:
    return RouterHooks(plugin.open(subject, options, work))


class RouterHooks:
    """Keeps what the routers of a model chose in its last forward pass."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.per_token = getattr(engine.model.config.get_text_config(), "num_experts_per_tok", None) or 0
        self.of_experts = 0
        self._chosen: dict[str, Tensor] = {}  # by layer, in their order
        self.names, kinds = [], router_classes(engine.model)
        for index, layer in enumerate(decoder_layers(engine.model)[1]):
            router: Any = next((module for module in layer.modules() if isinstance(module, kinds)), None)
            if router is not None:
                self.names.append(f"layer {index}")
                router.register_forward_hook(self._keep(self.names[-1]))
        if not self.names:
            raise ModelError(
                f"{type(engine.model).__name__} has no routers that Transformers knows: it is not a mixture of experts",
                fix="leave the routes of experts out",
            )

    def _keep(self, name: str) -> Any:
        def hook(_router: Any, _arguments: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            logits = outputs[0]
            self.of_experts = int(logits.shape[-1])
            indices = next((x for x in outputs if isinstance(x, Tensor) and not x.is_floating_point()), None)
            self._chosen[name] = logits.topk(self.per_token, dim=-1).indices if indices is None else indices

        return hook

    def routes(self, window: Window) -> npt.NDArray[np.int16]:
        """The experts of the rows that a window asks for, (layers, rows, experts), ascending."""
        tokens = len(final_states(self.engine, window))
        experts = [self._chosen[name].reshape(tokens, -1)[window.rows.tolist()] for name in self.names]
        return np.sort(torch.stack(experts).cpu().numpy().astype(np.int16), axis=2)

    def close(self) -> None:
        self.engine.close()


def router_classes(model: Any) -> tuple[type, ...]:
    """The classes of a model's routers, as Transformers itself knows them; none for a dense model."""
    recorders = [
        (getattr(module, "_can_record_outputs", None) or {}).get(RECORDED)
        for module in (model, getattr(model, model.base_model_prefix, model))
    ]
    each = [router for spec in recorders if spec is not None for router in (spec if isinstance(spec, list) else [spec])]
    return tuple(kind for router in each if (kind := getattr(router, "target_class", router)) is not None)
