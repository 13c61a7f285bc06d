"""Messages between clients and a service: every bit comes back, and bytes that anybody may have sent are refused."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremode.engines.lines import KL_WORDS, width
from scoremode.engines.messages import MAGIC, START, VERSION, Against, Asked, answer_parts, pack, parse, read_answers
from scoremode.errors import InputError
from scoremode.plan.windows import Window


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


def test_every_bit_of_an_answer_comes_back() -> None:
    windows = example().windows
    random = np.random.default_rng(1)
    lines = [
        random.integers(-(1 << 31), 1 << 31, (len(w.rows), width(w.targets.shape[1]) + KL_WORDS)).astype(np.int32)
        for w in windows
    ]
    instance, found = read_answers(b"".join(answer_parts("abc", lines)), windows, KL_WORDS)
    assert instance == "abc"
    for a, b in zip(lines, found, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(InputError, match="entries for"):
        read_answers(b"".join(answer_parts("abc", lines)), windows, 0)


def changed(**header: Any) -> bytes:
    """The example with another header."""
    data = b"".join(example().to_parts())
    _, _, length = START.unpack(data[: START.size])
    old = json.loads(data[START.size : START.size + length])
    new = json.dumps({**old, **header}).encode()
    new += b" " * (-(START.size + len(new)) % 8)
    return START.pack(MAGIC, VERSION, len(new)) + new + data[START.size + length :]


GOOD = b"".join(example().to_parts())
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not a message"),
    "other magic": (b"SCOREMOX" + GOOD[8:], "not a message"),
    "a later version": (GOOD[:8] + struct.pack("<I", 2) + GOOD[12:], "version 2"),
    "header longer than the message": (GOOD[:12] + struct.pack("<I", 1 << 31) + GOOD[16:], "cut or too long"),
    "header that is not JSON": (GOOD[:16] + b"!" + GOOD[17:], "not JSON"),
    "another kind": (b"".join(pack("head", {}, {})), "not of the kind"),
    "cut": (GOOD[:-8], "came with"),
    "longer": (GOOD + b"\0" * 8, "came with"),
    "a negative length": (changed(arrays={"ids": ["int32", [-1]]}), "described wrongly"),
    "a huge array": (changed(arrays={"ids": ["int32", [1 << 47, 1 << 47]]}), "came with"),
    "a float as a length": (changed(arrays={"ids": ["int32", [1.0]]}), "described wrongly"),
    "an unknown type": (changed(arrays={"ids": ["object", [1]]}), "described wrongly"),
    "three dimensions": (changed(arrays={"ids": ["int32", [1, 1, 1]]}), "described wrongly"),
    "no arrays": (changed(arrays=[]), "not of the kind"),
    "vocabulary below 0": (changed(vocabulary=-1), "vocabulary"),
    "vocabulary NaN": (changed(vocabulary=float("nan")), "not JSON"),
    "a digest that is a number": (changed(against=5), "against"),
    "states of an unknown dtype": (changed(states_dtype="float8"), "against"),
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
    fields, arrays = parse(b"".join(asked.to_parts()), "score")
    for name in ("tokens", "rows_of", "targets_of"):
        for wrong in (1 << 30, -1, 0):
            counts = arrays[name].copy()
            counts[0] = wrong
            with pytest.raises(InputError):
                Asked.from_bytes(b"".join(pack("score", {"vocabulary": 0}, {**arrays, name: counts})))
    assert fields["kind"] == "score"


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
