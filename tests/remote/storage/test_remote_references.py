"""References in a bucket: sent when they are complete, fetched once by each machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.references.reader import Reference, open_reference
from scoremode.errors import StorageError
from tests.s3 import Bucket, kill_when_grown, start

TEXT = "the cat sat on the mat and the dog sat on the log. " * 80
QUESTION: dict[str, Any] = {"text": TEXT, "context_length": 48, "stride": 24}
FLAGS = ["--text", TEXT, "--context-length", "48", "--stride", "24", "--json"]
STATES = "ref/states-00000.safetensors"

Move = Callable[[], Path]


def gets(bucket: Bucket, key: str) -> int:
    """How often a file itself was asked for."""
    return bucket.server.requests.count(("GET", f"/{bucket.name}/{key}"))


def test_a_reference_is_fetched_once_by_each_machine(bucket: Bucket, tmp_path: Path, elsewhere: Move) -> None:
    uri, here = bucket.uri("ref"), tmp_path / "here"
    sm.reference("table:successor", uri, **QUESTION)
    sm.reference("table:successor", here, **QUESTION)
    stored = Reference.open(here)
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


def test_killed_while_it_is_made_it_resumes_to_the_same_bits(bucket: Bucket, tmp_path: Path, elsewhere: Move) -> None:
    command, cache = ["reference", "table:successor", *FLAGS, "--out"], tmp_path / "first"
    assert kill_when_grown([*command, bucket.uri("ref")], cache, "references/*/partial.rows") > 0
    assert bucket.names() == ["ref/lock.json"]
    for name in ("ref", "undisturbed"):
        process = start([*command, bucket.uri(name)], cache, SLOWED="0")
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
    objects = bucket.objects()
    assert not [name for name in objects if "partial" in name or "lock" in name]
    for name in (name for name in objects if "states-" in name or "head" in name):
        other = name.replace("undisturbed/", "ref/") if "undisturbed/" in name else name.replace("ref/", "undisturbed/")
        assert objects[name] == objects[other], name
    ours, theirs = sm.load(bucket.uri("ref")), sm.load(bucket.uri("undisturbed"))
    assert np.array_equal(ours.scores.logprob, theirs.scores.logprob)
    assert ours.manifest["noise_kl"] == theirs.manifest["noise_kl"]


def test_two_processes_of_a_machine_share_one_copy(bucket: Bucket, tmp_path: Path, elsewhere: Move) -> None:
    uri = bucket.uri("ref")
    sm.reference("table:successor", uri, **QUESTION)
    bucket.server.requests.clear()
    both = [start(["compare", uri, "table:uniform", "--json"], tmp_path / "shared") for _ in range(2)]
    for process in both:
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
    assert gets(bucket, STATES) == 1
