"""How far a run can be spread: what is measured on this machine, and a simulation of up to 1,024 replicas from it.

    python benchmarks/scale.py --measure            the driver's rate, and what Ray adds to a block of answers
    python benchmarks/scale.py --simulate           efficiency for 1 to 1,024 replicas, event by event
    python benchmarks/scale.py --simulate --driver 9e6 --saved 2e6 --replicas 64 256

The rates of replicas are figures of benchmarks/RESULTS.md; everything else that goes in is printed with the result.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from scale_simulation import Assumptions, Job, Measured, Outcome, Simulation

from scoremode.remote.ray.replica import BLOCK_BYTES, block_seconds

H200_8B = 39_322.0  # tokens/s of one H200, Llama-3.1-8B in bfloat16, all columns, exact head: benchmarks/RESULTS.md
H200_HALF_B = 390_110.0  # the shape of Qwen2.5-0.5B
BYTES_PER_TARGET = 8 + 8 + 8 + 4 + 8
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Case:
    """A table of the simulation."""

    title: str
    rate: float  # tokens/s of one replica
    assumed: Assumptions
    tokens: float | None = None  # in all; None: the same time for every number of replicas
    seconds: float = 600.0  # of pure work per replica, if ``tokens`` is None


def cases() -> list[Case]:
    usual = Assumptions()
    quiet = replace(usual, failures_per_gpu_hour=0.0, slow_share=0.0, jitter=0.0)
    often = replace(usual, failures_per_gpu_hour=1000 * usual.failures_per_gpu_hour)
    large = replace(usual, gpus_per_replica=4, start_median=300.0)
    return [
        Case("8B, one corpus of 10 billion tokens", H200_8B, usual, 1e10),
        Case("8B, ten minutes of work for each replica", H200_8B, usual),
        Case("8B, ten minutes each, nothing but starts: no failures, no slow replicas", H200_8B, quiet),
        Case("8B, one hour each, failures 1,000 times as often", H200_8B, often, seconds=3600.0),
        Case(
            "70B on four GPUs, one hour each; rate: the 8B's by weights (assumed)",
            4 * H200_8B * 8 / 70,
            large,
            seconds=3600.0,
        ),
        Case("0.5B, ten minutes each", H200_HALF_B, usual),
    ]


def simulate(case: Case, measured: Measured, replicas: int, seeds: int) -> Outcome:
    """The mean outcome of several runs."""
    measured = replace(measured, tokens_per_second=case.rate)
    tokens = int(case.tokens or case.seconds * measured.tokens_per_second * replicas)
    job = Job(tokens, block_tokens(measured, replicas))
    found = [Simulation(job, replicas, measured, case.assumed, seed).run() for seed in range(seeds)]
    names = [name for name in asdict(found[0]) if name != "replicas"]
    mean = {name: sum(getattr(one, name) for one in found) / seeds for name in names}
    return replace(found[0], **mean)


def block_tokens(measured: Measured, replicas: int) -> int:
    """A block is sent when it is large or old; every token is a target here."""
    old = block_seconds(replicas) * measured.tokens_per_second
    return int(min(BLOCK_BYTES / BYTES_PER_TARGET, max(2048, old)))


COLUMNS = (
    "replicas",
    "hours",
    "efficiency",
    "starting",
    "slow or lost",
    "idle",
    "waiting for the driver",
    "driver busy",
    "deaths",
    "then saving",
)


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def row(one: Outcome) -> str:
    parts = (one.starting, one.slow_or_lost, one.idle, one.waiting_for_driver)
    shares = [f"{one.share(part):.1%}" for part in parts]
    busy = f"{one.driver_busy / one.seconds:.1%}"
    hours = f"{one.seconds / 3600:.2f}"
    last = [busy, f"{one.deaths:.1f}", f"{one.saving / 3600:.2f} h"]
    return line([f"{one.replicas:,}", hours, f"**{one.efficiency:.1%}**", *shares, *last])


def print_simulation(arguments: argparse.Namespace) -> None:
    measured = Measured(
        tokens_per_second=0.0,
        driver_targets_per_second=arguments.driver,
        saved_targets_per_second=arguments.saved,
        block_seconds=arguments.block_seconds,
        block_seconds_per_replica=arguments.block_seconds_per_replica,
    )
    print(f"measured: {json.dumps(asdict(measured))}")
    print(f"{arguments.seeds} runs each")
    for case in (case for case in cases() if arguments.only in case.title):
        print(f"\n### {case.title}\n\nassumed: {json.dumps(asdict(case.assumed))}\n")
        print(f"{line(COLUMNS)}\n|{'---|' * len(COLUMNS)}")
        for replicas in arguments.replicas:
            print(row(simulate(case, measured, replicas, arguments.seeds)), flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--windows", type=int, default=2000, help="that are measured, of 2,048 targets each")
    parser.add_argument("--measured-replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--driver", type=float, default=7.5e6, help="targets/s that the driver takes")
    parser.add_argument("--saved", type=float, default=1e6, help="targets/s of statistics and saving")
    parser.add_argument("--block-seconds", type=float, default=0.0014, help="of the driver, for each block of answers")
    parser.add_argument("--block-seconds-per-replica", type=float, default=0.0, help="more for each replica")
    parser.add_argument("--replicas", type=int, nargs="+", default=SIZES)
    parser.add_argument("--only", default="", metavar="WORDS", help="only tables with these words in their title")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args(words)
    if not (arguments.simulate or arguments.measure):
        parser.error("give --simulate, --measure or both")
    if arguments.measure:
        from scale_measurement import measure

        print(json.dumps(measure(arguments.windows, tuple(arguments.measured_replicas)), indent=1))
    if arguments.simulate:
        print_simulation(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
