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
    raise ModelError(f"no list of decoder layers was found in {type(model).__name__}", fix="use another model")


def final_norm(owner: Any, width: int) -> Any:
    """Returns the norm that follows the decoder layers in the module that has both."""
    after = False
    for child in owner.children():
        weight = getattr(child, "weight", None)
        if after and weight is not None and tuple(weight.shape) == (width,):
            return child
        after = after or isinstance(child, torch.nn.ModuleList)
    raise ModelError(f"no norm was found after the decoder layers of {type(owner).__name__}", fix="use another model")


class LayerHooks:
    """Keeps the states at every place of the last forward pass, and can replace what enters each layer.

    Layers that return a pair of equal shapes (hidden states and the residual that they are yet to be added to) have
    their sum as the state. It is computed at once, because the next layer's norm overwrites both.
    """

    def __init__(self, model: Any) -> None:
        self.owner, self.layers = decoder_layers(model)
        self.replacing: Sequence[Tensor] | None = None  # what enters each layer instead
        self._places: list[Tensor | None] = [None] * (len(self.layers) + 1)
        self._signature = inspect.signature(self.layers[0].forward)
        self._handles = [self.layers[0].register_forward_pre_hook(self._enter, with_kwargs=True)]
        for index, layer in enumerate(self.layers):
            self._handles.append(layer.register_forward_pre_hook(self._replace(index), with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._leave(index)))

    def take(self) -> list[Tensor]:
        """Returns the states at every place of the last pass, and forgets them."""
        found = [state for state in self._places if state is not None]
        self._places = [None] * len(self._places)
        if len(found) != len(self._places):
            raise ModelError("a forward pass did not call every decoder layer", fix="use another model")
        return found

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def require_before_norm(self, last: Tensor, final: Tensor) -> None:
        """Refuses a model whose final states (n, d) are not the norm of our last states: they would be misread."""
        norm = final_norm(self.owner, last.shape[-1])
        made = norm(last.to(final.dtype))
        made = made[0] if isinstance(made, tuple) else made
        cosine = torch.nn.functional.cosine_similarity(made.double(), final.double(), dim=-1)
        if not bool((cosine > ALIKE).all()):
            name = type(self.owner).__name__
            raise ModelError(f"the layers of {name} return something other than hidden states", fix="use another model")

    def _enter(self, _layer: Any, arguments: Any, named: Any) -> None:
        given = self._signature.bind(*arguments, **named).arguments
        hidden, residual = given.get("hidden_states"), given.get("residual")
        if hidden is None:
            name = type(self.layers[0]).__name__
            raise ModelError(f"{name} has no argument hidden_states", fix="use another model")
        self._places[0] = hidden.float().clone() if residual is None else hidden.float() + residual.float()

    def _replace(self, index: int) -> Any:
        def hook(_layer: Any, arguments: Any, named: Any) -> Any:
            if self.replacing is None:
                return None
            state = self.replacing[index]
            if "hidden_states" in named:
                return arguments, {**named, "hidden_states": state}
            return (state, *arguments[1:]), named

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
