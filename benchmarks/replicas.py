"""What replicas cost and give: throughput of 1, 2, … replicas, the driver's rate, and its memory.

    python benchmarks/replicas.py --scaling      windows take a fixed time: how near to N times as fast are N replicas?
    python benchmarks/replicas.py --driver       windows take no time: how many targets a second does a driver take?

The first needs no computing power, so it can be measured on any machine. Real Ray, real processes.
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
from scoremode.core.engine.base import SCORES
from scoremode.core.engine.plugin import Work
from scoremode.core.scores.answers import Window
from scoremode.remote.ray.engine import ReplicatedEngine
from scoremode.values import Ints

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
        engine = opened.opened(Work(64))
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


class Endless:
    """Many equal windows in the memory of one."""

    prefix_group = None
    vocabulary = None

    def __init__(self, count: int, targets: int) -> None:
        ids = np.arange(targets + 1, dtype=np.int32) % 256
        self._window = Window(ids[:-1], np.arange(targets, dtype=np.int32), ids[1:, None])
        self.lengths: Ints = np.full(count, targets, np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def window(self, index: int) -> Window:
        return self._window


def own_megabytes() -> float:
    """Memory of this process, without the pages of Ray's object store that it has read."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def driver(replicas: int, counts: list[int], targets: int) -> None:
    """Targets a second that one driver takes from replicas that compute nothing, and how its memory grows."""
    with open_all("paced:free=1", replicas) as model:
        engine = model.opened(Work(64))
        list(engine.score(Endless(64, targets), np.zeros(64, bool), SCORES))
        for count in counts:
            began, found = time.perf_counter(), 0
            for _, answers in engine.score(Endless(count, targets), np.zeros(count, bool), SCORES):
                found += answers.logprob.size
            seconds = time.perf_counter() - began
            own = own_megabytes()
            print(
                f"{count} windows of {targets} targets from {replicas} replicas: {found / seconds / 1e6:.2f} million "
                f"targets/s in {seconds:.1f} s, driver's own memory {own:.0f} MB",
                flush=True,
            )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--driver", action="store_true")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--wait", type=float, default=0.05)
    parser.add_argument("--windows", type=int, default=800, help="of --scaling")
    parser.add_argument("--driver-windows", type=int, nargs="+", default=[2_000, 8_000, 32_000])
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="scoremode-replicas-") as folder, Machine(Path(folder)) as machine:
        for _ in range((max(given.replicas) + 1) // 2):
            machine.add()
        if given.scaling or not given.driver:
            scaling(Path(folder), given.wait, given.windows, given.replicas)
        if given.driver:
            driver(max(given.replicas), given.driver_windows, 2048)
    return 0


if __name__ == "__main__":
    sys.exit(main())
