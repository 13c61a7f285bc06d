"""Untrusted JSON: a value, or a ValueError with a short reason."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from scoremode.core.reading import LARGEST
from scoremode.core.strict_json import DEEPEST, parse, read_object


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "nested too deeply"),
        ("NaN", "NaN is not JSON"),
        ("[-Infinity]", "-Infinity is not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        ("", "Expecting value"),
        ("9" * 5000, "limit"),
        ('{"a": 1} {"b": 2}', "Extra data"),
        ('{"a": 1}\u00a0', "Extra data"),
        ('{"a": 1', "Expecting"),
        (b'\xef\xbb\xbf\xef\xbb\xbf{"a": 1}', "Expecting value"),
    ],
)
def test_what_is_no_json_says_why(data: bytes | str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(data)


def test_what_is_json_is_read() -> None:
    assert parse("[" * DEEPEST + "]" * DEEPEST) != []
    assert len(parse("[" + "[]," * 10_000 + "[]]")) == 10_001, "side by side is not deep"
    assert parse("Infinity", constants=True) == math.inf


@pytest.mark.parametrize(("data", "reason"), [("[]", "not an object"), (" " * (LARGEST + 1), "larger than 64 MiB")])
def test_a_file_that_holds_no_object_says_why(tmp_path: Path, data: str, reason: str) -> None:
    (tmp_path / "a.json").write_text(data)
    with pytest.raises(ValueError, match=reason):
        read_object(tmp_path / "a.json")


@pytest.mark.parametrize("data", [b'{"a": 1}', b'{"a": 1}\r\n', b' {"a": 1} \t', b'\xef\xbb\xbf{"a": 1}\n', '{"a": 1}'])
def test_blanks_and_one_mark_around_an_object_do_not_count(data: bytes | str) -> None:
    assert parse(data) == parse(data, constants=True) == {"a": 1}
