"""Real Ray clusters of several nodes on this machine. Without Ray these tests are skipped, and say so."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from scoremode.remote.ray import ray_cluster
from tests.remote.ray import paced, ray_workers
from tests.s3 import wait_until

WITHOUT_RAY = ("test_pieces", "test_spread")
ROOT = Path(__file__).resolve().parents[3]
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # else every cluster starts processes that nobody uses


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("ray") is not None:
        return
    without = pytest.mark.skip(reason="needs Ray")
    for item in items:
        if "tests/remote/ray/" in item.nodeid and not any(file in item.nodeid for file in WITHOUT_RAY):
            item.add_marker(without)


@pytest.fixture(scope="module")
def plugged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The engine of these tests, for this process and for all that it starts."""
    import sys

    from scoremode.core.engine import registry

    folder = paced.install(tmp_path_factory.mktemp("plugin"))
    before = os.environ.get("PYTHONPATH")
    paths = [str(folder), str(ROOT), str(ROOT / "src"), *([before] if before else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path.insert(0, str(folder))
    registry.registry.cache_clear()
    yield
    sys.path.remove(str(folder))
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
    registry.registry.cache_clear()


@pytest.fixture(scope="module")
def workers(plugged: None) -> psutil.Process:
    """The template that all workers of Ray are forked from. It imports its libraries while models are made."""
    ray_workers.fork_workers()
    return psutil.Process(ray_workers.start_template())


class Nodes:
    """A cluster whose nodes come and go."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        ray_workers.fork_workers()
        self.cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0})

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, gpus: int = 1, cpus: int = 2, environment: dict[str, str] | None = None) -> Any:
        node = self.cluster.add_node(num_cpus=cpus, num_gpus=gpus, env_vars=environment)
        ray_workers.start_template()  # not earlier: a node that needs 30 s to start is given up
        return node

    def remove(self, node: Any) -> None:
        """Kill all of a node's processes. The cluster notices a little later."""
        self.cluster.remove_node(node, allow_graceful=False)

    def wait_until_gone(self, count: int) -> None:
        """Wait until so many nodes are left, the head included."""
        import ray

        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == count, 60)

    def stop(self) -> None:
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes(plugged: None) -> Iterator[Nodes]:
    """Two nodes with a declared GPU each, and this process as a driver."""
    import ray

    made = Nodes()
    made.add()
    made.add()
    ray_cluster.silence()
    with ray_cluster.own_signals():  # what others fork later must end by SIGTERM
        ray.init(address=made.address, log_to_driver=False, logging_level="CRITICAL")
    yield made
    ray.shutdown()
    made.stop()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of forty windows of 64 bytes, each with a first byte of its own."""
    path = tmp_path / "text.txt"
    line = "the quick brown fox jumps over the lazy dog, and then some more"
    path.write_text("".join(chr(48 + i) + line for i in range(40)))
    return path
