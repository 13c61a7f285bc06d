"""Runs in a bucket of a real server: sent when they are complete, resumed where they were scored, never mixed."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.disk.folders import MANIFEST
from scoremode.errors import RunError, StorageError
from tests.s3 import KEY, SECRET, Bucket, at_random, kill_when_grown, proxy_to, size_of, start, wait_until

TEXT = "the cat sat on the mat and the dog sat on the log. " * 80
QUESTION: dict[str, Any] = {"text": TEXT, "context_length": 48, "stride": 24}
FLAGS = ["--text", TEXT, "--context-length", "48", "--stride", "24", "--json"]
JOURNALS = "runs/*/partial.journal"


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
    changes = [(method, path) for method, path in asked if method in ("PUT", "DELETE") and not path.endswith("/")]
    assert changes == [
        ("PUT", "one/lock.json"),
        ("DELETE", "one/manifest.json"),
        ("PUT", "one/scores.parquet"),
        ("PUT", "one/manifest.json"),
        ("DELETE", "one/lock.json"),
    ]


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


def test_killed_it_resumes_on_its_machine(bucket: Bucket, tmp_path: Path, elsewhere: Any) -> None:
    """kill -9 leaves the lock: the same command goes on, another machine is told which object to delete."""
    uri, cache = bucket.uri("one"), tmp_path / "first"
    command = ["ppl", "table:uniform", *FLAGS, "--out", uri]
    assert kill_when_grown(command, cache, JOURNALS) > 0
    assert bucket.names() == ["one/lock.json"]
    with pytest.raises(RunError, match=f"has been writing into {uri} since .*; if it died, delete {uri}/lock.json"):
        sm.ppl("table:uniform", out=uri, **QUESTION)
    with pytest.raises(RunError, match="has no finished run yet"):
        sm.load(uri)
    process = start(command, cache, SLOWED="0")
    out, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    expected = sm.ppl("table:uniform", out=tmp_path / "undisturbed", **QUESTION)
    assert json.loads(out)["perplexity"] == expected.perplexity.value
    same_numbers(sm.load(uri), expected)
    assert bucket.names() == ["one/manifest.json", "one/scores.parquet"]
    assert not list(cache.glob("runs/*/.place.json"))


def test_an_upload_that_is_killed_leaves_no_run_and_is_finished_by_the_same_command(
    bucket: Bucket, tmp_path: Path, elsewhere: Any
) -> None:
    uri, cache, reached, ended = bucket.uri("one"), tmp_path / "first", threading.Event(), threading.Event()
    sm.ppl("table:successor", out=uri, **QUESTION)  # it is replaced

    def hang(method: str, path: str) -> bool:
        if method != "PUT" or not path.endswith(MANIFEST):
            return False
        reached.set()
        return ended.wait(60)

    bucket.server.refuse = hang
    command = ["ppl", "table:uniform", *FLAGS, "--out", uri]
    process = start([*command, "--fresh"], cache)
    wait_until(lambda: reached.is_set() or process.poll() is not None)
    process.kill()
    process.communicate()
    ended.set()
    bucket.server.refuse = lambda method, path: False
    assert bucket.names() == ["one/lock.json", "one/scores.parquet"]
    with pytest.raises(RunError, match="has no finished run yet"):
        sm.load(uri)
    bucket.remove("one/lock.json")
    with pytest.raises(RunError, match=r"is not a run: it contains scores\.parquet"):
        sm.ppl("table:uniform", out=uri, **QUESTION)
    bucket.remove("one/scores.parquet")
    process = start(command, cache)
    out, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert json.loads(out)["cached"]  # it was scored before
    same_numbers(sm.load(uri), sm.ppl("table:uniform", out=tmp_path / "here", **QUESTION))
    assert bucket.names() == ["one/manifest.json", "one/scores.parquet"]


def test_a_live_writer_is_not_disturbed(bucket: Bucket, tmp_path: Path, elsewhere: Any) -> None:
    uri, cache = bucket.uri("one"), tmp_path / "first"
    process = start(["ppl", "table:uniform", *FLAGS, "--out", uri], cache)
    wait_until(lambda: size_of(cache, JOURNALS))
    assert SECRET.encode() not in bucket.objects()["one/lock.json"]
    for fresh in (False, True):
        with pytest.raises(RunError, match=rf"process {process.pid} on .* has been writing into {uri} since 20"):
            sm.ppl("table:uniform", out=uri, fresh=fresh, **QUESTION)
    second = start(["ppl", "table:uniform", *FLAGS, "--out", uri], cache)
    _, complaints = second.communicate(timeout=60)
    assert f"another process is scoring into {uri}" in complaints
    out, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert sm.load(uri).perplexity.value == json.loads(out)["perplexity"]


def test_cut_connections_change_no_number(
    bucket: Bucket, elsewhere: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Requests are tried again, a few times."""
    expected = sm.ppl("table:uniform", out=tmp_path / "here", **QUESTION)
    with proxy_to(bucket.server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        proxy.cuts_after = at_random(1, 100, 30_000, share=0.3)
        same_numbers(sm.ppl("table:uniform", out=bucket.uri("one"), **QUESTION), expected)
        elsewhere()
        same_numbers(sm.load(bucket.uri("one")), expected)
        assert proxy.cuts > 0


def test_a_server_that_goes_away_loses_nothing(bucket: Bucket, tmp_path: Path, elsewhere: Any) -> None:
    """Scoring goes on; the end is an error; the same command sends the run without scoring it again."""
    uri, cache = bucket.uri("one"), tmp_path / "first"
    command = ["ppl", "table:uniform", *FLAGS, "--out", uri]
    with proxy_to(bucket.server) as proxy:
        process = start(command, cache, AWS_ENDPOINT_URL=proxy.address)
        wait_until(lambda: size_of(cache, JOURNALS))
        proxy.down.set()
        _, complaints = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "the run is complete, but" in complaints.splitlines()[-1]
    assert "run the same command again, without --fresh, to send it" in complaints.splitlines()[-1]
    assert bucket.names() == ["one/lock.json"]
    process = start(command, cache)
    out, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert json.loads(out)["cached"]
    same_numbers(sm.load(uri), sm.ppl("table:uniform", out=tmp_path / "here", **QUESTION))


def test_what_a_server_refuses_is_one_line(bucket: Bucket, elsewhere: Any) -> None:
    with pytest.raises(StorageError, match="NoSuchBucket"):
        sm.ppl("table:uniform", out="s3://no-such-bucket-at-all/one?region=x", **QUESTION)
    bucket.server.denies = "AccessDenied"
    with pytest.raises(
        StorageError, match=r"cannot be listed: .*AccessDenied.*check the URI, .* credentials"
    ) as raised:
        sm.ppl("table:uniform", out=bucket.uri("one"), **QUESTION)
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)


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
