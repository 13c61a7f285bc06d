"""What an attribution costs: all units of a model against one scoring pass, and memory against the number of units.

    python benchmarks/attribute.py                       an 8B shape in bfloat16, all layers, 20,000 tokens
    python benchmarks/attribute.py --shape smollm2       SmolLM2's shape in float32, all matrices, 8,192 tokens
    python benchmarks/attribute.py --quick               a small shape on a CPU

Weights and tokens are seeded: nothing is downloaded. The candidate is the model rounded to nearest in 4 bits.
Prints the time of one scoring pass, of the baseline's pass that keeps states, of all units, and of a unit's parts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from common import llama_shape, own_windows, peak_mib, score_all

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "config": llama_shape((4096, 14336, 32, 32, 8, 128256)),
        **{"dtype": "bfloat16", "by": "layer", "tokens": 20_000, "context": 2048},
    },
    "smollm2": {
        "config": llama_shape((576, 1536, 30, 9, 3, 49152), tied=True),
        **{"dtype": "float32", "by": "matrix", "tokens": 8192, "context": 2048},
    },
    "quick": {
        "config": llama_shape((48, 80, 4, 4, 2, 503), length=128),
        **{"dtype": "float32", "by": "layer", "tokens": 256, "context": 64},
    },
}


def seeded_engine(shape: dict[str, Any], device: str) -> Any:
    """An engine on a Llama of this shape, with seeded weights that are made on the device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from scoremode.engines.transformers.engine import TransformersEngine

    torch.manual_seed(0)
    config = LlamaConfig(**shape["config"], initializer_range=0.02)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, shape["dtype"]))
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return TransformersEngine(model)


def timed(function: Any) -> tuple[float, Any]:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    found = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin, found


class Records:
    """A folder of an attribution that keeps nothing."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}

    def add(self, number: int, body: bytes) -> None:
        self.records[number] = body


def plan_of(ids: Any) -> Any:
    """The plan of windows in which every token but the first is scored."""
    from scoremode.core.plan.build import plan_of_pairs

    return replace(plan_of_pairs([(row, 1) for row in ids], np.arange(len(ids))), prefix_group=None)


def measure(shape: dict[str, Any], device: str) -> None:
    import torch

    from scoremode.core.engine.options import CheckpointOptions
    from scoremode.studies.attribution.engines.transformers_swaps import SwappableModel
    from scoremode.studies.attribution.result import Cells
    from scoremode.studies.attribution.swap_loop import Candidate, SwapMeasurement
    from scoremode.studies.attribution.units import units_of
    from scoremode.studies.attribution.weight_formats.stored import StoredWeight
    from scoremode.studies.attribution.weights import open_weights

    engine = seeded_engine(shape, device)
    count = -(-shape["tokens"] // shape["context"])
    rng = np.random.default_rng(1)
    ids = rng.integers(0, shape["config"]["vocab_size"], (count, shape["context"])).astype(np.int32)
    windows, plan = own_windows(ids), plan_of(ids)
    weights = sum(p.numel() for p in engine.model.parameters())
    print(f"{weights / 1e9:.2f} billion weights, {shape['dtype']} on {device}; {ids.size:,} tokens in {count} windows")
    score_all(engine, windows)
    one_pass = min(timed(lambda: score_all(engine, windows))[0] for _ in range(3))
    print(f"one scoring pass {one_pass:.3f} s")
    with SwappableModel(engine) as swaps:
        held, options = swaps.parameters, CheckpointOptions()
        shapes = {name: tuple(p.shape) for name, p in held.items()}
        own = {n: StoredWeight(n, shapes[n], 8 * p.element_size(), str(p.dtype)) for n, p in held.items()}
        made = open_weights(
            "rtn:4:32", shapes, read_baseline=swaps.own_weight, baseline_stored=own, model_type="", options=options
        )
        candidate = Candidate("rtn:4:32", "", made)
        units = [
            unit
            for unit in units_of(shapes, shape["by"], swaps.layers_name)
            if unit.layer is not None and unit.kind != "norms"
        ]
        jobs = [candidate.job(unit) for unit in units]

        def measurement_of_all() -> SwapMeasurement:
            return SwapMeasurement(swaps, [candidate], plan, cells=Cells.of(plan), folder=Records())  # type: ignore[arg-type]

        warm = measurement_of_all()
        first, _ = timed(lambda: warm.measure(jobs[-1:] if shape["by"] == "layer" else jobs[:1]))
        measurement = measurement_of_all()
        keeping, measurement.baseline = timed(lambda: measurement.record(jobs))
        memory = peak_mib()
        rounding, _ = timed(lambda: [candidate.weights.tensor(name).shape for name in jobs[0].sources])
        each = []
        for job in jobs:
            seconds, _ = timed(lambda job=job: measurement.measure([job]))
            each.append(seconds)
            if len(each) == max(1, len(jobs) // 4):
                memory = peak_mib()
        print(f"warm-up with the first unit {first:.2f} s")
        print(f"the baseline's pass that keeps states {keeping:.3f} s")
        print(f"rounding the weights of one unit {1000 * rounding:.1f} ms")
        print(f"first unit {each[0]:.3f} s, last unit {each[-1]:.3f} s")
        total = keeping + sum(each)
        print(f"{len(jobs)} units {total:.2f} s = {total / one_pass:.1f} × one scoring pass")
        print(f"host memory: {memory:,.0f} MiB after a quarter of the units, {peak_mib():,.0f} MiB after all")
        if torch.cuda.is_available():
            print(f"GPU memory at the peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        list(swaps.record(plan, {len(swaps.layers)}))
        # the first is a warm-up
        _, head = (timed(lambda: list(swaps.diverge(plan, len(swaps.layers))))[0] for _ in range(2))
        print(f"the head's part of a unit {head:.3f} s: {len(jobs)} × = {len(jobs) * head / one_pass:.1f} passes")


def main(given: Sequence[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "quick"], default="8b")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--by", choices=["layer", "matrix"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(given)
    shape = SHAPES["quick" if arguments.quick else arguments.shape]
    shape = {**shape, "tokens": arguments.tokens or shape["tokens"], "by": arguments.by or shape["by"]}
    measure(shape, "cpu" if arguments.quick else arguments.device)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
