"""Small checkpoints for tests of weights: a Llama of given tensors in a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from scoremode.core.engine.options import CheckpointOptions
from scoremode.studies.attribution.weight_formats.stored import StoredWeight
from scoremode.studies.attribution.weights import CandidateWeights, open_weights

Tensors = dict[str, torch.Tensor]
NORMS = ("input_layernorm", "post_attention_layernorm")
HIDDEN, INNER, VOCABULARY, LAYERS = 16, 24, 19, 2
CONFIG: dict[str, Any] = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS},
    **{"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCABULARY},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "dtype": "float32"},
}


def llama_tensors(
    seed: int = 0, *, layers: int = LAYERS, tied: bool = False, hidden: int = HIDDEN, inner: int = INNER
) -> Tensors:
    """The parameters of a Llama with 4 heads and 2 heads for keys and values."""
    random = torch.Generator().manual_seed(seed)
    sizes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 2, hidden)}
    sizes |= {"self_attn.v_proj": (hidden // 2, hidden), "self_attn.o_proj": (hidden, hidden)}
    sizes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": size for name, size in sizes.items()}
        shapes |= {f"model.layers.{layer}.{name}.weight": (hidden,) for name in NORMS}
    shapes |= {"model.norm.weight": (hidden,)}
    shapes |= {} if tied else {"lm_head.weight": (VOCABULARY, hidden)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def save(folder: Path, tensors: Tensors, **config: Any) -> str:
    """A checkpoint of these tensors; ``config`` adds to its config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return str(folder)


def opened(candidate: str, baseline: Tensors, model_type: str = "llama", dtype: str = "float32") -> CandidateWeights:
    """The candidate beside a baseline of float32."""
    shapes = shapes_of(baseline)
    stored = {name: StoredWeight(name, shape, 32, "float32") for name, shape in shapes.items()}
    return open_weights(
        candidate,
        shapes,
        read_baseline=baseline.__getitem__,
        baseline_stored=stored,
        model_type=model_type,
        options=CheckpointOptions(dtype=dtype),
    )


def assert_equal(found: CandidateWeights, expected: Mapping[str, torch.Tensor]) -> None:
    assert list(found.stored) == list(expected)
    for name, tensor in expected.items():
        read = found.tensor(name)
        assert read.dtype == torch.float32
        assert found.stored[name].shape == tuple(read.shape)
        assert torch.equal(read, tensor.float()), name
