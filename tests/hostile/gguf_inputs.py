"""GGUF files that are wrong in one way each. A damage is given a good file and changes it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any


def at(offset: int, layout: str, value: int) -> Callable[[Path], None]:
    """Write a number somewhere in the file."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        struct.pack_into(f"<{layout}", content, offset, value)
        path.write_bytes(content)

    return damage


def cut(share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return damage


def replaced(key: bytes, by: bytes) -> Callable[[Path], None]:
    """Another name of the same length, in the header."""
    assert len(key) == len(by)

    def damage(path: Path) -> None:
        content = path.read_bytes()
        assert key in content
        path.write_bytes(content.replace(key, by))

    return damage


def key(name: str, layout: str, value: float) -> Callable[[Path], None]:
    """Another number for a key of the header."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        struct.pack_into(f"<{layout}", content, content.index(name.encode()) + len(name) + 4, value)
        path.write_bytes(content)

    return damage


def with_weight(value: float) -> Callable[[Path], None]:
    """Another number for the last weight in the file."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        end = len(content.rstrip(b"\0"))
        struct.pack_into("<f", content, end - end % 4 - 64, value)
        path.write_bytes(content)

    return damage


def written(content: bytes) -> Callable[[Path], None]:
    return lambda path: void(path.write_bytes(content))


def void(_: Any) -> None:
    pass


GGUFS: dict[str, tuple[Callable[[Path], None], str]] = {  # name -> damage, words of the line
    "text": (written(b"not a model\n" * 100), "does not begin with GGUF"),
    "cut-5": (cut(0.5), "not a whole GGUF"),
    "architecture-unknown": (replaced(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lxxma"), "llama.cpp cannot"),
    "no-tokens": (replaced(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"), "llama.cpp cannot|tokenizer"),
    "no-merges": (replaced(b"tokenizer.ggml.merges", b"tokenizer.ggml.mergez"), "llama.cpp cannot"),
    "no-layers": (replaced(b"llama.block_count", b"llama.block_counz"), "llama.cpp cannot"),
    "no-heads": (replaced(b"llama.attention.head_count\x04", b"llama.attention.head_counz\x04"), "llama.cpp cannot"),
    "tensor-renamed": (replaced(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"), "llama.cpp cannot"),
    **{f"layers-{n}": (key("llama.block_count", "I", n), f"{n} layers") for n in (0, 600, 65536, 2**32 - 1)},
    **{
        f"epsilon-{value}": (key("llama.attention.layer_norm_rms_epsilon", "f", value), "epsilon")
        for value in (-1.0, math.inf, math.nan)
    },
    **{f"weight-{value}": (with_weight(value), "invalid data") for value in (math.inf, math.nan)},
    "context-1": (key("llama.context_length", "I", 1), "context of 1 token"),
}
ABORTING: dict[str, tuple[Callable[[Path], None], str]] = {  # llama.cpp ends the process: each runs in its own
    "token-twice": (replaced(b"\1\0\0\0\0\0\0\0b", b"\1\0\0\0\0\0\0\0a"), "GGML_ASSERT")
}
