"""References in a bucket: sent shard by shard, resumed from other machines, fetched once by each of them."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.disk.folders import shard_name
from scoremode.errors import StorageError
from scoremode.references.reader import Reference
from scoremode.references.writer import StatesWriter
from scoremode.remote.objects import Objects
from scoremode.remote.uri import Place, located
from scoremode.remote.writer import RemoteWriter
from scoremode.scores import journal
from scoremode.store.remote_copies import open_reference
from scoremode.store.remote_runs import RemoteClaim
from tests.s3 import Bucket, at_random, proxy_to, start, wait_until

TEXT = "the cat sat on the mat and the dog sat on the log. " * 80
QUESTION: dict[str, Any] = {"text": TEXT, "context_length": 48, "stride": 24}
FLAGS = ["--text", TEXT, "--context-length", "48", "--stride", "24", "--json"]
STATES = "ref/states-00000.safetensors"

Move = Callable[[], Path]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteClaim, "shard_bytes", 1 << 18)


def gets(bucket: Bucket, key: str) -> int:
    """How often a file itself was asked for."""
    return bucket.server.requests.count(("GET", f"/{bucket.name}/{key}"))


def test_a_reference_is_fetched_once_by_each_machine(
    bucket: Bucket, tmp_path: Path, elsewhere: Move, small_shards: None
) -> None:
    uri, here = bucket.uri("ref"), tmp_path / "here"
    sm.reference("table:successor", uri, **QUESTION)
    sm.reference("table:successor", here, **QUESTION)
    stored = Reference.open(here)
    assert sum("states-" in name for name in bucket.names()) > 4
    elsewhere()
    bucket.server.requests.clear()
    found = open_reference(uri)
    assert np.array_equal(found.rows(0, found.targets), stored.rows(0, stored.targets))
    assert np.array_equal(found.head_weight(), stored.head_weight())
    assert gets(bucket, STATES) == 1
    against = sm.compare(uri, "table:uniform", out=bucket.uri("compared"))[0]
    expected = sm.compare(str(here), "table:uniform", out=tmp_path / "compared")[0]
    assert against.kl is not None
    assert expected.kl is not None
    assert np.array_equal(against.kl, expected.kl)
    with sm.open("table:uniform") as model:
        assert np.array_equal(np.asarray(model.compare(uri).kl), expected.kl)
    assert gets(bucket, STATES) == 1
    assert sm.compare(uri, bucket.uri("compared/table:uniform"))[0].kl is not None
    elsewhere()
    again = sm.reference("table:successor", uri, **QUESTION)
    assert again.cached
    assert gets(bucket, STATES) == 1  # its files are there: that is enough to know
    bucket.remove(STATES)
    with pytest.raises(StorageError, match=f"{bucket.uri(STATES)} is missing"):
        sm.reference("table:successor", uri, **QUESTION)


def test_shards_are_removed_here_once_they_are_there(
    bucket: Bucket, tmp_path: Path, elsewhere: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are damaged on their way: they are sent again.."""
    cache, damaged = elsewhere(), list[str]()
    sha256, add = Objects.sha256, journal.Journal.add

    def no_faster_than_the_network(*given: Any) -> None:
        add(*given)
        wait_until(lambda: len(list(cache.glob("references/*/states-*"))) <= 3)

    def watched(self: Objects, name: str, size: int) -> str:
        if not damaged:
            damaged.append(name)
            bucket.put(f"ref/{name}", b"x" * size)
        return sha256(self, name, size)

    monkeypatch.setattr(Objects, "sha256", watched)
    monkeypatch.setattr(RemoteClaim, "shard_bytes", 1 << 16)
    monkeypatch.setattr(journal.Journal, "add", no_faster_than_the_network)
    sm.reference("table:successor", bucket.uri("ref"), **{**QUESTION, "text": TEXT[:1200]})
    sm.reference("table:successor", tmp_path / "here", **{**QUESTION, "text": TEXT[:1200]})
    shards = sorted((tmp_path / "here").glob("states-*"))
    stored = np.concatenate([np.frombuffer(path.read_bytes()[512:], np.uint8) for path in shards])
    objects = bucket.objects()
    there = [objects[name][512:] for name in sorted(objects) if "states-" in name]
    assert len(there) > 15
    assert damaged
    assert len(list(cache.glob("references/*/states-*"))) <= 3
    assert np.array_equal(np.frombuffer(b"".join(there), np.uint8), stored)
    assert sm.load(bucket.uri("ref")).manifest["noise_kl"] == sm.load(tmp_path / "here").manifest["noise_kl"]


