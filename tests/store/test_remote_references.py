"""References in a bucket: sent shard by shard, resumed from other machines, fetched once by each of them."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.store.reference import Reference
from scoremode.store.remote_runs import RemoteClaim
from tests.s3 import Bucket, at_random, proxy_to, start, wait_until

TEXT = "the cat sat on the mat and the dog sat on the log. " * 80
QUESTION: dict[str, Any] = {"text": TEXT, "context_length": 48, "stride": 24}
FLAGS = ["--text", TEXT, "--context-length", "48", "--stride", "24", "--json"]
STATES = "ref/states-00000.safetensors"

Move = Callable[[], Path]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemoteClaim, "shard_bytes", 1 << 11)


def gets(bucket: Bucket, key: str) -> int:
    """How often a file itself was asked for."""
    return bucket.server.requests.count(("GET", f"/{bucket.name}/{key}"))


def test_a_reference_is_fetched_once_by_each_machine(
    bucket: Bucket, tmp_path: Path, elsewhere: Move, small_shards: None
) -> None:
    uri, here = bucket.uri("ref"), tmp_path / "here"
    sm.reference("table:uniform", uri, **QUESTION)
    sm.reference("table:uniform", here, **QUESTION)
    stored = Reference.open(here)
    assert sum("states-" in name for name in bucket.names()) > 4
    elsewhere()
    bucket.server.requests.clear()
    found = Reference.open(uri)
    assert np.array_equal(found.rows(0, found.targets), stored.rows(0, stored.targets))
    assert np.array_equal(found.head_weight(), stored.head_weight())
    assert gets(bucket, STATES) == 1
    against = sm.compare(uri, "table:successor", out=bucket.uri("compared"))[0]
    expected = sm.compare(str(here), "table:successor", out=tmp_path / "compared")[0]
    assert against.kl is not None
    assert expected.kl is not None
    assert np.array_equal(against.kl, expected.kl)
    with sm.open("table:successor") as model:
        assert np.array_equal(np.asarray(model.compare(uri).kl), expected.kl)
    assert gets(bucket, STATES) == 1
    assert sm.compare(uri, bucket.uri("compared/table:successor"))[0].kl is not None
    elsewhere()
    again = sm.reference("table:uniform", uri, **QUESTION)
    assert again.cached
    assert gets(bucket, STATES) == 2


def test_killed_while_it_is_made_and_resumed_on_other_machines(
    bucket: Bucket, tmp_path: Path, elsewhere: Move, small_shards: None
) -> None:
    uri, chance = bucket.uri("ref"), random.Random(7)
    command = ["reference", "table:uniform", *FLAGS, "--out", uri]
    resumed = 0
    for kill in range(4):
        process = start(command, tmp_path / f"machine-{kill // 2}")
        before = len(bucket.names("ref/states-"))
        wait_until(lambda: len(bucket.names("ref/states-")) > before or process.poll() is not None)  # noqa: B023
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        process.communicate()
        resumed += before > 0
        bucket.remove_flags()
    assert resumed >= 2
    process = start(command, tmp_path / "last")
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    assert not [name for name in bucket.names() if "partial" in name]
    sm.reference("table:uniform", bucket.uri("undisturbed"), **QUESTION)
    objects = bucket.objects()
    for name in (name for name in objects if "states-" in name or "head" in name):
        assert objects[name] == objects[name.replace("ref/", "undisturbed/")], name
    assert np.array_equal(sm.load(uri).scores.logprob, sm.load(bucket.uri("undisturbed")).scores.logprob)


def test_a_fetch_that_is_killed_or_cut_goes_on(
    bucket: Bucket, tmp_path: Path, elsewhere: Move, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = bucket.uri("ref")
    sm.reference("table:uniform", uri, **QUESTION)
    whole = {name: hashlib.sha256(data).hexdigest() for name, data in bucket.objects().items()}
    with proxy_to(bucket.server) as proxy:
        cache, settings = tmp_path / "killed", {"AWS_ENDPOINT_URL": proxy.address}
        for seed in range(3):
            proxy.cuts_after = at_random(seed, 1000, 400_000)
            process = start(["compare", uri, "table:successor", "--json"], cache, **settings)
            wait_until(lambda: any(cache.glob("references/*/states-*")) or process.poll() is not None)  # noqa: B023
            process.kill()
            process.communicate()
        proxy.cuts_after = at_random(9, 100_000, 3_000_000, share=0.3)
        process = start(["compare", uri, "table:successor", "--json"], cache, **settings)
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
    sm.reference("table:uniform", uri, **QUESTION)
    bucket.server.requests.clear()
    both = [start(["compare", uri, "table:successor", "--json"], tmp_path / "shared") for _ in range(2)]
    for process in both:
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
    assert gets(bucket, STATES) == 1
