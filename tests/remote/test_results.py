"""Results of pairs and reports in a bucket."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.errors import InputError, RunError
from scoremode.verbs.outputs import check_output, check_report
from tests.s3 import Bucket, start, wait_until

Move = Callable[[], Path]
PAIRS = [(f"prompt {number}", f" target {number}") for number in range(1200)]


def test_results_of_pairs_are_resumed_on_another_machine(bucket: Bucket, tmp_path: Path, elsewhere: Move) -> None:
    rows = "".join(json.dumps({"prompt": prompt, "target": target}) + "\n" for prompt, target in PAIRS)
    bucket.put("pairs.jsonl", rows.encode())
    (tmp_path / "pairs.jsonl").write_text(rows)
    command = ["prob", "table:uniform", "--file", bucket.uri("pairs.jsonl"), "--out"]
    uri = bucket.uri("out/results.jsonl")
    for kill in range(2):
        process = start([*command, uri], tmp_path / f"machine-{kill}")
        before = len(bucket.names("out/results.jsonl.scoremode/partial/"))
        wait_until(lambda: len(bucket.names("out/results.jsonl.scoremode/partial/")) > before or process.poll() == 0)  # noqa: B023
        process.kill()
        process.communicate()
        bucket.remove_flags()
    process = start([*command, uri], tmp_path / "last")
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert bucket.names("out/") == ["out/results.jsonl", "out/results.jsonl.manifest.json"]
    here = tmp_path / "here.jsonl"
    process = start([*command, str(here)], tmp_path / "last")
    process.communicate(timeout=60)
    assert bucket.objects()["out/results.jsonl"] == here.read_bytes()


def test_results_are_found_again_and_foreign_files_are_kept(bucket: Bucket, elsewhere: Move) -> None:
    uri = bucket.uri("out/results.jsonl")
    with sm.open("table:uniform") as model:
        first = model.prob("ab", ["c", "d"], out=uri)
        before = bucket.objects()
        elsewhere()
        assert model.prob("ab", ["c", "d"], out=uri) == first
        assert bucket.objects() == before
        with pytest.raises(RunError, match=f"{uri} holds results of another question"):
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
