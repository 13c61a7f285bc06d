"""Records: complete ones are read back; a flipped bit and a record of another file are detected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scoremode.core.disk.records import RecordFile, identity_in, is_record_file
from scoremode.errors import RunError

HEADER: dict[str, Any] = {"work": "one"}
BODIES = [b"first", b"", b"third" * 9]


def written(path: Path) -> list[int]:
    file = RecordFile(path, HEADER)
    places = [file.append(number, body) for number, body in enumerate(BODIES)]
    file.close()
    return places


def read(path: Path, header: dict[str, Any] = HEADER) -> list[tuple[int, bytes]]:
    file = RecordFile(path, header)
    found = [(number, body) for number, _, body in file.replay()]
    file.close()
    return found


def test_records_come_back_and_more_can_follow(tmp_path: Path) -> None:
    written(tmp_path / "r")
    assert read(tmp_path / "r") == list(enumerate(BODIES))
    file = RecordFile(tmp_path / "r", HEADER)
    list(file.replay())
    at = file.append(7, b"more")
    assert file.body(at, 7) == b"more"
    file.close()
    assert read(tmp_path / "r")[-1] == (7, b"more")


def test_any_flipped_bit_costs_its_record_and_those_after_it(tmp_path: Path) -> None:
    places = written(tmp_path / "r")
    whole = (tmp_path / "r").read_bytes()
    for bit in range(places[1] * 8, len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "r").write_bytes(damaged)
        assert len(read(tmp_path / "r")) == (1 if bit < places[2] * 8 else 2), f"bit {bit}"
        (tmp_path / "r").write_bytes(whole)


def test_a_damaged_file_is_told_from_one_that_a_kill_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = written(tmp_path / "r")
    whole = (tmp_path / "r").read_bytes()
    (tmp_path / "r").write_bytes(whole[:-3])
    assert len(read(tmp_path / "r")) == 2
    assert capsys.readouterr().err == ""
    (tmp_path / "r").write_bytes(whole[: places[1] - 1] + b"?" + whole[places[1] :])
    assert read(tmp_path / "r") == []
    assert f"is damaged after byte {places[0]}" in capsys.readouterr().err


def test_every_cut_leaves_whole_records(tmp_path: Path) -> None:
    places = written(tmp_path / "r")
    whole = (tmp_path / "r").read_bytes()
    for cut in range(len(whole)):
        (tmp_path / "r").write_bytes(whole[:cut])
        ends = [*places[1:], len(whole)]
        assert len(read(tmp_path / "r")) == sum(end <= cut for end in ends), f"cut at {cut}"


def test_another_files_record_is_not_believed(tmp_path: Path) -> None:
    written(tmp_path / "r")
    other = RecordFile(tmp_path / "other", {"work": "two"})
    other.close()
    start = len((tmp_path / "other").read_bytes())
    with (tmp_path / "other").open("ab") as file:
        file.write((tmp_path / "r").read_bytes()[start:])
    assert read(tmp_path / "other", {"work": "two"}) == []


def test_a_file_of_another_computation_is_refused_and_not_changed(tmp_path: Path) -> None:
    written(tmp_path / "r")
    before = (tmp_path / "r").read_bytes()
    with pytest.raises(RunError, match="another computation"):
        RecordFile(tmp_path / "r", {"work": "two"})
    assert (tmp_path / "r").read_bytes() == before


@pytest.mark.parametrize("line", [b"", b'{"identity": {}', b"[" * 100_000 + b"\n", b"\xff\n", b"[1]\n", b"NaN\n"])
def test_a_header_that_is_not_one_has_no_identity(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "r").write_bytes(line)
    assert identity_in(tmp_path / "r") is None


def test_records_whose_end_was_lost_are_still_ours(tmp_path: Path) -> None:
    """After a power cut, the end of a file may be zeros."""
    path = tmp_path / "records"
    RecordFile(path, {**HEADER, "identity": {}}).close()
    path.write_bytes(path.read_bytes() + bytes(512))
    assert is_record_file(path, HEADER)
    path.write_bytes(b"my notes\n" + bytes(512))
    assert not is_record_file(path, HEADER)
