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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from scale_simulation import Assumptions, Job, Measured, Outcome, Simulation

from scoremode.cluster.leases import BLOCK_BYTES, SHARD_TOKENS, lease_size

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
    size = shard_tokens(tokens, measured)
    found = [
        Simulation(Job(tokens, size), replicas, measured, case.assumed, lease_size, seed).run() for seed in range(seeds)
    ]
    mean = {name: sum(getattr(one, name) for one in found) / seeds for name in asdict(found[0]) if name != "replicas"}
    return replace(found[0], **mean)


def shard_tokens(tokens: int, measured: Measured) -> int:
    """scoremode's shards; larger ones where there would be too many events to play, never over a second of work."""
    most = max(SHARD_TOKENS, int(measured.tokens_per_second))
    return min(most, max(SHARD_TOKENS, tokens // 2_000_000))


HEADER = "| replicas | hours | efficiency | starting | slow or lost | copies | idle at the end | waiting for the driver | driver busy | deaths |"


def row(one: Outcome) -> str:
    parts = (one.starting, one.lost_work, one.copied_work, one.idle_at_end, one.waiting_for_driver)
    shares = " | ".join(f"{one.share(part):.1%}" for part in parts)
    busy = one.driver_busy / one.seconds
    return f"| {one.replicas:,} | {one.seconds / 3600:.2f} | **{one.efficiency:.1%}** | {shares} | {busy:.1%} | {one.deaths:.1f} |"


def print_simulation(arguments: argparse.Namespace) -> None:
    measured = Measured(
        tokens_per_second=arguments.rate,
        driver_targets_per_second=arguments.driver,
        block_targets=BLOCK_BYTES // BYTES_PER_TARGET,
        block_seconds=arguments.block_seconds,
    )
    print(f"measured: {json.dumps(asdict(measured))}")
    print(f"shards of {SHARD_TOKENS:,} tokens; {arguments.seeds} runs each")
    for case in cases(arguments.tokens):
        print(f"\n### {case.title}\n\nassumed: {json.dumps(asdict(case.assumed))}\n\n{HEADER}\n|{'---|' * 10}")
        for replicas in arguments.replicas:
            print(row(simulate(case, measured, replicas, arguments.seeds)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--rate", type=float, default=RATES["8b"], help="tokens/s of one replica")
    parser.add_argument("--driver", type=float, default=5e6, help="targets/s that the driver takes")
    parser.add_argument("--block-seconds", type=float, default=0.0, help="of the driver, for each block of answers")
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
