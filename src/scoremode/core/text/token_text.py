"""The bytes and the text of a token. They depend only on its id, so that equal ids have equal texts everywhere.

A token stands for bytes. Bytes that are not a whole character are written as names, as in SentencePiece's vocabularies:

bytes of the token        its text
20 75 70 6F 6E            " upon"
E6 9D                     "<0xE6><0x9D>"      the first bytes of 東
B1                        "<0xB1>"            its last byte

The names in a vocabulary also show where tokens end, and which characters are side by side in no token, without a
call of the library. The tokens of a byte-level or byte-fallback BPE, one after the other, are the text itself. If their
bytes are those of the text, each token ends where its bytes end, and a split character belongs to the first of its
tokens. If the bytes differ (something was normalized, stripped or unknown), the library computes the positions, which
is a third of its work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from scoremode.values import Ids, Ints

_LONE = re.compile("[\udc80-\udcff]")  # "surrogateescape" makes these from bytes that are not UTF-8
_NAMES = re.compile("<0x([89A-F][0-9A-F])>")

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
BYTE_ALPHABET = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The printable characters that byte-level tokenizers use for the 256 bytes."""


def spelled(piece: bytes) -> str:
    """Returns the bytes of a token as text.

    >>> spelled(b" upon"), spelled("東".encode()[:2])
    (' upon', '<0xE6><0x9D>')
    """
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return _LONE.sub(lambda lone: f"<0x{ord(lone[0]) - 0xDC00:02X}>", piece.decode("utf-8", "surrogateescape"))


def unnamed(token: int) -> str:
    """Returns the text for an id that the tokenizer does not have, as in a head that is larger than the vocabulary."""
    return f"<id {token}>"


def byte_level_piece(name: str) -> bytes:
    """Returns the bytes of a token, from its name in a byte-level vocabulary."""
    if all(character in BYTE_ALPHABET for character in name):
        return bytes(BYTE_ALPHABET[character] for character in name)
    return name.encode()  # an added token, whose name is plain text


def sentencepiece_piece(name: str) -> bytes:
    """Returns the bytes of a token, from its name in a vocabulary that marks spaces with ▁."""
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return bytes([int(match[1], 16)])
    return name.replace("▁", " ").encode()


def _bytes_of(text: str) -> bytes:
    escaped = _NAMES.sub(lambda name: chr(0xDC00 + int(name[1], 16)), text)
    return escaped.encode("utf-8", "surrogateescape")


def joined(texts: Sequence[str]) -> str:
    """Returns the text of consecutive tokens, in which split characters are whole again.

    >>> joined(["<0xE6><0x9D>", "<0xB1>", " is"])
    '東 is'
    """
    return spelled(_bytes_of("".join(texts)))


def owned(texts: Sequence[str]) -> list[str]:
    """Returns the texts of consecutive tokens for reading: a split character is shown by its first token.

    >>> owned([" <0xE6><0x9D>", "<0xB1>", " is"])
    [' 東', '<0xB1>', ' is']
    """
    found, run = list(texts), list[int]()
    for index, text in enumerate([*texts, ""]):
        if _NAMES.search(text):
            run.append(index)
        elif run:
            _own(found, run)
            run = []
    return found


def _own(texts: list[str], run: Sequence[int]) -> None:
    """Gives each character of a run of split tokens to the token in which it begins, in place."""
    pieces = [_bytes_of(texts[index]) for index in run]
    ends = list(accumulate(map(len, pieces)))
    shown = [""] * len(run)
    at = token = 0
    for character in b"".join(pieces).decode("utf-8", "surrogateescape"):
        raw = character.encode("utf-8", "surrogateescape")
        while at >= ends[token]:
            token += 1
        shown[token] += spelled(raw)
        at += len(raw)
    for index, text in zip(run, shown, strict=True):
        texts[index] = text or texts[index]


# ── the names of a vocabulary ────────────────────────────────────────────────────────────────────────────────────────
SPACE = "Ġ"  # the name of a space in a byte-level vocabulary
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")  # with these, names are not parts of a text


