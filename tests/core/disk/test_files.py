"""Files are written atomically, and a remembered hash is used only while the file is unchanged."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scoremode.core.disk import files
from scoremode.core.disk.files import file_sha256, remembered_sha256, write_atomically, written_atomically
from scoremode.core.disk.folders import cache_folder


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"SCOREMODE_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"SCOREMODE_CACHE": "~/kept"}, "/home/kept"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/scoremode"),
        ({}, "/home/.cache/scoremode"),
    ],
)
def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str) -> None:
    for name in ("SCOREMODE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


@pytest.mark.parametrize("name", ["file", "é" * 127])
def test_an_atomic_write_replaces_what_was_there_and_leaves_nothing_else(tmp_path: Path, name: str) -> None:
    """A temporary name that contains the whole name would be too long. The folder is one that everybody may write."""
    tmp_path.chmod(0o1777)
    (tmp_path / name).write_bytes(b"old")
    write_atomically(tmp_path / name, b"new")
    assert ((tmp_path / name).read_bytes(), os.listdir(tmp_path)) == (b"new", [name])


@pytest.fixture
def umask() -> Iterator[Callable[[int], object]]:
    """Sets the umask for a test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o027, 0o640)])
def test_a_new_file_has_the_mode_that_the_umask_asks_for_and_keeps_it_when_it_is_replaced(
    tmp_path: Path, umask: Callable[[int], object], mask: int, mode: int
) -> None:
    """Other users cannot read a private file while it is written either."""
    umask(mask)
    with written_atomically(tmp_path / "file") as file:
        file.write(b"secret")
        (temporary,) = tmp_path.iterdir()
        assert (temporary.name[0], mode_of(temporary)) == (".", mode)
    umask(0o022)
    write_atomically(tmp_path / "file", b"new")
    assert mode_of(tmp_path / "file") == mode


def test_a_file_system_without_modes_is_written_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(Path, "chmod", forbidden)
    write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problem: BaseException
) -> None:
    """Ctrl-C is not an Exception, so cleaning up only on Exception would leave files."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(_: int) -> None:
        raise problem

    monkeypatch.setattr("scoremode.core.disk.files.os.fsync", fail)
    with pytest.raises(type(problem)):
        write_atomically(path, b"new")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"old", ["file"])


@pytest.fixture
def own_memo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sha256.json"


def test_a_remembered_hash_is_not_computed_again(
    own_memo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    monkeypatch.setattr(files, "ALWAYS_READ", 0)
    monkeypatch.setattr(files, "SETTLED", -1.0)
    remembered_sha256(tmp_path / "file")

    def computed(_: Path) -> str:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(files, "file_sha256", computed)
    assert remembered_sha256(tmp_path / "file") == sha(b"abc")


LARGE = (5 << 20) // 16  # times 16 bytes: more than ALWAYS_READ


def test_a_changed_file_of_the_same_size_and_time_gets_a_new_hash(own_memo: Path, tmp_path: Path) -> None:
    """As after ``cp -p`` and ``rsync -t``: the modification time is the old one, the inode's change time is not."""
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_bytes(b"a" * 16 * LARGE)
    os.utime(path, ns=(1, 1))
    time.sleep(files.SETTLED + 0.1)
    before = remembered_sha256(path)
    assert str(path) in json.loads(own_memo.read_bytes()), "a settled file is remembered"
    with path.open("r+b") as file:  # in place: the inode stays the same
        file.seek(-1, os.SEEK_END)
        file.write(b"b")
    os.utime(path, ns=(1, 1))
    in_place = remembered_sha256(path)
    assert in_place == file_sha256(path) != before
    other.write_bytes(b"a" * (16 * LARGE - 1) + b"c")
    os.utime(other, ns=(1, 1))
    os.replace(other, path)
    assert remembered_sha256(path) == file_sha256(path) != in_place


def test_a_file_that_changed_just_now_is_not_remembered(own_memo: Path, tmp_path: Path) -> None:
    """Another change within the same tick of the file system's clock would not be seen."""
    (tmp_path / "file").write_bytes(b"a" * 16 * LARGE)
    remembered_sha256(tmp_path / "file")
    assert not own_memo.exists()


def test_small_files_are_always_read(own_memo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    monkeypatch.setattr(files, "_stamp", lambda path: "always the same")
    assert remembered_sha256(tmp_path / "file") == sha(b"abc")
    (tmp_path / "file").write_bytes(b"xyz")
    assert remembered_sha256(tmp_path / "file") == sha(b"xyz")


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[1, 2]", b"\xff\xfe", b'"text"', b"[" * 100_000], ids=lambda data: repr(data[:9])
)
def test_a_damaged_memo_is_started_anew(
    own_memo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: bytes
) -> None:
    monkeypatch.setattr(files, "ALWAYS_READ", 0)
    monkeypatch.setattr(files, "SETTLED", -1.0)
    own_memo.parent.mkdir()
    own_memo.write_bytes(damage)
    (tmp_path / "file").write_bytes(b"abc")
    assert remembered_sha256(tmp_path / "file") == sha(b"abc")
    assert isinstance(json.loads(own_memo.read_bytes()), dict)


def test_a_cache_that_cannot_be_written_still_gives_the_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "no-folder").write_bytes(b"")
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "no-folder" / "cache"))
    (tmp_path / "file").write_bytes(b"abc")
    assert remembered_sha256(tmp_path / "file") == sha(b"abc")
