"""Small checkpoints for tests of weights: any tensors in a folder, without Transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from scoremode.studies.attribution.weight_formats.matching import CandidateWeights
from scoremode.studies.attribution.weight_formats.stored import StoredWeight
from scoremode.studies.attribution.weights import open_weights

Tensors = dict[str, torch.Tensor]
HIDDEN, INNER, VOCABULARY, LAYERS = 16, 24, 19, 2
CONFIG = {"model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCABULARY}


def llama_tensors(seed: int = 0, *, layers: int = LAYERS, tied: bool = False) -> Tensors:
    """The parameters of a Llama with 4 heads of 4 and 2 heads for keys and values."""
    random = torch.Generator().manual_seed(seed)
    sizes = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16)}
    sizes |= {"self_attn.o_proj": (16, 16), "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16)}
    sizes |= {"mlp.down_proj": (16, 24)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": size for name, size in sizes.items()}
        shapes |= {f"model.layers.{layer}.{name}.weight": (HIDDEN,) for name in ("input_layernorm",)}
    shapes |= {"model.norm.weight": (HIDDEN,)}
    shapes |= {} if tied else {"lm_head.weight": (VOCABULARY, HIDDEN)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def save(folder: Path, tensors: Tensors, **config: Any) -> str:
    """A checkpoint of these tensors; ``config`` adds to its config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return str(folder)


def opened(candidate: str, baseline: Tensors, config: Mapping[str, Any] = CONFIG) -> CandidateWeights:
    """The candidate beside a baseline of float32."""
    shapes = shapes_of(baseline)
    stored = {name: StoredWeight(name, shape, 32, "float32") for name, shape in shapes.items()}
    return open_weights(candidate, shapes, config=config, read_baseline=baseline.__getitem__, baseline_stored=stored)


def assert_equal(found: CandidateWeights, expected: Mapping[str, torch.Tensor]) -> None:
    assert list(found.stored) == list(expected)
    for name, tensor in expected.items():
        read = found.tensor(name)
        assert read.dtype == torch.float32
        assert found.stored[name].shape == tuple(read.shape)
        assert torch.equal(read, tensor.float()), name
