"""What one driver of replicas takes: the loop and the journal alone, and with answers that come through Ray.

    python benchmarks/scale.py [--windows 2000] [--replicas 1 2 4 8]

The engine costs nothing, so what is left is the driver: targets per second, and its CPU time for a block and a target.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import free_engine
from prob_rows import plan_of

from scoremode.core.engine.base import Engine
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, registry
from scoremode.core.plan.plan import Plan
from scoremode.core.scores.journal import Journal
from scoremode.core.verbs.replicas import Spread
from scoremode.core.verbs.scoring import answered
from scoremode.remote.ray.replicas import RayReplicas

HERE = Path(__file__).resolve().parent
LARGE, SMALL = 4 << 20, 1 << 17  # bytes of a block
BYTES_PER_TARGET = 8 + 8 + 8 + 4 + 8
PASSES = 3  # the best counts


def taken(engine: Engine, plan: Plan) -> dict[str, float]:
    """Seconds and CPU seconds of this process to score a plan into a journal."""
    with tempfile.TemporaryDirectory(prefix="scoremode-scale-") as folder:
        journal = Journal(Path(folder) / "partial.journal", {"measured": "driver"}, plan.target_counts)
        wall, cpu = time.perf_counter(), time.process_time()
        for index, answers in answered(engine, plan):
            journal.add(index, answers, 0.0)
        figures = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        journal.close()
    return figures


def through_ray(replicas: int, plan: Plan, block: int) -> dict[str, float]:
    """As ``taken``, from replicas that answer at once, all of them being there."""
    chosen = choose(f"free:block={block}", None, {}, None)
    engine = RayReplicas(chosen, Spread(replicas, cpus_per_replica=0.1), None).engine(Work(), None)
    try:
        engine.pool.wait_for_all(300)
        taken(engine, plan)  # rates are known from now on
        passes = [taken(engine, plan) for _ in range(PASSES)]
    finally:
        engine.close()
    return min(passes, key=lambda figures: figures["cpu_seconds"])


def measure(windows: int, replicas: Sequence[int]) -> dict[str, Any]:
    """Targets per second of the driver, and the CPU time that Ray adds for each block."""
    _plug_in()
    results: dict[str, Any] = {"cores": os.cpu_count(), "without_ray": {}, "with_ray": {}}
    for targets in (512, 2048):
        plan = plan_of(windows * 2048 // targets, targets)
        passes = [taken(free_engine.FreeEngine(), plan) for _ in range(PASSES)]
        best = min(passes, key=lambda figures: figures["seconds"])
        results["without_ray"][targets] = {"targets_per_second": plan.targets / best["seconds"], **best}
    plan = plan_of(windows, 2048)
    for count in replicas:
        large, small = (through_ray(count, plan, block) for block in (LARGE, SMALL))
        results["with_ray"][count] = _split(plan, large, small)
    return results


def _split(plan: Plan, large: dict[str, float], small: dict[str, float]) -> dict[str, float]:
    """Two sizes of blocks, two unknowns: seconds for a block, and for a target."""
    blocks = [plan.targets * BYTES_PER_TARGET / block for block in (LARGE, SMALL)]
    per_block = (small["cpu_seconds"] - large["cpu_seconds"]) / (blocks[1] - blocks[0])
    return {
        "targets_per_second": plan.targets / large["seconds"],
        "cpu_seconds_per_block": per_block,
        "cpu_seconds_per_target": (large["cpu_seconds"] - blocks[0] * per_block) / plan.targets,
    }


def _plug_in() -> None:
    """The engine of this benchmark, here and in the processes of replicas."""
    folder = free_engine.install(Path(tempfile.mkdtemp(prefix="scoremode-free-")))
    paths = [str(folder), str(HERE), str(HERE.parent / "src")]
    sys.path[:0] = paths[:2]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    registry.cache_clear()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=2000, help="of 2,048 targets each")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments = parser.parse_args(words)
    print(json.dumps(measure(arguments.windows, arguments.replicas), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
