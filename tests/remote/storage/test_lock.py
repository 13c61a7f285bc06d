"""The lock object of whoever writes behind a URI."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from pathlib import Path

import pytest
from fsspec.registry import _registry

from scoremode.core.disk.uri import RemotePath, parse
from scoremode.errors import InputError, RunError, StorageError
from scoremode.remote.storage.copies import LOCK_OBJECT
from scoremode.remote.storage.objects import Objects
from scoremode.remote.storage.runs import RemoteLock
from tests.s3 import Bucket


@pytest.fixture
def place() -> RemotePath:
    return parse(f"memory://lock-{secrets.token_hex(4)}")


def lock_of(place: RemotePath, folder: Path) -> RemoteLock:
    folder.mkdir(exist_ok=True)
    return RemoteLock(Objects(place), folder)


def names(place: RemotePath) -> list[str]:
    return list(Objects(place).listed())


def test_only_one_work_folder_has_the_lock(
    place: RemotePath, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = lock_of(place, tmp_path / "first"), lock_of(place, tmp_path / "second")
    first.acquire()
    said = f"process {os.getpid()} on .* has been writing into {place} since 20.* UTC; .* delete {place}/lock.json"
    with pytest.raises(RunError, match=said):
        second.acquire()
    second.release()
    assert names(place) == ["lock.json"]
    first.release()
    assert names(place) == []
    second.acquire()
    assert not first.is_ours()
    assert capfd.readouterr().err == ""


def test_a_lock_that_was_left_goes_to_the_same_work_folder(place: RemotePath, tmp_path: Path) -> None:
    assert not lock_of(place, tmp_path / "first").is_ours()
    lock_of(place, tmp_path / "first").acquire()  # never released
    again = lock_of(place, tmp_path / "first")
    assert again.is_ours()
    again.acquire()
    again.stays = True  # an upload was cut
    again.release()
    assert names(place) == ["lock.json"]
    third = lock_of(place, tmp_path / "first")
    third.acquire()
    third.release()
    assert names(place) == []


@pytest.mark.parametrize("content", [b"", b"[" * 50_000, b"[]", b'{"process": null, "host": "x"}'])
def test_a_lock_with_any_content_counts(place: RemotePath, tmp_path: Path, content: bytes) -> None:
    Objects(place).write(LOCK_OBJECT, content)
    with pytest.raises(RunError, match="process 0 on an unknown machine has been writing into"):
        lock_of(place, tmp_path / "second").acquire()
    assert Objects(place).read(LOCK_OBJECT, most=1 << 20) == content


def test_without_its_package_a_scheme_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme, package in (("s3", "s3fs"), ("gs", "gcsfs")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(_registry, scheme, raising=False)  # what fsspec has imported already
        with pytest.raises(StorageError, match=rf"'{package}' is not installed; .*pip install .*\[{scheme}\]"):
            lock_of(parse(f"{scheme}://runs-without/one"), tmp_path / "first")
    with pytest.raises(InputError, match="does not know the scheme viewfs://"):
        lock_of(parse("viewfs://runs/one"), tmp_path / "first")


def test_of_two_writers_that_begin_at_once_one_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    """By the store's own conditional write, five times side by side."""
    places, ready = [parse(bucket.uri(f"run-{number}")) for number in range(5)], threading.Barrier(10)
    refused = list[str]()

    def begin(place: RemotePath, folder: Path) -> None:
        lock = lock_of(place, folder)
        ready.wait()
        try:
            lock.acquire()
        except RunError as error:
            refused.append(str(error))

    pairs = [(place, tmp_path / f"{place.name}-{side}") for place in places for side in "ab"]
    threads = [threading.Thread(target=begin, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == len(places)
    for place in places:
        assert sum(f"has been writing into {place} since" in line for line in refused) == 1
