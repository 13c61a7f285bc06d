"""Do a checkpoint's tensors and its config belong together? From the headers alone, before any weight is loaded.

A config with fewer layers than the weights loads without a word, and scores a smaller model than was meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from scoremode.errors import ModelError

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # of a config
LAYER = re.compile(r"^((?:.*?\.)?(?:layers|h|blocks))\.(\d+)\.")  # the outermost list of layers in a tensor's name
BESIDE = re.compile(r"visi|visual|image|audio|speech|encoder|mtp|draft|eagle|resampler|perceiver|projector|adapter")
NAMED = 3  # tensors that a note names


def check_layers(name: str, config: Mapping[str, Any], tensors: Iterable[str]) -> list[str]:
    """Refuse a config that has another number of layers than the weights; notes on layers that are not used.

    >>> check_layers("model", {"num_hidden_layers": 2}, ["model.layers.0.norm.weight", "model.layers.1.norm.weight"])
    []
    """
    layers = next((config[key] for key in LAYERS if isinstance(config.get(key), int)), None)
    if layers is None:
        return []
    if layers < 1:
        raise ModelError(f"the config of {name} says {layers} layers", fix="download the model again")
    stored = _layers_of_text(tensors)
    predicting = config.get("num_nextn_predict_layers")  # stored behind the layers, for guessing several tokens ahead
    most = layers + (predicting if isinstance(predicting, int) and predicting > 0 else 0)
    if stored is None or stored == layers:
        return []
    if layers < stored <= most:
        return [f"layers {layers} to {stored - 1} of the checkpoint guess further tokens and are not used"]
    raise ModelError(
        f"{name} has weights for {stored} layers and a config for {layers}",
        fix="config and weights do not belong together: download the model again",
    )


def _layers_of_text(tensors: Iterable[str]) -> int | None:
    """Layers of the language model that have weights; None where names do not tell."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        found = LAYER.match(tensor)
        if found and not BESIDE.search(found[1].lower()):
            counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    return max(counts.values(), default=None)


def unused_note(unused: Iterable[str]) -> list[str]:
    """A note on tensors that a model leaves out.

    >>> unused_note(["b", "a"])
    ['2 tensors of the checkpoint are not used: a, b']
    """
    names = sorted(set(unused))
    if not names:
        return []
    listed = ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")
    count = "1 tensor of the checkpoint is" if len(names) == 1 else f"{len(names)} tensors of the checkpoint are"
    return [f"{count} not used: {listed}"]
