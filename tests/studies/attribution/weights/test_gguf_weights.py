"""Weights of GGUF files: every type against ggml's own code, every layout against the numbers that were stored."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray
from safetensors.torch import load_file

from scoremode.core.models.embedded import embedded_gguf
from scoremode.core.models.facts import resolve
from scoremode.core.models.gguf import read_gguf
from scoremode.core.models.sizes import add_up
from scoremode.errors import ModelError
from tests.gguf_files import finish, gguf_of, require_llamacpp
from tests.studies.attribution.weights.checkpoints import Tensors, assert_equal, opened

Matrix = NDArray[np.float32]
TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0", "MXFP4"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"),
)
SLOW = ("IQ1", "IQ2", "IQ3")  # ggml builds tables for seconds before it packs them
DOWN = "model.layers.0.mlp.down_proj.weight"
LLAMA = {"block_count": 1, "attention.head_count": 4, "attention.head_count_kv": 2}


def written(file: Path, architecture: str, tensors: dict[str, Any], **numbers: Any) -> str:
    """A GGUF file of these tensors: float32 arrays, or (bytes, type)."""
    writer = GGUFWriter(file, architecture)
    for key, value in {**LLAMA, **numbers}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
    finish(writer)
    return str(file)


def random(*shape: int) -> Matrix:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def tensors_of(arrays: dict[str, Matrix]) -> Tensors:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def ggml(name: str, result: Any, *arguments: Any) -> Any:
    """A function of llama.cpp's library."""
    from scoremode.engines.llamacpp.library import library

    function = getattr(library().call, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


def quantized(weight: Matrix, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """The numbers as ggml packs them; for types whose packing takes long, any bytes with a small scale."""
    rows, columns = weight.shape
    block, size = GGML_QUANT_SIZES[kind]
    stored = np.zeros((rows, columns // block * size), np.uint8)
    if kind.name.startswith(SLOW):
        blocks = np.random.default_rng(0).integers(0, 256, (stored.size // size, size), np.uint8)
        blocks[:, :2] = np.array([0.01], np.float16).view(np.uint8)
        return blocks.reshape(stored.shape)
    pointer = ctypes.c_void_p
    pack = ggml("ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer)
    assert pack(int(kind), weight.ctypes.data, stored.ctypes.data, 0, rows, columns, None) == stored.size
    return stored


@pytest.mark.parametrize("name", TYPES)
def test_every_type_as_ggml_de_quantizes_it(tmp_path: Path, name: str) -> None:
    """Bit for bit: llama.cpp's library packs the numbers and unpacks them."""
    require_llamacpp()
    weight, kind = random(3, 512), GGMLQuantizationType[name]
    stored = quantized(weight, kind)
    own = name[:-1].lower() + "K" if name.endswith("_K") else name.lower()
    unpack = ggml(f"dequantize_row_{own}", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    expected = np.zeros(weight.shape, np.float32)
    unpack(stored.ctypes.data, expected.ctypes.data, expected.size)

    file = written(tmp_path / "one.gguf", "llama", {"blk.0.ffn_down.weight": (stored, kind)})
    found = opened(file, tensors_of({DOWN: weight}))
    assert np.array_equal(found.tensor(DOWN).numpy(), expected, equal_nan=True)
    assert np.isfinite(expected).mean() > 0.9
    assert (found.stored[DOWN].format, found.stored[DOWN].bits) == (name, 8 * stored.size / weight.size)


def test_floats_of_16_bits(tmp_path: Path) -> None:
    weight = random(4, 6)
    halves = written(tmp_path / "half.gguf", "llama", {"blk.0.ffn_down.weight": (weight.astype(np.float16), None)})
    assert torch.equal(opened(halves, tensors_of({DOWN: weight})).tensor(DOWN), torch.from_numpy(weight).half().float())
    brain = torch.from_numpy(weight).bfloat16()
    raw = brain.view(torch.uint16).numpy().view(np.uint8)
    file = written(tmp_path / "brain.gguf", "llama", {"blk.0.ffn_down.weight": (raw, GGMLQuantizationType.BF16)})
    assert torch.equal(opened(file, tensors_of({DOWN: weight})).tensor(DOWN), brain.float())


def test_the_embedded_file_is_what_transformers_makes_of_it() -> None:
    """The embedded model is its GGUF file as Transformers loaded it: equal bit for bit."""
    folder = resolve("smollm2-135m")
    weights = load_file(folder / "model.safetensors")
    found = opened(str(embedded_gguf()), weights, "llama")
    some = [name for name in weights if ".layers." not in name or ".layers.0." in name or ".layers.29." in name]
    assert len(some) == 20
    for name in some:
        assert torch.equal(found.tensor(name), weights[name]), name
    assert found.notes == ()
    parts = [(w.name, w.bits * weights[w.name].numel() / 8, weights[w.name].numel()) for w in found.stored.values()]
    assert add_up((n, round(b), c) for n, b, c in parts).bytes == read_gguf(str(embedded_gguf())).sizes.bytes


def test_a_whole_llama_comes_back_with_its_rows_in_transformers_order(tiny: Path, tmp_path: Path) -> None:
    """The file is one that llama.cpp scores as Transformers scores the checkpoint (tests/engines/llamacpp)."""
    weights = load_file(tiny / "model.safetensors")
    assert_equal(opened(str(gguf_of(tiny, tmp_path / "tiny.gguf")), weights), weights)


def pairs_of_halves(weight: Matrix, heads: int) -> Matrix:
    """What a converter does to q and k, row by row: row 2 i + j of a head is row i of its half j."""
    found, size = np.empty_like(weight), len(weight) // heads
    for head in range(heads):
        for i in range(size // 2):
            for j in range(2):
                found[head * size + 2 * i + j] = weight[head * size + j * size // 2 + i]
    return found


def test_rows_of_queries_and_keys_with_their_biases(tmp_path: Path) -> None:
    arrays = {
        "model.layers.0.self_attn.q_proj.weight": random(24, 8),
        "model.layers.0.self_attn.q_proj.bias": random(24),
        "model.layers.0.self_attn.k_proj.weight": random(12, 8),
        "model.layers.0.self_attn.v_proj.weight": random(12, 8),
    }
    q, bias, k, v = arrays.values()
    stored = {"attn_q.weight": pairs_of_halves(q, 4), "attn_q.bias": pairs_of_halves(bias, 4)}
    stored |= {"attn_k.weight": pairs_of_halves(k, 2), "attn_v.weight": v}
    file = written(tmp_path / "qk.gguf", "llama", {f"blk.0.{n}": t for n, t in stored.items()})
    assert_equal(opened(file, tensors_of(arrays)), tensors_of(arrays))
    file = written(tmp_path / "qwen.gguf", "qwen2", {"blk.0.attn_q.weight": q})
    plain = tensors_of({"model.layers.0.self_attn.q_proj.weight": q})
    assert_equal(opened(file, plain, "qwen2"), plain)


def test_norms_of_gemma_lose_the_1_that_files_add(tmp_path: Path) -> None:
    norm = np.linspace(-0.5, 2, 8, dtype=np.float32)
    arrays = {"model.layers.0.input_layernorm.weight": norm, "model.norm.weight": norm, DOWN: random(8, 4)}
    stored = {"blk.0.attn_norm.weight": norm + 1, "output_norm.weight": norm + 1, "blk.0.ffn_down.weight": arrays[DOWN]}
    found = opened(written(tmp_path / "g.gguf", "gemma2", stored), tensors_of(arrays), "gemma2")
    assert torch.equal(found.tensor("model.norm.weight"), torch.from_numpy((norm + np.float32(1)) - np.float32(1)))
    assert torch.equal(found.tensor(DOWN), torch.from_numpy(arrays[DOWN]))


def test_matrices_of_gpt2_are_transposed(tmp_path: Path) -> None:
    arrays = {"transformer.h.0.mlp.c_fc.weight": random(4, 12), "transformer.h.0.mlp.c_fc.bias": random(12)}
    weight, bias = arrays.values()
    stored = {"blk.0.ffn_up.weight": weight.T, "blk.0.ffn_up.bias": bias}
    found = opened(written(tmp_path / "g.gguf", "gpt2", stored), tensors_of(arrays), "gpt2")
    assert_equal(found, tensors_of(arrays))


def test_experts_and_the_gate_of_a_shared_expert(tmp_path: Path) -> None:
    layer = "model.layers.0.mlp."
    gate, up, down = random(3, 5, 4), random(3, 5, 4) * 2, random(3, 4, 5)
    arrays = {f"{layer}experts.gate_up_proj": np.concatenate([gate, up], axis=1), f"{layer}experts.down_proj": down}
    arrays |= {f"{layer}shared_expert_gate.weight": random(1, 4), f"{layer}gate.weight": random(3, 4)}
    stored = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    stored |= {"ffn_gate_inp_shexp": arrays[f"{layer}shared_expert_gate.weight"][0]}
    stored |= {"ffn_gate_inp": arrays[f"{layer}gate.weight"]}
    file = written(tmp_path / "moe.gguf", "qwen2moe", {f"blk.0.{name}.weight": t for name, t in stored.items()})
    assert_equal(opened(file, tensors_of(arrays), "qwen2_moe"), tensors_of(arrays))


def test_heads_that_are_tied_or_not(tmp_path: Path) -> None:
    embedding, head = random(7, 4), random(7, 4) + 1
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    tables = {"rope_freqs.weight": random(2)}
    file = written(tmp_path / "both.gguf", "llama", {"token_embd.weight": embedding, "output.weight": head, **tables})
    assert_equal(opened(file, tensors_of(both)), tensors_of(both))
    with pytest.raises(ModelError, match=r"has a head of its own \(output.weight\)"):
        opened(file, tensors_of({"model.embed_tokens.weight": embedding}))
    tied = written(tmp_path / "tied.gguf", "llama", {"token_embd.weight": embedding})
    assert torch.equal(opened(tied, tensors_of(both)).tensor("lm_head.weight"), torch.from_numpy(embedding))


def test_refusals_name_what_differs(tmp_path: Path) -> None:
    weight = random(4, 6)
    baseline = tensors_of({DOWN: weight})
    one = {"blk.0.ffn_down.weight": weight}
    other = {"blk.0.ffn_up.weight": weight}
    cases: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("llama", one, {"block_count": 2}, "has 2 layers, and the baseline has 1"),
        ("qwen2", one, {}, "is a qwen2 model, and the baseline is a llama"),
        ("rwkv7", one, {}, "of the architecture rwkv7, whose layout scoremode does not know"),
        ("llama", other, {}, f"no tensor for the baseline's {DOWN}"),
        ("llama", {"blk.0.ffn_down.weight": weight.T}, {}, "has the shape 6 × 4, and the"),
    ]
    for number, (architecture, tensors, numbers, says) in enumerate(cases):
        file = written(tmp_path / f"{number}.gguf", architecture, tensors, **numbers)
        with pytest.raises(ModelError, match=says) as refusal:
            opened(file, baseline)
        assert "\n" not in str(refusal.value)
    with pytest.raises(ModelError, match="there is no file"):
        opened(str(tmp_path / "absent.gguf"), baseline)
