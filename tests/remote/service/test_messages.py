"""Messages between clients and a service: every bit comes back, and bytes that anybody may have sent are refused."""

from __future__ import annotations

import struct
from functools import reduce
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremode.core.engine.messages import Asked, answer_message, read_answers
from scoremode.core.scores.answers import Answers, Window
from scoremode.core.scores.packing import START, VERSION, PackedWindows
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
    """A message with other values in some fields; ``windows__ids`` is the field ids of the field windows."""
    value = msgspec.msgpack.decode(data[START.size :])
    for path, new in fields.items():
        *parents, name = path.split("__")
        reduce(dict.__getitem__, parents, value)[name] = new
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
    "lists in lists without end": (GOOD[:12] + b"\x81\xa7windows\x81\xa3ids" + b"\x91" * 100_000, "is wrong"),
    "a negative length": (changed(GOOD, windows__ids=sent("<i4", [-1])), "$.windows.ids"),
    "a huge array": (changed(GOOD, windows__ids=sent("<i4", [1 << 47, 1 << 47])), "$.windows.ids"),
    "an unknown type": (changed(GOOD, windows__ids=sent("|O", [1], b"12345678")), "$.windows.ids"),
    "three dimensions": (changed(GOOD, windows__ids=sent("<i4", [1, 1, 1], b"1234")), "$.windows.ids"),
    "no array": (changed(GOOD, windows__ids=None), "$.windows.ids"),
    "fewer ids": (changed(GOOD, windows__ids=sent("<i4", [1], b"1234")), "do not end where"),
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


@pytest.mark.parametrize("name", ["id_ends", "row_ends", "target_ends", "widths"])
@pytest.mark.parametrize("wrong", [1 << 62, 1 << 30, -1])
def test_ends_that_do_not_fit_their_arrays(name: str, wrong: int) -> None:
    counts = getattr(PackedWindows.of(example().windows), name).copy()
    counts[0] = wrong
    with pytest.raises(InputError):
        Asked.from_bytes(changed(GOOD, **{f"windows__{name}": sent("<i8", [3], counts.tobytes())}))


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


@pytest.mark.parametrize("vocabulary", ["0", "-1", "true", "false", "3.0", "1e3", "null", '"3"', "[3]", "1" + "0" * 30])
def test_a_vocabulary_is_a_number_from_1_on(vocabulary: str) -> None:
    from scoremode.remote.service.requests import asked_in_json

    with pytest.raises(InputError):
        asked_in_json(f'{{"windows": [{{"ids": [1, 2]}}], "vocabulary": {vocabulary}}}'.encode())
    assert asked_in_json(b'{"windows": [{"ids": [1, 2]}], "vocabulary": 3}').vocabulary == 3
    assert asked_in_json(b'{"windows": [{"ids": [1, 2]}]}').vocabulary == 0, "all ids count"