def test_a_shard_that_is_written_again_comes_back(bucket: Bucket, tmp_path: Path, elsewhere: Move) -> None:
    place = located(bucket.uri("ref"))
    assert isinstance(place, Place)
    folder = tmp_path / "work"
    folder.mkdir()
    rows = np.arange(6 * 4, dtype="<f4").reshape(6, 4)
    (folder / "journal").write_bytes(b"")
    sent = RemoteWriter(place, folder)
    sent.send_journal(folder / "journal")
    with StatesWriter(
        folder, targets=6, width=4, dtype="float32", identity={"a": 1}, shard_bytes=32, remote=sent
    ) as writer:
        writer.write(0, rows)  # three shards
        writer.flush()
        wait_until(lambda: not list(folder.glob("states-*")))
        writer.write(3, -rows[3:4])  # the second shard comes back, is written, and is sent again
        assert [path.name for path in folder.glob("states-*")] == [shard_name(1)]
        writer.flush()
        wait_until(lambda: not list(folder.glob("states-*")))
    sent.close()
    found = bucket.objects()[f"ref/{shard_name(1)}"]
    assert np.array_equal(np.frombuffer(found[512:], "<f4").reshape(2, 4), np.stack([rows[2], -rows[3]]))
    again = RemoteWriter(place, folder)
    with StatesWriter(
        folder, targets=6, width=4, dtype="float32", identity={"a": 1}, shard_bytes=32, remote=again
    ) as writer:
        assert writer.present.all()
        bucket.put(f"ref/{shard_name(0)}", found)
        with pytest.raises(StorageError, match="is not what was sent"):
            writer.write(0, rows[:1])
    again.close()


def test_another_machine_knows_the_shards_that_were_sent(bucket: Bucket, tmp_path: Path, elsewhere: Move) -> None:
    """It fetches none of them. Without the list, or with a shard of another size, rows are scored again."""
    place = located(bucket.uri("ref"))
    assert isinstance(place, Place)
    rows = np.arange(6 * 4, dtype="<f4").reshape(6, 4)
    facts: dict[str, Any] = {"targets": 6, "width": 4, "dtype": "float32", "identity": {"a": 1}, "shard_bytes": 32}

    def present_on(machine: str) -> list[bool]:
        folder = tmp_path / machine
        folder.mkdir()
        with closing(RemoteWriter(place, folder)) as found:
            assert found.is_outdated
            found.fetch_journal(folder / "journal")
            with StatesWriter(folder, remote=found, **facts) as writer:
                present: list[bool] = writer.present.tolist()
                return present

    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "journal").write_bytes(b"a journal")
    with closing(RemoteWriter(place, folder)) as sent:
        sent.send_journal(folder / "journal")
        with StatesWriter(folder, remote=sent, **facts) as writer:
            writer.write(0, rows)
            writer.flush()
            wait_until(lambda: not list(folder.glob("states-*")))
    bucket.server.requests.clear()
    assert present_on("second") == [True] * 6
    assert not [path for method, path in bucket.server.requests if method == "GET" and "states-" in path]
    bucket.put(f"ref/{shard_name(1)}", b"short")
    assert present_on("third") == [True, True, False, False, True, True]
    bucket.put(f"ref/partial/{sent.holder}/sent.json", b"nonsense")
    assert present_on("fourth") == [False] * 6


def test_killed_while_it_is_made_and_resumed_on_other_machines(
    bucket: Bucket, tmp_path: Path, elsewhere: Move, small_shards: None
) -> None:
    uri, chance = bucket.uri("ref"), random.Random(7)
    command = ["reference", "table:successor", *FLAGS, "--out", uri]
    resumed = 0
    for kill in range(3):
        process = start(command, tmp_path / f"machine-{kill // 2}")
        before = len(bucket.names("ref/states-"))
        wait_until(lambda: len(bucket.names("ref/states-")) > before or process.poll() is not None)  # noqa: B023
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        process.communicate()
        resumed += before > 0
        bucket.remove_flags()
    assert resumed >= 1
    process = start(command, tmp_path / "last")
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert not [name for name in bucket.names() if "partial" in name]
    sm.reference("table:successor", bucket.uri("undisturbed"), **QUESTION)
    objects = bucket.objects()
    for name in (name for name in objects if "states-" in name or "head" in name):
        assert objects[name] == objects[name.replace("ref/", "undisturbed/")], name
    assert np.array_equal(sm.load(uri).scores.logprob, sm.load(bucket.uri("undisturbed")).scores.logprob)


def test_a_fetch_that_is_killed_or_cut_goes_on(
    bucket: Bucket, tmp_path: Path, elsewhere: Move, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = bucket.uri("ref")
    sm.reference("table:successor", uri, **QUESTION)
    whole = {name: hashlib.sha256(data).hexdigest() for name, data in bucket.objects().items()}
    with proxy_to(bucket.server) as proxy:
        cache, settings = tmp_path / "killed", {"AWS_ENDPOINT_URL": proxy.address}
        for seed in range(2):
            proxy.cuts_after = at_random(seed, 1000, 400_000)
            process = start(["compare", uri, "table:uniform", "--json"], cache, **settings)
            wait_until(lambda: any(cache.glob("references/*/states-*")) or process.poll() is not None)  # noqa: B023
            process.kill()
            process.communicate()
        proxy.cuts_after = at_random(9, 100_000, 3_000_000, share=0.3)
        process = start(["compare", uri, "table:uniform", "--json"], cache, **settings)
        out, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
        assert json.loads(out)
    (copy,) = cache.glob("references/*")
    for name, sha256 in whole.items():
        assert hashlib.sha256((copy / name.removeprefix("ref/")).read_bytes()).hexdigest() == sha256


def test_two_processes_of_a_machine_share_one_copy(
    bucket: Bucket, tmp_path: Path, elsewhere: Move, small_shards: None
) -> None:
    uri = bucket.uri("ref")
    sm.reference("table:successor", uri, **QUESTION)
    bucket.server.requests.clear()
    both = [start(["compare", uri, "table:uniform", "--json"], tmp_path / "shared") for _ in range(2)]
    for process in both:
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
    assert gets(bucket, STATES) == 1
