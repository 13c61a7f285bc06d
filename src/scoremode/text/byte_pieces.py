"""Positions of tokens from the bytes that they stand for: cheaper than the positions that the library keeps.

The tokens of a byte-level or byte-fallback BPE, one after the other, are the text itself. Where their bytes are those
of the text, each token ends where its bytes end; a character that is split belongs to the first of its tokens. Where
they are not (something was normalized, stripped or unknown), nothing is said, and the library is asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scoremode.text.tokenizer import byte_level_piece, sentencepiece_piece
from scoremode.values import Ids, Ints

SPACE = "Ġ"  # the name of a space in a byte-level vocabulary


class BytePieces:
    """The bytes of each id of a vocabulary, and how the tokenizer counts their ends."""

    def __init__(self, names: Sequence[str], *, byte_level: bool, trims: bool) -> None:
        to_bytes: Callable[[str], bytes] = byte_level_piece if byte_level else sentencepiece_piece
        self._pieces = [to_bytes(name) for name in names]
        self._lengths = np.array([len(piece) for piece in self._pieces], np.int64)
        self._trimmed = np.array([_spaces_after(name) for name in names], np.int64) if trims else None

    @staticmethod
    def of(backend: Any, names: Sequence[str]) -> BytePieces | None:
        """For a tokenizer of the library; None if its tokens are not the text itself."""
        model, decoder = backend.model, _state(backend.decoder)
        byte_level = decoder.get("type") == "ByteLevel"
        if type(model).__name__ != "BPE" or model.dropout or not (byte_level or model.byte_fallback):
            return None
        trimming = sum(bool(found.get("trim_offsets")) for found in _processors(_state(backend.post_processor)))
        return None if trimming > 1 else BytePieces(names, byte_level=byte_level, trims=trimming == 1)

    def ends(self, text: str, ids: list[int], as_array: Ids) -> Ints | None:
        """The character at which each token ends; None if the tokens are not exactly the text."""
        joined, data = b"".join(map(self._pieces.__getitem__, ids)), text.encode()
        lead = len(joined) - len(data)  # a space that the tokenizer puts in front of a text
        if lead not in (0, 1) or not joined.endswith(data) or (lead and (joined[:1] != b" " or not text)):
            return None
        if self._trimmed is not None and (lead or joined[:1].isspace()):
            return None  # a tokenizer that trims treats the first token in its own way
        ends = np.cumsum(self._lengths[as_array]) - lead
        if len(data) > len(text):
            begun = np.zeros(len(data) + 1, np.int64)  # characters that begin before each byte
            np.cumsum((np.frombuffer(data, np.uint8) & 0xC0) != 0x80, out=begun[1:])
            ends = begun[np.maximum(ends, 0)]
        if lead:
            return np.maximum(ends, 1)  # the library says that the space covers the first character
        return ends if self._trimmed is None else ends - self._trimmed[as_array]


def _state(part: Any) -> dict[str, Any]:
    """What the library says about a part of a tokenizer, as in tokenizer.json."""
    found: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return found


def _processors(about: dict[str, Any]) -> list[dict[str, Any]]:
    """A post-processor, or those that it runs one after the other."""
    return [found for part in about.get("processors", []) for found in _processors(part)] or [about]


def _spaces_after(name: str) -> int:
    """Spaces at the end of a token, which the library leaves out if it trims; not those of a token of spaces alone."""
    kept = len(name)
    while kept and (name[kept - 1] == SPACE or name[kept - 1].isspace()):
        kept -= 1
    return len(name) - kept if kept else 0
