"""The writer of a folder elsewhere: pieces of a journal, notes, and the lease."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import closing
from pathlib import Path

import pytest

from scoremode.disk.folders import PLACE
from scoremode.disk.records import RecordFile
from scoremode.errors import RunError, StorageError
from scoremode.remote import writer
from scoremode.remote.lease import Lease, LeaseLostError
from scoremode.remote.objects import Objects
from scoremode.remote.uri import Place, parse
from scoremode.remote.writer import RemoteWriter, SentJournals


@pytest.fixture
def place() -> Place:
    return parse(f"memory://writer-{secrets.token_hex(4)}")


def work_folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def flags(place: Place) -> list[str]:
    return [found.name for found in Objects(place).listed() if found.name.endswith(".json")]


def test_a_journal_that_was_cut_after_a_kill_comes_back_whole(place: Place, tmp_path: Path) -> None:
    here, path = work_folder(tmp_path / "here"), tmp_path / "here" / "journal"
    records = RecordFile(path, {"identity": 1})
    records.append(0, b"record 0")
    torn = path.read_bytes()[-20:]
    with closing(RemoteWriter(place, here)) as first:
        assert first.is_outdated
        first.keep_sent(())
        first.send_journal(path)
        with path.open("ab") as file:
            file.write(torn)  # as a kill leaves it; it is sent, too
    with closing(RemoteWriter(place, here)) as second:
        assert not second.is_outdated
        assert second.holder == first.holder
        assert SentJournals(second.objects).length(first.holder) == records.end + len(torn)
        second.send_journal(path)
        records.append(1, b"record 1")
    records.close()
    elsewhere = work_folder(tmp_path / "elsewhere")
    with closing(RemoteWriter(place, elsewhere)) as third:
        assert third.is_outdated
        third.fetch_journal(elsewhere / "journal")
        assert (elsewhere / "journal").read_bytes() == path.read_bytes()
        third.send_journal(elsewhere / "journal")  # all of it: the pieces are another writer's
        sent = SentJournals(third.objects)
        assert {sent.length(first.holder), sent.length(third.holder)} == {path.stat().st_size}
        third.remove_journals(of_others=True)
        assert list(SentJournals(third.objects).pieces) == [third.holder]
        third.remove_journals()
        assert SentJournals(third.objects).pieces == {}


def test_a_chain_ends_where_a_piece_is_missing_or_incomplete(place: Place) -> None:
    objects, holders = Objects(place), ("a" * 16, "b" * 16)
    for name, size in (
        (f"{holders[0]}/000000-0-10", 10),
        (f"{holders[0]}/000001-10-20", 10),
        (f"{holders[0]}/000003-30-40", 10),
        (f"{holders[1]}/000000-0-10", 10),
        (f"{holders[1]}/000001-10-30", 7),
        (f"{holders[1]}/notes", 7),
    ):
        objects.write(f"partial/{name}", b"x" * size)
    sent = SentJournals(objects)
    assert {holder: sent.length(holder) for holder in sent.pieces} == {holders[0]: 20, holders[1]: 10}
    assert sent.longest == holders[0]
    assert SentJournals(Objects(place / "nothing")).longest == ""


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"holder": "x", "sent": {}}', b'{"holder": 1, "sent": []}'])
def test_without_a_usable_note_a_work_folder_does_not_count(place: Place, tmp_path: Path, note: bytes) -> None:
    (tmp_path / PLACE).write_bytes(note)
    with closing(RemoteWriter(place, tmp_path)) as made:
        assert made.is_outdated
        made.record_sent("states-00000.safetensors", "0" * 64)
    with closing(RemoteWriter(place, tmp_path)) as again:
        assert again.holder == made.holder
        assert again.sent["states-00000.safetensors"] == "0" * 64


def test_what_is_scored_while_nothing_can_be_sent_is_sent_later(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer, "OFTEN", 0.05)
    path = tmp_path / "journal"
    path.write_bytes(b"header\n")
    put = Objects._put
    with closing(RemoteWriter(place, tmp_path)) as made:
        made.send_journal(path)

        def refuse(*_: object) -> None:
            raise StorageError("it is away", fix="wait")

        monkeypatch.setattr(Objects, "_put", refuse)
        path.write_bytes(b"header\nrecord;")
        time.sleep(1.0)
        monkeypatch.setattr(Objects, "_put", put)
        deadline = time.monotonic() + 20
        while SentJournals(made.objects).length(made.holder) < 14 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(";")[0] for line in lines] == [
        "scoremode: it is away",
        f"scoremode: {place} can be written again",
    ]


def test_a_lease_is_lost_to_a_newer_writer_and_with_its_flag(place: Place) -> None:
    objects = Objects(place)
    first, second = Lease(objects, "a" * 16), Lease(objects, "b" * 16)
    first.acquire()
    first.verify()
    with pytest.raises(RunError, match="is writing into"):
        second.acquire()
    assert flags(place) == [f"writer-000001-{'a' * 16}.json"]
    objects.write(f"writer-000002-{'b' * 16}.json", b'{"host": "there", "process": 7}')
    with pytest.raises(LeaseLostError, match="was taken over by process 7 on there"):
        first.verify()
    objects.remove(f"writer-000002-{'b' * 16}.json")
    first.verify()
    objects.remove(f"writer-000001-{'a' * 16}.json")
    with pytest.raises(LeaseLostError, match="was taken over by another process"):
        first.verify()
    first.release()


@pytest.mark.parametrize("content", [b"", b"[" * 50_000, b"[]", b'{"seconds": "x", "process": null, "renewed": 1e400}'])
def test_a_flag_with_any_content_counts_as_a_writer(place: Place, content: bytes) -> None:
    Objects(place).write(f"writer-000001-{'a' * 16}.json", content)
    with pytest.raises(RunError, match="process 0 on an unknown machine is writing into"):
        Lease(Objects(place), "b" * 16).acquire()


def test_a_killed_process_takes_its_own_flag_over_at_once(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    said = {"host": "here", "process": 3, "seconds": 1000, "renewed": time.time()}
    for name in ("writer-000001", "wants-000002"):
        Objects(place).write(f"{name}-{'a' * 16}.json", json.dumps(said).encode())
    lease = Lease(Objects(place), "a" * 16)
    lease.acquire()
    assert flags(place) == [f"writer-000003-{'a' * 16}.json"]
    lease.release()
    assert flags(place) == []
    assert capfd.readouterr().err == ""
