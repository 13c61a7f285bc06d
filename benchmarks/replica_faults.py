"""Kill workers and remove nodes at random while a question is scored, and see that the numbers are always the same.

    python benchmarks/replica_faults.py --rounds 25

Each round is one question on a real Ray cluster of this machine: a head and three nodes with a declared GPU each. While
it is scored, a worker is killed with SIGKILL or a whole node is removed, once or twice, at moments of chance. A node
that was removed comes back before the next round.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from replicas import Machine, open_all, text_of

import scoremode as sm

WAIT = 0.02  # seconds of a window
SIZES: dict[str, Any] = {"method": "gptq", "context_length": 64, "max_windows": 0}


def disturb(machine: Machine, model: sm.Model, rng: random.Random, done: threading.Event) -> list[str]:
    """What was done to the cluster."""
    happened: list[str] = []
    for _ in range(rng.randrange(1, 3)):
        if done.wait(0.2 + 1.2 * rng.random()):
            break
        if rng.random() < 0.3 and len(machine.nodes) > 1:
            machine.remove(rng.randrange(len(machine.nodes)))
            happened.append("node")
            continue
        engine: Any = model._model._engine
        pids = [replica.opened.pid for replica in engine.pool.ready if replica.opened is not None]
        if pids:
            try:
                os.kill(rng.choice(pids), signal.SIGKILL)
                happened.append("worker")
            except ProcessLookupError:
                pass
    return happened


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--windows", type=int, default=240)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(words)
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="scoremode-faults-") as folder, Machine(Path(folder)) as machine:
        text = text_of(Path(folder), given.windows)
        expected = sm.ppl("paced:", corpus=str(text), **SIZES).scores.logprob
        equal, began = 0, time.monotonic()
        for number in range(given.rounds):
            while len(machine.nodes) < given.nodes:
                machine.add()
            with open_all(f"paced:wait={WAIT}", given.nodes, gpus=1) as model:
                done, happened = threading.Event(), []
                other = threading.Thread(target=lambda: happened.extend(disturb(machine, model, rng, done)))  # noqa: B023
                other.start()
                run = model.ppl(corpus=str(text), out=Path(folder) / f"run-{number}", **SIZES)
                done.set()
                other.join()
            account = run.manifest["replicas"]
            is_equal = bool(np.array_equal(run.scores.logprob, expected))
            equal += is_equal
            print(
                f"{number + 1:3d}  {'+'.join(happened) or 'nothing':14s}  deaths {account['deaths']}  windows again "
                f"{account['windows_again']:3d}  {'equal' if is_equal else 'DIFFERENT'}",
                flush=True,
            )
        print(f"{equal} of {given.rounds} rounds gave the same numbers, in {time.monotonic() - began:.0f} s")
    return int(equal < given.rounds)


if __name__ == "__main__":
    sys.exit(main())
