"""Messages between clients and a service: every bit comes back, and bytes that anybody may have sent are refused."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremode.engines.messages import Against, Asked, QuestionHeader, answer_parts, read_answers
from scoremode.errors import InputError
from scoremode.plan.windows import Answers, Window
from scoremode.scores.packing import MAGIC, START, VERSION, Message
from scoremode.scores.schema import BUILT_IN
from scoremode.values import Raw


def example() -> Asked:
    random = np.random.default_rng(0)
    windows, states = [], []
    for length, rows, k in ((9, [0, 3, 8], 2), (4, [], 1), (1, [0], 5)):
        targets = random.integers(0, 50, (len(rows), k)).astype(np.int32)
        windows.append(Window(random.integers(0, 50, length).astype(np.int32), np.array(rows, np.int32), targets))
        states.append(random.integers(0, 1 << 16, (len(rows), 6)).astype(np.uint16))
    return Asked(tuple(windows), 40, (True, False, True), Against("ab" * 32, "bfloat16", tuple(states)))


def test_every_bit_of_a_request_comes_back() -> None:
    asked = example()
    found = Asked.from_bytes(b"".join(asked.to_parts()))
    assert (found.vocabulary, found.shared) == (40, (True, False, True))
    for a, b in zip(asked.windows, found.windows, strict=True):
        for name in ("ids", "rows", "targets"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert found.against is not None
    assert asked.against is not None
    assert (found.against.digest, found.against.dtype) == (asked.against.digest, "bfloat16")
    for a_states, b_states in zip(asked.against.states, found.against.states, strict=True):
        np.testing.assert_array_equal(a_states, b_states)


def answers_to(asked: Asked) -> list[Answers]:
    random, found = np.random.default_rng(1), []
    for window in asked.windows:
        rows, k = window.targets.shape
        found.append(
            Answers(
                -random.random((rows, k)),
                rank=random.integers(1, 1 << 62, (rows, k)),
                entropy=random.random(rows),
                top=random.integers(0, 1 << 30, rows).astype(np.int32),
                top_logprob=-random.random(rows),
                kl=random.random(rows),
            )
        )
    return found


def test_every_bit_of_an_answer_comes_back() -> None:
    asked = example()
    sent = answers_to(asked)
    data = b"".join(answer_parts("abc", sent, BUILT_IN))
    instance, found = read_answers(data, asked, BUILT_IN)
    assert instance == "abc"
    for a, b in zip(sent, found, strict=True):
        for name, column in a.arrays():
            np.testing.assert_array_equal(column, getattr(b, name))
    with pytest.raises(InputError, match="has the columns"):
        read_answers(data, Asked(asked.windows), BUILT_IN)
    with pytest.raises(InputError, match="entries, but the windows need"):
        read_answers(data, Asked(asked.windows[:1], against=asked.against), BUILT_IN)


def packed(kind: str, fields: dict[str, Any], arrays: dict[str, Raw]) -> bytes:
    """A message as anybody may write it, with any header."""
    described = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    header = json.dumps({"arrays": described, **fields, "kind": kind}).encode()
    header += b" " * (-(START.size + len(header)) % 8)
    data = START.pack(MAGIC, VERSION, len(header)) + header
    for array in arrays.values():
        data += array.tobytes() + b"\0" * (-array.nbytes % 8)
    return data


def with_header(data: bytes, **changed: Any) -> bytes:
    """A message with another header."""
    _, _, length = START.unpack(data[: START.size])
    old = json.loads(data[START.size : START.size + length])
    return packed(old.pop("kind"), {**old, **changed}, {}) + data[START.size + length :]


def changed(**header: Any) -> bytes:
    """The example with another header."""
    return with_header(b"".join(example().to_parts()), **header)


GOOD = b"".join(example().to_parts())
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not a message"),
    "other magic": (b"SCOREMOX" + GOOD[8:], "not a message"),
    "a later version": (GOOD[:8] + struct.pack("<I", VERSION + 1) + GOOD[12:], f"version {VERSION + 1}"),
    "header longer than the message": (GOOD[:12] + struct.pack("<I", 1 << 31) + GOOD[16:], "cut or too long"),
    "header that is not JSON": (GOOD[:16] + b"!" + GOOD[17:], "not JSON"),
    "another kind": (packed("head", {}, {}), "$.kind"),
    "cut": (GOOD[:-8], "came with"),
    "longer": (GOOD + b"\0" * 8, "came with"),
    "a negative length": (changed(arrays={"ids": ["<i4", [-1]]}), "$.arrays"),
    "a huge array": (changed(arrays={"ids": ["<i4", [1 << 47, 1 << 47]]}), "came with"),
    "a float as a length": (changed(arrays={"ids": ["<i4", [1.5]]}), "$.arrays"),
    "an unknown type": (changed(arrays={"ids": ["object", [1]]}), "$.arrays"),
    "three dimensions": (changed(arrays={"ids": ["<i4", [1, 1, 1]]}), "$.arrays"),
    "no arrays": (changed(arrays=[]), "$.arrays"),
    "vocabulary below 0": (changed(vocabulary=-1), "vocabulary"),
    "vocabulary NaN": (changed(vocabulary=float("nan")), "not JSON"),
    "a digest that is a number": (changed(against=5), "against"),
    "states of an unknown dtype": (changed(states_dtype="float8"), "$.states_dtype"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_messages_are_refused_in_one_line(name: str) -> None:
    data, words = BAD[name]
    with pytest.raises(InputError) as caught:
        Asked.from_bytes(data)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.fix


def test_counts_that_do_not_fit_their_arrays() -> None:
    asked = example()
    message = Message(b"".join(asked.to_parts()), QuestionHeader)
    arrays = {name: message.array(name, place.dtype.str, len(place.shape)) for name, place in message.places.items()}
    for name in ("tokens", "rows_of", "targets_of"):
        for wrong in (1 << 30, -1, 0):
            counts = arrays[name].copy()
            counts[0] = wrong
            with pytest.raises(InputError):
                Asked.from_bytes(packed("score", {"vocabulary": 0}, {**arrays, name: counts}))
    assert len(Asked.from_bytes(packed("score", {"vocabulary": 0}, arrays)).windows) == 3


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
    from scoremode.service.forms import asked_in_json

    with pytest.raises(InputError):
        asked_in_json(f'{{"windows": [{{"ids": [1, 2]}}], "vocabulary": {vocabulary}}}'.encode())
    assert asked_in_json(b'{"windows": [{"ids": [1, 2]}], "vocabulary": 3}').vocabulary == 3
    assert asked_in_json(b'{"windows": [{"ids": [1, 2]}]}').vocabulary == 0, "all ids count"
