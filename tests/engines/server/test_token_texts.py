"""The texts of tokens that a server names or decodes: with the leading space that a token alone would lose."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from scoremode.core.text.token_text import sentencepiece_piece
from scoremode.engines.server.subject import ServedTokenizer, _front

PIECES = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁upon", "▁time", "a", "▁"]


class Service:
    """A SentencePiece-style tokenizer as servers offer it: the space at the beginning of a text is stripped."""

    model = "served"

    def __init__(self, listed: Sequence[str] = ()) -> None:
        self.all, self.decoded = listed, list[list[int]]()

    def ask(self, text: str, *, special: bool, names: bool = False) -> Any:
        ids = [256 if word == " upon" else 258 if word == "a" else -1 for word in (text,)]
        found = ids if ids[0] >= 0 else list(text.encode())
        return np.array(found, np.int32), [PIECES[i] for i in found]

    def listed(self, token: int) -> str | None:
        return self.all[token] if token < len(self.all) else None

    def text_of(self, ids: Sequence[int]) -> str:
        self.decoded.append(list(ids))
        return b"".join(sentencepiece_piece(PIECES[i]) for i in ids).decode("utf-8", "replace").removeprefix(" ")


def served(service: Service) -> ServedTokenizer:
    return ServedTokenizer(cast(Any, service))


def test_tokens_of_an_encoded_text_need_no_request_and_keep_their_bytes() -> None:
    service = Service()
    tokenizer = served(service)
    ids = tokenizer.encode("é upon", special=False).ids.tolist()
    assert [tokenizer.token_text(i) for i in ids[:3]] == ["<0xC3>", "<0xA9>", " "]
    assert tokenizer.token_text(int(tokenizer.encode(" upon", special=False).ids[0])) == " upon"
    assert service.decoded == []


def test_a_token_that_was_not_named_is_decoded_after_another_one() -> None:
    tokenizer = served(Service())
    assert (tokenizer.token_text(257), tokenizer.token_text(259)) == (" time", " ")
    assert tokenizer.service.text_of([257]) == "time"


@pytest.mark.parametrize("token", [0, 257])
def test_a_list_of_all_tokens_goes_first(token: int) -> None:
    service = Service([f"text {i}" for i in range(260)])
    assert served(service).token_text(token) == f"text {token}"
    assert service.decoded == []


@pytest.mark.parametrize(
    ("full", "plain", "front"),
    [
        ([1, 5, 6, 2], [5, 6], 1),
        ([5, 6], [5, 6], 0),
        ([1, 2], [], 0),
        ([], [], 0),
        ([0, 0, 1], [0, 1], 1),
        ([5, 7], [5, 6], None),
        ([7], [7, 8], None),
        ([0xD800, 1 << 30], [1 << 30], 1),
    ],
)
def test_special_tokens_in_front_of_a_text(full: list[int], plain: list[int], front: int | None) -> None:
    assert _front(np.array(full, np.int32), np.array(plain, np.int32)) == front


def test_many_special_tokens_are_not_searched_through() -> None:
    """A text that nearly begins at every one of them: compared place by place, it would take minutes."""
    plain = np.array([7] * 150_000 + [9], np.int32)
    began = time.monotonic()
    assert _front(np.concatenate([np.full(300_000, 7, np.int32), plain]), plain) is None
    assert time.monotonic() - began < 5
