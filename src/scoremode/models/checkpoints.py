"""Check that a checkpoint's tensors and its config belong together, by the headers alone.

A config with fewer layers than the weights loads without an error, but scores a smaller model than intended.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from scoremode.errors import ModelError

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # names in a config
LAYER = re.compile(r"^((?:.*?\.)?(?:layers|h|blocks))\.(\d+)\.")  # the outermost list of layers in a tensor's name
BESIDE = re.compile(r"visi|visual|image|audio|speech|encoder|mtp|draft|eagle|resampler|perceiver|projector|adapter")
NAMED = 3  # most tensors that a note names


def check_layers(name: str, config: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """Raise ModelError if config and weights have different numbers of layers; return notes on unused layers.

    >>> check_layers("model", {"num_hidden_layers": 2}, ["model.layers.0.norm.weight", "model.layers.1.norm.weight"])
    []
    """
    layers = next((config[key] for key in LAYERS if isinstance(config.get(key), int)), None)
    if layers is None:
        return []
    if layers < 1:
        raise ModelError(f"the config of {name} says {layers} layers", fix="download the model again")
    stored = _layers_of_text(tensors)
    predicting = config.get("num_nextn_predict_layers")  # stored after the other layers; predict several tokens ahead
    most = layers + (predicting if isinstance(predicting, int) and predicting > 0 else 0)
    if stored is None or stored == layers:
        return []
    if layers < stored <= most:
        return [f"layers {layers} to {stored - 1} of the checkpoint predict further tokens and are not used"]
    raise ModelError(
        f"{name} has weights for {stored} layers and a config for {layers}",
        fix="config and weights do not belong together: download the model again",
    )


def _layers_of_text(tensors: Iterable[str]) -> int | None:
    """Number of layers of the language model that have weights; None if the names do not show it."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        found = LAYER.match(tensor)
        if found and not BESIDE.search(found[1].lower()):
            counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    return max(counts.values(), default=None)


def unused_note(unused: Iterable[str]) -> list[str]:
    """A note on tensors that the model does not use.

    >>> unused_note(["b", "a"])
    ['2 tensors of the checkpoint are not used: a, b']
    """
    names = sorted(set(unused))
    if not names:
        return []
    listed = ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")
    count = "1 tensor of the checkpoint is" if len(names) == 1 else f"{len(names)} tensors of the checkpoint are"
    return [f"{count} not used: {listed}"]
