"""Results of pairs and reports in a bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.core.verbs.outputs import check_output, check_report
from scoremode.errors import InputError, RunError, StorageError
from tests.s3 import Bucket

Move = Callable[[], Path]
PAIRS = [(f"prompt {number}", f" target {number}") for number in range(1200)]


def test_results_are_sent_whole_and_foreign_files_are_kept(bucket: Bucket, elsewhere: Move) -> None:
    uri = bucket.uri("out/results.jsonl")
    with sm.open("table:uniform") as model:
        first = model.prob("ab", ["c", "d"], out=uri)
        before = bucket.objects()
        assert bucket.names("out/") == ["out/results.jsonl"]
        assert model.prob("ab", ["c", "d"], out=uri) == first
        assert bucket.objects() == before
        with pytest.raises(RunError, match=f"{uri} has other results"):
            model.prob("ab", ["c", "e"], out=uri)
        assert len(model.prob("ab", ["c", "e", "f"], out=uri, fresh=True)) == 3
        bucket.put("mine.jsonl", b'{"mine": 1}\n')
        for fresh in (False, True):
            with pytest.raises(InputError, match="is not a file of scoremode prob"):
                model.prob("ab", ["c"], out=bucket.uri("mine.jsonl"), fresh=fresh)
    assert bucket.objects()["mine.jsonl"] == b'{"mine": 1}\n'


def test_results_that_could_not_be_sent_are_sent_by_the_same_command(
    bucket: Bucket, elsewhere: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCOREMODE_STORAGE_PATIENCE", "0.1")
    uri = bucket.uri("out/results.jsonl")
    with sm.open("table:uniform") as model:
        bucket.server.refuse = lambda method, path: method == "PUT" and path.endswith("results.jsonl")
        with pytest.raises(StorageError):
            model.prob("ab", ["d"], out=uri)
        bucket.server.refuse = lambda method, path: False
        monkeypatch.setattr("scoremode.core.engine.registry.open_engine", lambda *_: pytest.fail("scored again"))
        (found,) = model.prob("ab", ["d"], out=uri)
    assert found.target == "d"
    assert bucket.names("out/") == ["out/results.jsonl"]


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
