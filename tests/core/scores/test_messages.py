"""Messages between clients and a service: every bit comes back, and bytes that anybody may have sent are refused."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremode.core.scores.answers import Answers, Window
from scoremode.core.scores.messages import START, VERSION, Asked, answer_message, read_answers
from scoremode.errors import InputError


def example() -> Asked:
    random = np.random.default_rng(0)
    windows = []
    for length, rows, k in ((9, [0, 3, 8], 2), (4, [], 1), (1, [0], 5)):
        targets = random.integers(0, 50, (len(rows), k)).astype(np.int32)
        windows.append(Window(random.integers(0, 50, length).astype(np.int32), np.array(rows, np.int32), targets))
    return Asked(tuple(windows), 40, (True, False, True))


def test_every_bit_of_a_request_comes_back() -> None:
    asked = example()
    found = Asked.from_bytes(asked.to_bytes())
    assert (found.vocabulary, found.shared) == (40, (True, False, True))
    plain = Asked.from_bytes(Asked(asked.windows).to_bytes())
    assert (plain.vocabulary, plain.shared) == (0, ()), "all ids count, and no window starts like another"
    for a, b in zip(asked.windows, found.windows, strict=True):
        for name in ("ids", "rows", "targets"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def answers_to(asked: Asked) -> list[Answers]:
    random, found = np.random.default_rng(1), []
    for window in asked.windows:
        rows, k = window.targets.shape
        found.append(
            Answers(
                -random.random((rows, k)),
                rank=random.integers(1, 1 << 62, (rows, k)),
                entropy=random.random((rows,)),
                top=random.integers(0, 1 << 30, (rows,)).astype(np.int32),
                top_logprob=-random.random((rows,)),
            )
        )
    return found


def test_every_bit_of_an_answer_comes_back() -> None:
    asked = example()
    sent = answers_to(asked)
    data = answer_message("abc", sent)
    instance, found = read_answers(data, asked)
    assert instance == "abc"
    for a, b in zip(sent, found, strict=True):
        for name, column in a.arrays():
            np.testing.assert_array_equal(column, getattr(b, name))
    with pytest.raises(InputError, match="other windows"):
        read_answers(data, Asked(asked.windows[:1]))


def changed(data: bytes, **fields: Any) -> bytes:
    """A message with other values in some fields; ``ids``, ``rows`` and ``targets`` are those of the first window."""
    value = msgspec.msgpack.decode(data[START.size :])
    for name, new in fields.items():
        (value["windows"][0] if name in ("ids", "rows", "targets") else value)[name] = new
    return data[: START.size] + msgspec.msgpack.encode(value)


def sent(dtype: str, shape: list[Any], data: bytes = b"") -> list[Any]:
    """An array as it travels."""
    return [dtype, shape, data]


GOOD = example().to_bytes()
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not a message"),
    "other magic": (b"SCOREMOX" + GOOD[8:], "not a message"),
    "a later version": (GOOD[:8] + struct.pack("<I", VERSION + 1) + GOOD[12:], f"version {VERSION + 1}"),
    "an earlier version": (GOOD[:8] + struct.pack("<I", 1) + GOOD[12:], "version 1"),
    "what is not MessagePack": (GOOD[:12] + b"\xc1" + GOOD[13:], "is wrong"),
    "another kind": (changed(GOOD, type="answers"), "$.type"),
    "cut": (GOOD[:-8], "is wrong"),
    "longer": (GOOD + b"\0" * 8, "is wrong"),
    "lists in lists without end": (GOOD[:12] + b"\x81\xa7windows\x91\x81\xa3ids" + b"\x91" * 100_000, "is wrong"),
    "a negative length": (changed(GOOD, ids=sent("<i4", [-1])), "$.windows[0].ids"),
    "a huge array": (changed(GOOD, ids=sent("<i4", [1 << 47, 1 << 47])), "$.windows[0].ids"),
    "an unknown type": (changed(GOOD, ids=sent("|O", [1], b"12345678")), "$.windows[0].ids"),
    "wider integers": (changed(GOOD, ids=sent("<i8", [1], b"12345678")), "an array of <i8 instead of <i4"),
    "three dimensions": (changed(GOOD, ids=sent("<i4", [1, 1, 1], b"1234")), "$.windows[0].ids"),
    "no array": (changed(GOOD, ids=None), "$.windows[0].ids"),
    "ids in lines": (changed(GOOD, ids=sent("<i4", [1, 1], b"1234")), "other axes"),
    "fewer targets": (changed(GOOD, targets=sent("<i4", [1, 1], b"1234")), "one line for each row"),
    "too many windows": (changed(GOOD, windows=[None] * 65_537), "$.windows"),
    "vocabulary below 0": (changed(GOOD, vocabulary=-1), "$.vocabulary"),
    "too few that are shared": (changed(GOOD, shared=[True]), "one value per window"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_messages_are_refused_in_one_line(name: str) -> None:
    data, words = BAD[name]
    with pytest.raises(InputError) as caught:
        Asked.from_bytes(data)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.fix


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_flipped_bytes_are_a_request_or_a_refusal(flips: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for at, value in flips:
        data[at] = value
    try:
        found = Asked.from_bytes(bytes(data))
    except InputError:
        return
    assert len(found.windows) == len(example().windows)
