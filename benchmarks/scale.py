"""How far a run can be spread: what is measured on this machine, and a simulation of up to 1,024 replicas from it.

    python benchmarks/scale.py --measure            the driver's rate, and what Ray adds to a block of answers
    python benchmarks/scale.py --simulate           efficiency for 1 to 1,024 replicas, event by event
    python benchmarks/scale.py --simulate --driver 9e6 --rate 390110 --tokens 1e11

The rates of replicas are figures of benchmarks/RESULTS.md; everything else that goes in is printed with the result.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from scale_simulation import Assumptions, Job, Measured, Outcome, Simulation

from scoremode.cluster.replica import BLOCK_BYTES, block_seconds

RATES = {"8b": 39_322.0, "0.5b": 390_110.0}  # tokens/s of one H200: benchmarks/RESULTS.md, all columns, exact head
BYTES_PER_TARGET = 8 + 8 + 8 + 4 + 8
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Case:
    """A table of the simulation."""

    title: str
    assumed: Assumptions
    tokens: float | None = None  # in all; None: the same time for every number of replicas
    seconds: float = 600.0  # of pure work per replica, if ``tokens`` is None


def cases(tokens: float) -> list[Case]:
    usual = Assumptions()
    none = replace(usual, failures_per_gpu_hour=0.0)
    even = replace(none, slow_share=0.0, jitter=0.0)
    return [
        Case(f"one corpus of {tokens:,.0f} tokens, everything happens", usual, tokens),
        Case("ten minutes of work for each replica, everything happens", usual),
        Case("ten minutes each, nothing but starts (no failures, no slow replicas)", even),
        Case("ten minutes each, and slow replicas, no failures", none),
        Case(
            "one hour each, failures 30 times as often",
            replace(usual, failures_per_gpu_hour=30 * usual.failures_per_gpu_hour),
            None,
            3600.0,
        ),
    ]


def simulate(case: Case, measured: Measured, replicas: int, seeds: int) -> Outcome:
    """The mean outcome of several runs."""
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
    "copies",
    "idle",
    "waiting for the driver",
    "driver busy",
    "deaths",
)


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def row(one: Outcome) -> str:
    parts = (one.starting, one.slow_or_lost, one.copied, one.idle, one.waiting_for_driver)
    shares = [f"{one.share(part):.1%}" for part in parts]
    busy = f"{one.driver_busy / one.seconds:.1%}"
    hours = f"{one.seconds / 3600:.2f}"
    return line([f"{one.replicas:,}", hours, f"**{one.efficiency:.1%}**", *shares, busy, f"{one.deaths:.1f}"])


def print_simulation(arguments: argparse.Namespace) -> None:
    measured = Measured(
        tokens_per_second=arguments.rate,
        driver_targets_per_second=arguments.driver,
        block_seconds=arguments.block_seconds,
        block_seconds_per_replica=arguments.block_seconds_per_replica,
    )
    print(f"measured: {json.dumps(asdict(measured))}")
    print(f"{arguments.seeds} runs each")
    for case in cases(arguments.tokens):
        print(f"\n### {case.title}\n\nassumed: {json.dumps(asdict(case.assumed))}\n\n{line(COLUMNS)}\n|{'---|' * 10}")
        for replicas in arguments.replicas:
            print(row(simulate(case, measured, replicas, arguments.seeds)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--rate", type=float, default=RATES["8b"], help="tokens/s of one replica")
    parser.add_argument("--driver", type=float, default=5e6, help="targets/s that the driver takes")
    parser.add_argument("--block-seconds", type=float, default=0.0, help="of the driver, for each block of answers")
    parser.add_argument("--block-seconds-per-replica", type=float, default=0.0, help="more for each replica")
    parser.add_argument("--tokens", type=float, default=1e10)
    parser.add_argument("--replicas", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    if not (arguments.simulate or arguments.measure):
        parser.error("give --simulate, --measure or both")
    if arguments.measure:
        from scale_measurement import measure

        print(json.dumps(measure(), indent=1))
    if arguments.simulate:
        print_simulation(arguments)


if __name__ == "__main__":
    main()
