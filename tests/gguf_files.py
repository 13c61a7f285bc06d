"""Small GGUF files, made of the tiny Hugging Face Llamas of tests/makers.py or tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

NORMAL, CONTROL, BYTE = 1, 3, 6  # types of tokens
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
Matrix = NDArray[np.float32]
Change = Callable[[Any], None]


def require_llamacpp() -> None:
    """Skip, and print why, where no package brings llama.cpp."""
    from scoremode.engines.llamacpp.library import INSTALL, installed

    if installed() is None:
        reason = f"llama.cpp is not installed: {INSTALL}"
        print(reason)
        pytest.skip(reason)


def gguf_of(
    folder: Path,
    file: Path,
    stored: str = "F32",
    *,
    pre: str = "gpt-2",
    tokenizer: Change | None = None,
    weights: Callable[[str, Matrix], Matrix] = lambda _, x: x,
    **changes: Any,
) -> Path:
    """A Hugging Face Llama with a byte-level tokenizer as a GGUF file; ``changes`` are keys of ``llama.``."""
    from gguf import GGUFWriter

    writer = GGUFWriter(file, "llama")
    config = json.loads((folder / "config.json").read_text())
    add_llama_keys(writer, config, changes)
    if tokenizer is None:
        add_byte_level(writer, folder, pre)
    else:
        tokenizer(writer)
    for name, matrix in llama_tensors(folder, config):
        add_tensor(writer, name, weights(name, matrix), stored)
    finish(writer)
    return file


def add_llama_keys(writer: Any, config: dict[str, Any], changes: dict[str, Any]) -> None:
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


def add_byte_level(writer: Any, folder: Path, pre: str) -> None:
    """The tokenizer of make_tokenizer, as llama.cpp wants it."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = stored["model"]["vocab"]
    special = {entry["content"]: entry["id"] for entry in stored["added_tokens"]}
    by_id = {index: name for name, index in (vocabulary | special).items()}
    names = [by_id[i] for i in range(len(by_id))]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in stored["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types([CONTROL if name in special else NORMAL for name in names])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token("<s>" in json.dumps(stored.get("post_processor")))
    chat = folder / "chat_template.jinja"
    if chat.exists():
        writer.add_chat_template(chat.read_text())


def llama_tensors(folder: Path, config: dict[str, Any]) -> list[tuple[str, Matrix]]:
    """Tensors by llama.cpp's names; rows of queries and keys in the order that its rotation wants."""
    from safetensors.numpy import load_file

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found = []
    for name, matrix in load_file(folder / "model.safetensors").items():
        short = name.removesuffix(".weight")
        begin = ""
        if short.startswith("model.layers."):
            _, _, layer, short = short.split(".", 3)
            begin = f"blk.{layer}."
        for leaf, count in heads.items():
            if short.endswith(leaf):
                pairs = matrix.reshape(count, 2, len(matrix) // count // 2, -1)
                matrix = pairs.swapaxes(1, 2).reshape(matrix.shape)  # noqa: PLW2901
        found.append((f"{begin}{NAMES[short]}.weight", np.ascontiguousarray(matrix, np.float32)))
    return found


def add_tensor(writer: Any, name: str, matrix: Matrix, stored: str) -> None:
    """A matrix in the type asked for; vectors are always float32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    if matrix.ndim == 1 or stored == "F32":
        writer.add_tensor(name, matrix)
    elif stored == "F16":
        writer.add_tensor(name, matrix.astype(np.float16))
    else:
        kind = GGMLQuantizationType[stored]
        writer.add_tensor(name, quantize(matrix, kind), raw_dtype=kind)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sentencepiece_like(pieces: list[str], *, adds_bos: bool = True, adds_space: bool = True) -> Change:
    """A tokenizer with byte tokens for what it does not know; longer pieces are preferred, as their scores say."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [*[0.0] * 259, *(float(len(piece)) for piece in pieces)]

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(names)
        writer.add_token_types(types)
        writer.add_token_scores(scores)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(adds_bos)
        writer.add_add_space_prefix(adds_space)

    return add
