"""References behind a URI and replicas on other machines: each node fetches a copy of its own, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.remote.ray import ray_cluster
from tests.remote.ray.conftest import Nodes
from tests.s3 import Bucket

Move = Callable[[], Path]
TEXT = "the cat sat on the mat and the dog sat on the log. " * 20


@pytest.fixture
def machines(plugged: None, bucket: Bucket, elsewhere: Move, tmp_path: Path) -> Iterator[tuple[Nodes, list[Path]]]:
    """Two nodes, each with a cache of its own, which is not the driver's."""
    import ray

    caches = [tmp_path / "node-0", tmp_path / "node-1"]
    made = Nodes()
    for cache in caches:
        made.add(environment={"SCOREMODE_CACHE": str(cache)})
    ray_cluster.silence()
    with ray_cluster.own_signals():  # what others fork later must end by SIGTERM
        ray.init(address=made.address, log_to_driver=False, logging_level="CRITICAL")
    yield made, caches
    ray.shutdown()
    made.stop()


def test_each_node_fetches_what_it_needs_once(
    bucket: Bucket, elsewhere: Move, tmp_path: Path, machines: tuple[Nodes, list[Path]]
) -> None:
    nodes, caches = machines
    asked: dict[str, Any] = {"text": TEXT, "context_length": 48, "stride": 24}
    spread: dict[str, Any] = {"replicas": 3, "ray": nodes.address, "gpus_per_replica": 0.5}
    uri, here, kld = bucket.uri("ref"), tmp_path / "here", tmp_path / "base.kld"
    made = sm.reference("table:successor", uri, **asked, **spread)  # no replica sees the driver's cache
    assert made.manifest["noise_kl"] == sm.reference("table:successor", here, **asked).manifest["noise_kl"]
    sm.reference("table:successor", kld=kld, text=TEXT, context_length=64)
    bucket.put("base.kld", kld.read_bytes())
    elsewhere()
    for there, local, copies in (
        ("ref", str(here), "references/*/states-00000.safetensors"),
        ("base.kld", str(kld), "files/*/base.kld"),
    ):
        bucket.server.requests.clear()
        (far,) = sm.compare(bucket.uri(there), "table:uniform", **spread)
        (near,) = sm.compare(local, "table:uniform", out=tmp_path / f"near-{there}")
        assert far.kl is not None
        assert near.kl is not None
        assert np.array_equal(far.kl, near.kl)
        fetched = [copy for cache in caches for copy in cache.glob(copies)]
        assert 1 <= len(fetched) <= 2, "a node whose replicas came too late has none"
        file = "ref/states-00000.safetensors" if there == "ref" else there
        gets = bucket.server.requests.count(("GET", f"/{bucket.name}/{file}"))
        own = 0 if there == "ref" else 1  # of a reference this process needs no state
        assert gets == own + len(fetched), "one for each node"
