"""The cost of a comparison relative to scoring alone: time, bytes on disk, host memory.

    python benchmarks/compare.py memory                     host memory at 10k, 100k and 1M targets (table engine)
    python benchmarks/compare.py bytes [--width 4096 --vocabulary 128256]      a reference against float16 logits
    python benchmarks/compare.py time MODEL [--engine vllm] [--tokens 65536]   against a reference / scoring alone

    python benchmarks/compare.py models BASELINE CANDIDATE… [--tokens 2048]    a whole command; --src of other versions

``time`` uses the model as its own candidate: it measures the work, not the divergence.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import SRC, peak_mib

from scoremode.core.engine.base import Wanted

MEMORY = """
import resource, sys, tempfile
from pathlib import Path
from scoremode.core.verbs.compare import compare
targets = int(sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    text = Path(folder) / "text.txt"
    text.write_text("abcdefgh" * (targets // 8 + 1))
    (found,) = compare("table:uniform", "table:uniform", corpus=str(text), context_length=2048, stride=2048,
                       out=Path(folder) / "out")
    assert found.kl is not None and len(found.kl) >= targets - 1, "every target was compared"
    found.statistics()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def memory(given: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of a whole comparison, including its statistics, each in its own process."""
    found, seconds = {}, {}
    for targets in given.targets:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(targets)], capture_output=True, text=True, check=True, timeout=3600
        )
        found[targets] = float(done.stdout.split()[-1])
        seconds[targets] = time.perf_counter() - began
        print(f"{targets:>10,} targets  {found[targets]:8.0f} MiB at the peak  {seconds[targets]:6.1f} s", flush=True)
    few, many = min(found), max(found)
    slope = (found[many] - found[few]) * 2**20 / max(1, many - few)
    print(f"{slope:.0f} bytes per target: the text, its tokens and KL; scores and texts of both runs stay on disk")
    return {"peak_mib": found, "seconds": seconds, "bytes_a_target": slope}


def size(given: argparse.Namespace) -> dict[str, Any]:
    """Bytes per target of a reference, with and without its head, compared with float16 logits."""
    from scoremode.core.references.format import estimate_bytes

    kept = estimate_bytes(given.tokens, given.width, "bfloat16", given.vocabulary)
    states, whole = (kept["logits_fp16"] / kept[name] for name in ("states", "total"))
    print(f"D {given.width}, V {given.vocabulary:,}, {given.tokens:,} targets: 1/{states:.1f} of float16 logits")
    print(f"with the head, which is stored once: 1/{whole:.1f}")
    return {**kept, "times_smaller": states, "times_smaller_with_head": whole}


def timed(given: argparse.Namespace) -> dict[str, Any]:
    """Scoring alone and scoring against a reference, with one engine that is started once."""
    from scoremode.core.engine.baseline import stored_states
    from scoremode.core.engine.plugin import Work
    from scoremode.core.plan.question import Question
    from scoremode.core.references.reader import Reference
    from scoremode.core.verbs.model import LazyModel
    from scoremode.core.verbs.reference import reference

    words = "The quick brown fox jumps over the lazy dog while nobody is looking. "
    question = {"text": words * (given.tokens // 14 + 1), "context_length": given.context, "stride": given.context}
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "ref"
        reference(given.model, kept, engine=given.engine, dtype=given.dtype, **question)
        held = LazyModel.named(given.model, given.engine, {"dtype": given.dtype})
        asked = held.ask(Question(**question))
        worker = held.opened(Work(longest=given.context))
        try:
            baseline, plan = stored_states(Reference.open(kept), asked.plan.target_offsets), asked.plan
            alone, against = [], []
            for _ in range(given.repeat + 1):
                alone.append(_seconds(worker.score(plan, _none(plan))))
                against.append(_seconds(worker.score(plan, _none(plan), Wanted(against=baseline))))
            facts = worker.facts
        finally:
            worker.close()
    a, b = statistics.median(alone[1:]), statistics.median(against[1:])  # the first pass compiles and warms up
    print(
        f"{plan.targets:,} targets on {facts.engine}, {facts.device}, {facts.dtype}: alone {a:.2f} s, against {b:.2f} s"
    )
    print(f"against a reference: {b / a:.3f} × scoring alone, wanted at most 1.3")
    return {"targets": plan.targets, "alone_s": a, "against_s": b, "ratio": b / a, "settings": facts.settings}


def models(given: argparse.Namespace) -> dict[str, Any]:
    """Wall time, CPU time and the peak of memory of ``scoremode compare``, in each source tree in turn."""
    words = "The quick brown fox jumps over the lazy dog while nobody is looking. "
    found: dict[str, Any] = {}
    for tree in given.src:
        figures = []
        for _ in range(given.repeat):
            with tempfile.TemporaryDirectory() as folder:
                text = Path(folder) / "text.txt"
                text.write_text(words * (given.tokens // 14 + 1))
                environment = {**os.environ, "PYTHONPATH": tree, "SCOREMODE_CACHE": f"{folder}/cache"}
                sizes = ["--context-length", str(given.context), "--stride", str(given.context), "--json"]
                names = [sys.executable, "-m", "scoremode", "compare", given.model, *given.candidates]
                began = time.perf_counter()
                child = subprocess.Popen(
                    [*names, "--corpus", str(text), *sizes], env=environment, stdout=subprocess.DEVNULL
                )
                _, status, used = os.wait4(child.pid, 0)
                seconds = time.perf_counter() - began
                child.returncode = os.waitstatus_to_exitcode(status)
                assert child.returncode == 0, "the comparison failed"
            figures.append((seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024))
        wall, cpu, peak = (statistics.median(column) for column in zip(*figures, strict=True))
        found[tree] = {"wall_s": wall, "cpu_s": cpu, "peak_mib": peak}
        print(f"{tree}: {wall:.1f} s, {cpu:.1f} s of CPU, {peak:.0f} MiB at the peak", flush=True)
    return found


def _none(plan: Any) -> Any:
    import numpy as np

    return np.zeros(len(plan), np.bool_)


def _seconds(answers: Any) -> float:
    began = time.perf_counter()
    for _ in answers:
        pass
    return time.perf_counter() - began


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "bytes", "time", "models"))
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("candidates", nargs="*")
    parser.add_argument("--src", nargs="+", default=[str(SRC)], help="source trees of versions")
    parser.add_argument("--engine", default=None)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--targets", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args(words)
    found = {"memory": memory, "bytes": size, "time": timed, "models": models}[given.what](given)
    if given.json:
        Path(given.json).write_text(json.dumps({**found, "own_peak_mib": peak_mib()}, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
