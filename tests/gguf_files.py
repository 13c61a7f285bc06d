"""Small GGUF files, made of the tiny Hugging Face Llamas of tests/makers.py or tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

NORMAL, CONTROL, BYTE = 1, 3, 6  # types of tokens
Change = Callable[[Any], None]
Matrix = npt.NDArray[Any]


def require_llamacpp() -> None:
    """Skip where no package brings llama.cpp."""
    library = pytest.importorskip("scoremode.engines.llamacpp.library", reason="needs engines/llamacpp")
    if library.installed() is None:
        pytest.skip("needs xllamacpp")


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

    small_gguf = pytest.importorskip("scoremode.engines.llamacpp.small_gguf")  # a wing, which may be gone
    writer = GGUFWriter(file, "llama")
    config = json.loads((folder / "config.json").read_text())
    small_gguf.add_llama_keys(writer, config, **changes)
    if tokenizer is None:
        add_byte_level(writer, folder, pre)
    else:
        tokenizer(writer)
    for name, matrix in small_gguf.llama_tensors(folder, config):
        add_tensor(writer, name, weights(name, matrix), stored)
    finish(writer)
    return file


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
