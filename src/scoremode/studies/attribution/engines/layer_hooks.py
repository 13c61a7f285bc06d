"""Hooks on the decoder layers of a torch model that keep the hidden states of its last forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scoremode.errors import ModelError

ALIKE = 0.999  # cosine of the final states and our last states after the norm; rounding to bfloat16 leaves 0.99999


def decoder_layers(model: Any) -> tuple[Any, list[Any]]:
    """Returns the module that has the decoder layers of a causal LM, and the layers in their order."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = getattr(text, "num_hidden_layers", None)
    for module in model.modules() if count else ():
        for child in module.children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == count:
                return module, list(child)
    raise _unusual(model, "has no list of decoder layers")


def _unusual(module: Any, why: str) -> ModelError:
    return ModelError(
        f"the states between layers cannot be read: {type(module).__name__} {why}", fix="use another model"
    )


class LayerHooks:
    """Keeps the states at every place of the last forward pass, and can replace what enters each layer.

    Layers that return a pair of equal shapes (hidden states and the residual that they are yet to be added to) have
    their sum as the state. It is computed at once, because the next layer's norm overwrites both.
    """

    def __init__(self, model: Any) -> None:
        self.owner, self.layers = decoder_layers(model)
        self.replacing: Sequence[Tensor] | None = None  # what enters each layer instead
        self._places: dict[int, Tensor] = {}
        self._signature = inspect.signature(self.layers[0].forward)
        self._is_checked = False
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(self._enter(index), with_kwargs=True)
            layer.register_forward_hook(self._leave(index))

    def take(self) -> list[Tensor]:
        """Returns the states at every place of the last pass, and forgets them."""
        states, self._places = self._places, {}
        if len(states) != len(self.layers) + 1:
            raise _unusual(self.owner, "did not call every decoder layer")
        return [states[place] for place in range(len(states))]

    def require_before_norm(self, last: Tensor, final: Tensor) -> None:
        """Refuses, after the first pass, a model whose final states (n, d) are not the norm of our last states."""
        if self._is_checked:
            return
        children = list(self.owner.children())
        after = next(i for i, child in enumerate(children) if isinstance(child, torch.nn.ModuleList))
        shape = (last.shape[-1],)
        norms = (c for c in children[after + 1 :] if tuple(getattr(getattr(c, "weight", None), "shape", ())) == shape)
        norm = next(norms, None)
        if norm is None:
            raise _unusual(self.owner, "has no norm after its layers")
        made = norm(last.to(final.dtype))
        made = made[0] if isinstance(made, tuple) else made
        cosine = torch.nn.functional.cosine_similarity(made.double(), final.double(), dim=-1)
        if not bool((cosine > ALIKE).all()):
            raise _unusual(self.owner, "has layers that return something other than hidden states")
        self._is_checked = True

    def _enter(self, index: int) -> Any:
        def hook(_layer: Any, arguments: Any, kwargs: Any) -> Any:
            if index == 0:
                arguments_by_name = self._signature.bind(*arguments, **kwargs).arguments
                hidden, residual = arguments_by_name.get("hidden_states"), arguments_by_name.get("residual")
                if hidden is None:
                    raise _unusual(self.layers[0], "has no argument hidden_states")
                self._places[0] = hidden.float().clone() if residual is None else hidden.float() + residual.float()
            if self.replacing is None:
                return None
            state = self.replacing[index]
            if "hidden_states" in kwargs:
                return arguments, {**kwargs, "hidden_states": state}
            return (state, *arguments[1:]), kwargs

        return hook

    def _leave(self, index: int) -> Any:
        def hook(_layer: Any, _arguments: Any, output: Any) -> None:
            self._places[index + 1] = state_of(output)

        return hook


def state_of(output: Any) -> Tensor:
    """Returns the hidden states in what a layer returned, as a new float32 tensor."""
    if isinstance(output, Tensor):
        return output.float().clone()
    first, second = output[0], output[1] if len(output) > 1 else None
    if isinstance(second, Tensor) and second.shape == first.shape:
        return first.float() + second.float()  # type: ignore[no-any-return]
    return first.float().clone()  # type: ignore[no-any-return]
