"""Results of pairs and reports in a bucket."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.core.verbs.outputs import check_output, check_report
from scoremode.errors import InputError, RunError, StorageError
from tests.s3 import Bucket, kill_when_grown, start

Move = Callable[[], Path]
PAIRS = [(f"prompt {number}", f" target {number}") for number in range(1200)]


def test_results_of_pairs_are_resumed_and_sent_when_they_are_complete(
    bucket: Bucket, tmp_path: Path, elsewhere: Move
) -> None:
    rows = "".join(json.dumps({"prompt": prompt, "target": target}) + "\n" for prompt, target in PAIRS)
    bucket.put("pairs.jsonl", rows.encode())
    command = ["prob", "table:uniform", "--file", bucket.uri("pairs.jsonl"), "--out"]
    uri, cache, here = bucket.uri("out/results.jsonl"), tmp_path / "first", tmp_path / "here.jsonl"
    assert kill_when_grown([*command, uri], cache, "files/*/results.jsonl.partial", SLOWED="0.5") > 0
    assert bucket.names("out/") == ["out/results.jsonl.lock.json"]
    with sm.open("table:uniform") as model, pytest.raises(RunError, match=f"has been writing into {uri} since"):
        model.prob("ab", ["c"], out=uri)
    for out in (uri, str(here)):
        process = start([*command, out], cache)
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
    assert bucket.names("out/") == ["out/results.jsonl", "out/results.jsonl.manifest.json"]
    assert bucket.objects()["out/results.jsonl"] == here.read_bytes()


def test_results_that_could_not_be_sent_are_sent_by_the_same_command(
    bucket: Bucket, elsewhere: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCOREMODE_STORAGE_PATIENCE", "0.1")
    uri = bucket.uri("out/results.jsonl")
    with sm.open("table:uniform") as model:
        model.prob("ab", ["c"], out=uri)
        bucket.server.refuse = lambda method, path: method == "PUT" and path.endswith("results.jsonl")
        with pytest.raises(StorageError, match="the results are complete, but"):
            model.prob("ab", ["d"], out=uri, fresh=True)
        bucket.server.refuse = lambda method, path: False
        assert bucket.names("out/") == ["out/results.jsonl.lock.json", "out/results.jsonl.manifest.json"]
        (found,) = model.prob("ab", ["d"], out=uri)
    assert found.target == "d"
    assert bucket.names("out/") == ["out/results.jsonl", "out/results.jsonl.manifest.json"]


def test_results_are_found_again_and_foreign_files_are_kept(bucket: Bucket, elsewhere: Move) -> None:
    uri = bucket.uri("out/results.jsonl")
    with sm.open("table:uniform") as model:
        first = model.prob("ab", ["c", "d"], out=uri)
        before = bucket.objects()
        elsewhere()
        assert model.prob("ab", ["c", "d"], out=uri) == first
        assert bucket.objects() == before
        with pytest.raises(RunError, match=f"{uri} contains results of another question"):
            model.prob("ab", ["c", "e"], out=uri)
        assert len(model.prob("ab", ["c", "e", "f"], out=uri, fresh=True)) == 3
        bucket.put("mine.jsonl", b'{"mine": 1}\n')
        for fresh in (False, True):
            with pytest.raises(RunError, match="is not a file of scoremode prob"):
                model.prob("ab", ["c"], out=bucket.uri("mine.jsonl"), fresh=fresh)
    assert bucket.objects()["mine.jsonl"] == b'{"mine": 1}\n'


def test_reports(bucket: Bucket, elsewhere: Move) -> None:
    run = sm.ppl("table:uniform", text="any text at all", out=bucket.uri("run"))
    assert sm.report(bucket.uri("page.html"), run) == bucket.uri("page.html")
    assert bucket.objects()["page.html"].startswith(b"<!")
    check_report(bucket.uri("page.html"))
    bucket.put("mine.html", b"<p>mine")
    with pytest.raises(InputError, match="is not a report of scoremode"):
        check_report(bucket.uri("mine.html"))
    with pytest.raises(InputError, match="inside a run"):
        check_output(bucket.uri("run/page.html"), "-o")
    with pytest.raises(InputError, match="not a file that can be written"):
        check_output("https://example.org/page.html", "-o")
