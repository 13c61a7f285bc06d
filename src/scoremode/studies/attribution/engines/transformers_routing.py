"""The experts that a mixture of experts sends each token to, by hooks on the routers of a Transformers model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scoremode.core.scores.answers import Window
from scoremode.engines.transformers.batches import fed
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.errors import ModelError
from scoremode.head.precision import full_float32
from scoremode.studies.attribution.engines.layer_hooks import decoder_layers

RECORDED = "router_logits"  # what Transformers calls the output of a router


class RouterHooks:
    """Keeps what the routers of a model chose in its last forward pass."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        config = engine.model.config.get_text_config()
        self.per_token = getattr(config, "num_experts_per_tok", None) or 0
        self._chosen: dict[str, Tensor] = {}
        self.names, self.of_experts = [], 0
        _, layers = decoder_layers(engine.model)
        for index, layer in enumerate(layers):
            router: Any = next((m for m in layer.modules() if isinstance(m, router_classes(engine.model))), None)
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
            given = output if isinstance(output, tuple) else (output,)
            logits = given[0]
            self.of_experts = int(logits.shape[-1])
            indices = next((x for x in given if isinstance(x, Tensor) and not x.is_floating_point()), None)
            self._chosen[name] = logits.topk(self.per_token, dim=-1).indices if indices is None else indices

        return hook

    def routes(self, windows: Iterator[Window]) -> Iterator[npt.NDArray[np.int16]]:
        """Yields the experts of the rows that each window asks for, (layers, rows, experts), ascending."""
        for window in windows:
            yield self._routes_of(window)

    @full_float32()
    @torch.inference_mode()
    def _routes_of(self, window: Window) -> npt.NDArray[np.int16]:
        ids = torch.from_numpy(fed(window).astype(np.int64))[None].to(self.engine.model.device)
        self._chosen.clear()
        self.engine.body(input_ids=ids, use_cache=False)
        found = [self._chosen[name].reshape(ids.shape[1], -1)[window.rows.tolist()] for name in self.names]
        return np.sort(torch.stack(found).cpu().numpy().astype(np.int16), axis=2)


def router_classes(model: Any) -> tuple[type, ...]:
    """The classes of a model's routers, as Transformers itself knows them; none for a dense model."""
    recorders = [
        (getattr(module, "_can_record_outputs", None) or {}).get(RECORDED)
        for module in (model, getattr(model, model.base_model_prefix, model))
    ]
    each = [one for found in recorders if found is not None for one in (found if isinstance(found, list) else [found])]
    return tuple(kind for one in each if (kind := getattr(one, "target_class", one)) is not None)
