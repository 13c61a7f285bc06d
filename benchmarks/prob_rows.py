"""Many rows: ``scoremode prob`` on a long file of pairs, and the loop that takes what engines answer.

    python benchmarks/prob_rows.py --rows 1000000
    python benchmarks/prob_rows.py --rows 20000 --model FOLDER --plain-rows 2000
    python benchmarks/prob_rows.py --driver

The first two print rows per second and peak memory of the command, in a process of its own, next to the loop that one
would write by hand: ``session.prob`` for each row. ``--driver`` prints how many targets per second the loop of every
perplexity (checks, journal on disk) takes from an engine that costs nothing, and how fast a resumed run reads them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from free_engine import FreeEngine

WORDS = "the a small cat dog sat ran house tree and Lily Tom was happy red ball"

PEAK = """
import re, sys
from scoremode.cli.main import main
code = main(sys.argv[1:])
print("peak", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
sys.exit(code)
"""

PLAIN = """
import json, re, sys, time
import scoremode as sm
with sm.open(sys.argv[1]) as session:
    session.prob("warm", " up")
    began, results = time.perf_counter(), []
    for line in open(sys.argv[2], encoding="utf-8"):
        row = json.loads(line)
        results += session.prob(row["prompt"], row["target"])
    seconds = time.perf_counter() - began
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
print(json.dumps({"rows": len(results), "seconds": seconds, "peak": int(peak)}))
"""


def driver_rate(targets_per_window: int, windows: int) -> tuple[float, float]:
    """Millions of targets per second: from an engine that costs nothing into a journal on disk; from there, checked."""
    from scoremode.core.scores.journal import Journal
    from scoremode.core.verbs.scoring import answered

    plan = plan_of(windows, targets_per_window)
    engine, identity = FreeEngine(), {"benchmark": "driver"}
    with tempfile.TemporaryDirectory(prefix="scoremode-") as kept:
        path, targets = Path(kept) / "journal", plan.targets / 1e6
        journal = Journal(path, identity, plan.target_counts)

        def score() -> None:
            for index, answers in answered(engine, plan):
                journal.add(index, answers, 0.0)

        scored = _seconds(score)
        journal.close()
        again: list[Journal] = []
        resumed = _seconds(lambda: again.append(Journal(path, identity, plan.target_counts)))
        assert again[0].done.all()
        again[0].close()
    return targets / scored, targets / resumed


def plan_of(windows: int, targets: int) -> Any:
    """Windows of so many targets, over one text."""
    from scoremode.core.plan.plan import Plan

    starts, n = np.arange(windows, dtype=np.int64) * targets, targets * windows + 1
    return Plan(
        method="benchmark",
        settings=(),
        ids=np.zeros(n, np.int32),
        doc_starts=np.array([0, n], np.int64),
        start=starts,
        stop=starts + targets,
        first=starts + 1,
        last=starts + targets + 1,
        lead=np.full(windows, -1, np.int32),
    )


def _seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def write_pairs(path: Path, rows: int) -> None:
    """Pairs like those of a data set: a prompt of its own for each, and a short target."""
    some, words = random.Random(1), WORDS.split()
    with path.open("w", encoding="utf-8") as file:
        for i in range(rows):
            prompt = f"Question {i}: " + " ".join(some.choice(words) for _ in range(6))
            target = " " + " ".join(some.choice(words) for _ in range(2))
            file.write(json.dumps({"prompt": prompt, "target": target}) + "\n")


def command(model: str, pairs: Path, *flags: str) -> tuple[float, float]:
    """Seconds and MB of one ``scoremode prob``."""
    began = time.perf_counter()
    child = subprocess.run(
        [sys.executable, "-c", PEAK, "prob", model, "--file", str(pairs), *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return time.perf_counter() - began, int(child.stderr.rsplit("peak ", 1)[1]) / 1024


def plain_loop(model: str, pairs: Path) -> tuple[float, float]:
    """Rows per second and MB of the loop by hand."""
    child = subprocess.run(
        [sys.executable, "-c", PLAIN, model, str(pairs)], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(child.stdout)
    return found["rows"] / found["seconds"], found["peak"] / 1024


def rows(model: str, count: int, plain: int) -> None:
    with tempfile.TemporaryDirectory(prefix="scoremode-") as folder:
        pairs, few, out = (Path(folder) / name for name in ("pairs.jsonl", "few.jsonl", "results.jsonl"))
        write_pairs(pairs, count)
        write_pairs(few, plain)
        by_hand, by_hand_mb = plain_loop(model, few)
        print(f"{'by hand, row by row':28} {by_hand:10,.0f} rows/s  {by_hand_mb:7,.0f} MB  ({plain:,} rows)")
        for words, flags in (("--out", ("--out", str(out))), ("--json", ("--json",))):
            seconds, mb = command(model, pairs, *flags)
            rate = f"{count / seconds:10,.0f} rows/s  {mb:7,.0f} MB  ({count:,} rows, {seconds:.1f} s"
            print(f"{'scoremode prob ' + words:28} {rate}, {count / seconds / by_hand:.1f} x by hand)")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="table:uniform")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--plain-rows", type=int, default=5_000, help="rows of the loop by hand")
    parser.add_argument("--driver", action="store_true", help="targets per second of the loop")
    parser.add_argument("--targets", type=int, default=8000 * 2048, help="of --driver, in all")
    parsed = parser.parse_args(words)
    if not parsed.driver:
        rows(parsed.model, parsed.rows, parsed.plain_rows)
        return 0
    for targets in (2048, 512):
        scored, resumed = driver_rate(targets, parsed.targets // targets)
        print(f"windows of {targets:5,} targets: {scored:6.1f} scored  {resumed:6.1f} resumed   (million targets/s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
