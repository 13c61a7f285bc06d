"""The text of a token: a function of its id alone, so that equal ids have equal texts wherever they stand.

A token stands for bytes. Bytes that are not a whole character have names, as in SentencePiece's vocabularies:

bytes of the token        its text
20 75 70 6F 6E            " upon"
E6 9D                     "<0xE6><0x9D>"      the beginning of 東
B1                        "<0xB1>"            its end
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

_LONE = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of bytes that are not UTF-8
_NAMES = re.compile("<0x([89A-F][0-9A-F])>")


def spelled(piece: bytes) -> str:
    """The bytes of a token as text.

    >>> spelled(b" upon"), spelled("東".encode()[:2])
    (' upon', '<0xE6><0x9D>')
    """
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return _LONE.sub(lambda lone: f"<0x{ord(lone[0]) - 0xDC00:02X}>", piece.decode("utf-8", "surrogateescape"))


def unnamed(token: int) -> str:
    """The text of an id that the tokenizer does not have, as in a head that is larger than the vocabulary."""
    return f"<id {token}>"


def _bytes_of(text: str) -> bytes:
    escaped = _NAMES.sub(lambda name: chr(0xDC00 + int(name[1], 16)), text)
    return escaped.encode("utf-8", "surrogateescape")


def joined(texts: Sequence[str]) -> str:
    """The text of consecutive tokens; characters that were split are whole again.

    >>> joined(["<0xE6><0x9D>", "<0xB1>", " is"])
    '東 is'
    """
    return spelled(_bytes_of("".join(texts)))


def owned(texts: Sequence[str]) -> list[str]:
    """The texts of consecutive tokens, for reading: a character that was split is shown by its first token.

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
    """Give the characters of a run of split tokens to the token in which each begins, in place."""
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
