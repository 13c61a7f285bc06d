"""Runs in a bucket of a real server: sent while they are scored, resumed from other machines, never mixed."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.disk.folders import MANIFEST, SCORES
from scoremode.errors import InputError, RunError, ScoremodeError, StorageError
from scoremode.remote import writer
from scoremode.remote.lease import FLAG
from tests.s3 import KEY, SECRET, Bucket, at_random, proxy_to, start, wait_until

TEXT = "the cat sat on the mat and the dog sat on the log. " * 80
QUESTION: dict[str, Any] = {"text": TEXT, "context_length": 48, "stride": 24}
FLAGS = ["--text", TEXT, "--context-length", "48", "--stride", "24", "--json"]


def same_numbers(run: sm.Run, other: sm.Run) -> None:
    assert run.perplexity.value == other.perplexity.value
    assert np.array_equal(run.scores.logprob, other.scores.logprob)
    assert np.array_equal(np.asarray(run.scores.rank), np.asarray(other.scores.rank))
    assert np.array_equal(run.facts.id, other.facts.id)


def test_a_run_at_a_uri_is_the_run_of_a_folder(bucket: Bucket, tmp_path: Path, elsewhere: Any) -> None:
    uri = bucket.uri("runs/one")
    made = sm.ppl("table:uniform", out=uri, **QUESTION)
    assert bucket.names() == ["runs/one/manifest.json", "runs/one/scores.parquet"]
    assert made.path == uri
    same_numbers(made, sm.ppl("table:uniform", out=tmp_path / "here", **QUESTION))
    elsewhere()
    again = sm.ppl("table:uniform", out=uri, **QUESTION)
    assert again.cached
    same_numbers(made, again)
    same_numbers(made, sm.load(uri))


def test_the_manifest_comes_last_and_goes_first(bucket: Bucket, elsewhere: Any) -> None:
    uri = bucket.uri("one")
    sm.ppl("table:uniform", out=uri, **QUESTION)
    bucket.server.requests.clear()
    sm.ppl("table:uniform", out=uri, fresh=True, **QUESTION)
    asked = [(method, path.split("/", 2)[2]) for method, path in bucket.server.requests if path.count("/") > 1]
    writes = [path for method, path in asked if method == "PUT" and not path.endswith("/") and not FLAG.search(path)]
    assert writes[-1] == f"one/{MANIFEST}"
    assert writes[-2] == f"one/{SCORES}"
    assert all(path.startswith("one/partial/") for path in writes[:-2])
    gone = [path for method, path in asked if method == "DELETE" and not path.startswith("one/partial")]
    gone = [path for path in gone if not FLAG.search(path)]
    assert gone == [f"one/{MANIFEST}", f"one/{SCORES}"]
    first_piece = asked.index(("PUT", writes[0]))
    assert first_piece < asked.index(("DELETE", f"one/{MANIFEST}"))


def test_no_credential_is_stored(bucket: Bucket, elsewhere: Any) -> None:
    cache = elsewhere()
    sm.ppl("table:uniform", out=bucket.uri("one"), **QUESTION)
    stored = {**bucket.objects(), **{str(p): p.read_bytes() for p in cache.rglob("*") if p.is_file()}}
    assert len(stored) >= 4
    for name, data in stored.items():
        assert SECRET.encode() not in data, name
        assert KEY.encode() not in data, name


def test_another_run_and_foreign_files_are_refused(bucket: Bucket, elsewhere: Any) -> None:
    uri = bucket.uri("one")
    sm.ppl("table:uniform", out=uri, **QUESTION)
    before = bucket.objects()
    with pytest.raises(RunError, match=r"contains another run \(it differs in: corpus, plan\)"):
        sm.ppl("table:uniform", out=uri, text="something else")
    assert bucket.objects() == before
    bucket.put("mine/notes.txt", b"mine")
    bucket.put("theirs/manifest.json", b'{"a": 1}')
    bucket.put("single", b"a file")
    for key, says in (("mine", "it contains notes.txt"), ("theirs", "it contains manifest.json"), ("single", "a file")):
        for fresh in (False, True):
            with pytest.raises(RunError, match=says):
                sm.ppl("table:uniform", out=bucket.uri(key), fresh=fresh, **QUESTION)
    assert bucket.objects()["mine/notes.txt"] == b"mine"
    assert bucket.names("mine/") == ["mine/notes.txt"]


def test_killed_again_and_again_on_changing_machines(bucket: Bucket, tmp_path: Path, elsewhere: Any) -> None:
    """kill -9 at random moments; every second time the next process has an empty cache."""
    uri, chance = bucket.uri("one"), random.Random(15)
    command = ["ppl", "table:uniform", *FLAGS, "--out", uri]
    cache, kills, resumed = tmp_path / "first", 0, 0
    while kills < 5:
        process = start(command, cache)
        before = len(bucket.names("one/partial/"))
        wait_until(lambda: len(bucket.names("one/partial/")) > before or process.poll() is not None)  # noqa: B023
        time.sleep(chance.uniform(0, 0.25))
        process.kill()
        _, complaints = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, complaints
        kills, resumed = kills + 1, resumed + (before > 0)
        if kills % 2:
            cache = tmp_path / f"machine-{kills}"
            bucket.remove_flags()  # else the next one waits until the lease is over
    process = start(command, tmp_path / "last")
    bucket.remove_flags()
    out, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert resumed >= 2
    expected = sm.ppl("table:uniform", out=tmp_path / "undisturbed", **QUESTION)
    assert json.loads(out)["perplexity"] == expected.perplexity.value
    elsewhere()
    same_numbers(sm.load(uri), expected)
    assert bucket.names() == ["one/manifest.json", "one/scores.parquet"]


def test_a_live_writer_is_not_disturbed(bucket: Bucket, tmp_path: Path, elsewhere: Any) -> None:
    uri = bucket.uri("one")
    command = ["ppl", "table:uniform", *FLAGS, "--out", uri]
    process = start(command, tmp_path / "first")
    wait_until(lambda: bucket.names("one/partial/"))
    with pytest.raises(RunError, match=rf"process {process.pid} on .* is writing into {uri}"):
        sm.ppl("table:uniform", out=uri, **QUESTION)
    with pytest.raises(RunError, match="is writing into"):
        sm.ppl("table:uniform", out=uri, fresh=True, **QUESTION)
    out, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert sm.load(uri).perplexity.value == json.loads(out)["perplexity"]


def test_a_silent_writer_is_taken_over_and_stops(
    bucket: Bucket, tmp_path: Path, elsewhere: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = bucket.uri("one")
    process = start(["ppl", "table:uniform", *FLAGS, "--out", uri], tmp_path / "first", SCOREMODE_LEASE="2")
    wait_until(lambda: bucket.names("one/partial/"))
    process.send_signal(signal.SIGSTOP)
    time.sleep(4)  # the server's times have whole seconds
    made = sm.ppl("table:uniform", out=uri, **QUESTION)
    assert f"taking over {uri} from process {process.pid}" in capfd.readouterr().err
    before = bucket.objects()
    process.send_signal(signal.SIGCONT)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "was taken over" in complaints.splitlines()[-1]
    # a request that was under way when it was stopped may still arrive, in the old writer's own folder
    assert {name: data for name, data in bucket.objects().items() if "/partial/" not in name} == before
    same_numbers(sm.load(uri), made)


@pytest.mark.parametrize("seed", [1, 2])
def test_cut_connections_change_no_number(
    bucket: Bucket, elsewhere: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    monkeypatch.setattr(writer, "OFTEN", 0.05)
    expected = sm.ppl("table:uniform", out=tmp_path / "here", **QUESTION)
    with proxy_to(bucket.server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        proxy.cuts_after = at_random(seed, 100, 30_000)
        same_numbers(sm.ppl("table:uniform", out=bucket.uri("one"), **QUESTION), expected)
        elsewhere()
        same_numbers(sm.load(bucket.uri("one")), expected)
        assert proxy.cuts > 0


def test_a_server_that_refuses_now_and_then(bucket: Bucket, elsewhere: Any, tmp_path: Path) -> None:
    chance = random.Random(5)
    bucket.server.refuse = lambda method, path: chance.random() < 0.15
    made = sm.ppl("table:uniform", out=bucket.uri("one"), **QUESTION)
    elsewhere()
    same_numbers(made, sm.load(bucket.uri("one")))


def test_a_server_that_goes_away_loses_nothing(bucket: Bucket, tmp_path: Path, elsewhere: Any) -> None:
    """Scoring goes on; the end is an error; the same command sends the run without scoring it again."""
    uri, cache = bucket.uri("one"), tmp_path / "first"
    command = ["ppl", "table:uniform", *FLAGS, "--out", uri]
    with proxy_to(bucket.server) as proxy:
        settings = {"AWS_ENDPOINT_URL": proxy.address, "SCOREMODE_STORAGE_PATIENCE": "1"}
        process = start(command, cache, **settings)
        wait_until(lambda: len(bucket.names("one/partial/")) > 1)  # it scores
        proxy.down.set()
        _, complaints = process.communicate(timeout=60)
        lines = complaints.splitlines()
        assert process.returncode == 2
        assert "scoring goes on, and what is scored stays here" in lines[0]
        assert "the run is complete, but" in lines[-1]
        assert "run the same command again to send it" in lines[-1]
        assert MANIFEST not in {name.rpartition("/")[2] for name in bucket.names()}
        process = start(command, cache, **settings)
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 2
        assert "cannot be" in complaints
        proxy.down.clear()
        began = time.monotonic()
        process = start(command, cache, **settings)
        out, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
        assert json.loads(out)["cached"]
        assert time.monotonic() - began < 30
    same_numbers(sm.load(uri), sm.ppl("table:uniform", out=tmp_path / "here", **QUESTION))


@pytest.mark.parametrize("place", ["", "?region=eu-west-1"])
def test_what_cannot_be_reached_is_said_in_one_line(bucket: Bucket, elsewhere: Any, place: str) -> None:
    with pytest.raises(StorageError, match="there is no such bucket"):
        sm.ppl("table:uniform", out=f"s3://no-such-bucket-at-all/one{place}", **QUESTION)


@pytest.mark.parametrize(
    ("code", "says"),
    [("AccessDenied", "access is denied"), ("InvalidAccessKeyId", "credentials are not accepted|access is denied")],
)
def test_credentials_that_are_refused(bucket: Bucket, elsewhere: Any, code: str, says: str) -> None:
    bucket.server.denies = code
    began = time.monotonic()
    with pytest.raises(StorageError, match=says) as raised:
        sm.ppl("table:uniform", out=bucket.uri("one"), **QUESTION)
    assert SECRET not in str(raised.value)
    assert time.monotonic() - began < 5


def test_damaged_objects_are_refused(bucket: Bucket, elsewhere: Any) -> None:
    uri = bucket.uri("one")
    sm.ppl("table:uniform", out=uri, **QUESTION)
    whole = bucket.objects()
    elsewhere()
    bucket.put("one/scores.parquet", whole["one/scores.parquet"][:-1] + b"x")
    with pytest.raises(StorageError, match="is not the file that its manifest describes"):
        sm.load(uri)
    bucket.put("one/scores.parquet", whole["one/scores.parquet"])
    bucket.put("one/manifest.json", whole["one/manifest.json"].replace(b"table", b"tabel"))
    with pytest.raises(RunError, match=f"{uri}/manifest.json was changed"):
        sm.load(uri)
    bucket.put("one/manifest.json", b"{")
    with pytest.raises(RunError, match="is damaged"):
        sm.load(uri)


def test_memory_and_file(tmp_path: Path, elsewhere: Any) -> None:
    """fsspec's memory:// has no server; file:// is a path."""
    expected = sm.ppl("table:uniform", out=tmp_path / "here", **QUESTION)
    for uri in ("memory://runs/one", f"file://{tmp_path}/two"):
        same_numbers(sm.ppl("table:uniform", out=uri, **QUESTION), expected)
        elsewhere()
        assert sm.ppl("table:uniform", out=uri, **QUESTION).cached
    assert (tmp_path / "two" / MANIFEST).exists()


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        (f"s3://{KEY}:{SECRET}@bucket/one", "contains a user name or a secret"),
        (f"s3://bucket/one?secret_key={SECRET}", "has the setting 'secret_key'"),
        (f"s3://bucket/one?endpoint_override=u:{SECRET}@host", "unusable endpoint_override"),
        ("s3://", "names no bucket"),
        ("s3:///one", "names no bucket"),
        ("s3://bucket/../one", "empty part"),
        ("s4://bucket/one", "does not know the scheme s4://"),
        ("file://host/one", "not a path of this machine"),
    ],
)
def test_uris_that_cannot_be_used(elsewhere: Any, uri: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as raised:
        sm.ppl("table:uniform", out=uri, **QUESTION)
    assert SECRET not in str(raised.value)
    assert isinstance(raised.value, ScoremodeError)