class Vocabulary:
    """The names of all ids of a tokenizer from the library ``tokenizers``."""

    def __init__(self, backend: Any, size: int) -> None:
        self._backend = backend
        self.names = [name or "" for name in map(backend.id_to_token, range(size))]
        plain = not any(getattr(backend.model, name, None) for name in AFFIXES)
        self.has_plain_names = plain and type(backend.model).__name__ in ("BPE", "Unigram")
        """Is every token a run of characters of the text, as the model sees it?"""

    @cached_property
    def byte_positions(self) -> BytePositions | None:
        """The bytes of each id, to compute positions; None if the tokens are not the text itself."""
        model, decoder = self._backend.model, _state(self._backend.decoder)
        byte_level = decoder.get("type") == "ByteLevel"
        if not self.has_plain_names or type(model).__name__ != "BPE" or not (byte_level or model.byte_fallback):
            return None
        processors = _processors(_state(self._backend.post_processor))
        trimming = sum(bool(found.get("trim_offsets")) for found in processors)
        return None if trimming > 1 else BytePositions(self.names, byte_level=byte_level, trims=trimming == 1)

    def never_side_by_side(self, left: int, right: int) -> bool:
        """Is there no token with the last character of ``left`` and the first character of ``right`` side by side?"""
        return self._last[left] << 32 | self._first[right] not in self._pairs

    @cached_property
    def _first(self) -> list[int]:
        return [ord(name[0]) if name else 0 for name in self.names]

    @cached_property
    def _last(self) -> list[int]:
        return [ord(name[-1]) if name else 0 for name in self.names]

    @cached_property
    def _pairs(self) -> frozenset[int]:
        """All pairs of characters that are side by side in some token, each pair as one number."""
        nameless = {0}  # nothing is known about an id without a name
        return frozenset(nameless.union(a << 32 | b for name in self.names for a, b in pairwise(map(ord, name))))


class BytePositions:
    """The bytes of each id of a vocabulary, and the library's rule for where tokens end."""

    def __init__(self, names: list[str], *, byte_level: bool, trims: bool) -> None:
        self._pieces = [*map(byte_level_piece if byte_level else sentencepiece_piece, names)]
        self._lengths = np.array([len(piece) for piece in self._pieces], np.int64)
        self._trimmed = np.array([_spaces_after(name) for name in names], np.int64) if trims else None

    def ends(self, text: str, ids: list[int], as_array: Ids) -> Ints | None:
        """Returns the character at which each token ends, or None if the tokens are not exactly the text."""
        joined, data = b"".join(map(self._pieces.__getitem__, ids)), text.encode()
        lead = len(joined) - len(data)  # 1 if the tokenizer puts a space before the text
        if lead not in (0, 1) or not joined.endswith(data) or (lead and (joined[:1] != b" " or not text)):
            return None
        if self._trimmed is not None and (lead or joined[:1].isspace()):
            return None  # a tokenizer that trims handles the first token differently
        ends = np.cumsum(self._lengths[as_array]) - lead
        if len(data) > len(text):
            begun = np.zeros(len(data) + 1, np.int64)  # how many characters begin before each byte
            np.cumsum((np.frombuffer(data, np.uint8) & 0xC0) != 0x80, out=begun[1:])
            ends = begun[np.maximum(ends, 0)]
        if lead:
            return np.maximum(ends, 1)  # for the library, the added space covers the first character
        return ends if self._trimmed is None else ends - self._trimmed[as_array]


def _state(part: Any) -> dict[str, Any]:
    """Returns the settings of a part of a tokenizer, as in tokenizer.json."""
    found: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return found


def _processors(about: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the post-processors that a post-processor runs in order, or itself if it runs no others."""
    return [found for part in about.get("processors", []) for found in _processors(part)] or [about]


def _spaces_after(name: str) -> int:
    """Returns how many spaces at its end a trimming library leaves out of a token; 0 for a token of only spaces."""
    kept = len(name)
    while kept and (name[kept - 1] == SPACE or name[kept - 1].isspace()):
        kept -= 1
    return len(name) - kept if kept else 0
