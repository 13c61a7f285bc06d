"""Writes a Hugging Face Llama as a float32 GGUF file, for the self-test that compares llama.cpp with Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]


def write_small_gguf(folder: Path, file: Path) -> Path:
    """Writes the checkpoint in a folder as a GGUF file without a tokenizer."""
    from gguf import GGUFWriter

    writer = GGUFWriter(file, "llama")
    config = json.loads((folder / "config.json").read_text())
    add_llama_keys(writer, config)
    writer.add_tokenizer_model("no_vocab")
    for name, matrix in llama_tensors(folder, config):
        writer.add_tensor(name, matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_llama_keys(writer: Any, config: dict[str, Any], **changes: int) -> None:
    """Writes the sizes of a model into the header; ``changes`` replaces some of them."""
    numbers = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "vocab_size": config["vocab_size"],
        **changes,
    }
    for name, value in numbers.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    base = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta", 10000.0)
    writer.add_float32("llama.rope.freq_base", base)


def llama_tensors(folder: Path, config: dict[str, Any]) -> list[tuple[str, Matrix]]:
    """Returns the tensors by llama.cpp's names, with the rows of queries and keys in the order of its rotation."""
    from gguf import MODEL_ARCH, get_tensor_name_map
    from safetensors.numpy import load_file

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    tensors = []
    for name, matrix in load_file(folder / "model.safetensors").items():
        if count := heads.get(name.split(".")[-2]):
            pairs = matrix.reshape(count, 2, len(matrix) // count // 2, -1)
            matrix = pairs.swapaxes(1, 2).reshape(matrix.shape)  # noqa: PLW2901 (the same tensor, rows moved)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        tensors.append((gguf_name, np.ascontiguousarray(matrix, np.float32)))
    return tensors
