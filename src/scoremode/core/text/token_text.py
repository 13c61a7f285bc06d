"""The bytes and the text of a token. They depend only on its id, so that equal ids have equal texts everywhere.

A token stands for bytes. Bytes that are not a whole character are written as names, as in SentencePiece's vocabularies:

bytes of the token        its text
20 75 70 6F 6E            " upon"
E6 9D                     "<0xE6><0x9D>"      the first bytes of 東
B1                        "<0xB1>"            its last byte
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

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
    shown_texts, run = list(texts), list[int]()
    for index, text in enumerate([*texts, ""]):
        if _NAMES.search(text):
            run.append(index)
        elif run:
            _own(shown_texts, run)
            run = []
    return shown_texts


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
