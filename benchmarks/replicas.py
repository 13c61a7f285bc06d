"""What replicas give: windows take a fixed time; how near to N times as fast are N replicas?

    python benchmarks/replicas.py

It needs no computing power, so it can be measured on any machine. Real Ray, real processes. scale.py has the driver.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

import scoremode as sm
from scoremode.core.engine import registry
from scoremode.core.engine.plugin import Work
from scoremode.remote.ray.engine import ReplicatedEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.remote.ray import paced

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, Any] = {"method": "gptq", "context_length": 64, "max_windows": 0}


class Machine:
    """A Ray cluster of several nodes on this machine, with the engine of the tests on all of them."""

    def __init__(self, folder: Path) -> None:
        plugin = paced.install(folder / "plugin")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ["SCOREMODE_CACHE"] = str(folder / "cache")
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(plugin), str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        )
        sys.path.insert(0, str(plugin))
        registry.registry.cache_clear()
        self.nodes: list[Any] = []

    def __enter__(self) -> Self:
        import ray
        from ray.cluster_utils import Cluster

        from scoremode.remote.ray.ray_cluster import silence

        self.cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0})
        silence()
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="CRITICAL")
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()

    def add(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=2, num_gpus=1))

    def remove(self, place: int) -> None:
        self.cluster.remove_node(self.nodes.pop(place), allow_graceful=False)


def text_of(folder: Path, windows: int) -> Path:
    """A text of so many windows of 64 bytes."""
    path = folder / f"text-{windows}.txt"
    rng = np.random.default_rng(windows)
    path.write_bytes(rng.integers(97, 123, 64 * windows, dtype=np.uint8).tobytes())
    return path


@contextmanager
def open_all(model: str, count: int, gpus: float | None = None) -> Iterator[sm.Model]:
    """A model whose replicas are all open."""
    with sm.open(model, replicas=count, ray="auto", gpus_per_replica=gpus) as opened:
        engine = opened._model.opened(Work(64))
        assert isinstance(engine, ReplicatedEngine)
        started = engine.pool.wait_for_all(120)
        assert started == count, f"{started} of {count} replicas started"
        yield opened


def scaling(folder: Path, wait: float, windows: int, counts: list[int]) -> None:
    """One question whose windows take ``wait`` seconds each, on ever more replicas."""
    text, alone = text_of(folder, windows), None
    for count in counts:
        with open_all(f"paced:wait={wait}", count) as model:
            began = time.perf_counter()
            model.ppl(corpus=str(text), out=folder / f"run-{count}", **SIZES)
            seconds = time.perf_counter() - began
        alone = seconds if alone is None else alone
        ideal = windows * wait / count
        print(
            f"{count} replica{'s' if count > 1 else ' '}  {windows} windows of {wait:g} s  {seconds:7.2f} s  "
            f"{alone / seconds:.3f} x one  = {alone / seconds / count:.3f} x N  (nothing but waiting: {ideal:.2f} s)",
            flush=True,
        )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--wait", type=float, default=0.05)
    parser.add_argument("--windows", type=int, default=800)
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="scoremode-replicas-") as folder, Machine(Path(folder)) as machine:
        for _ in range((max(given.replicas) + 1) // 2):
            machine.add()
        scaling(Path(folder), given.wait, given.windows, given.replicas)
    return 0


if __name__ == "__main__":
    sys.exit(main())
