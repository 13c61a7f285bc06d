"""The cost of a comparison relative to scoring alone: time, bytes on disk, host memory.

python benchmarks/compare.py memory                     host memory at 10k, 100k and 1M targets (table engine)
python benchmarks/compare.py bytes [--width 4096 --vocabulary 128256]      a reference against float16 logits
python benchmarks/compare.py models BASELINE CANDIDATE… [--tokens 2048]    a whole command; --src of other versions
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import SRC

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


def memory(given: argparse.Namespace) -> None:
    """Peak memory of a whole comparison, including its statistics, each in its own process."""
    peaks = {}
    for targets in given.targets:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(targets)], capture_output=True, text=True, check=True, timeout=3600
        )
        peaks[targets], seconds = float(done.stdout.split()[-1]), time.perf_counter() - began
        print(f"{targets:>10,} targets  {peaks[targets]:8.0f} MiB at the peak  {seconds:6.1f} s", flush=True)
    few, many = min(peaks), max(peaks)
    slope = (peaks[many] - peaks[few]) * 2**20 / max(1, many - few)
    print(f"{slope:.0f} bytes per target: the text, its tokens and KL; scores and texts of both runs stay on disk")


def size(given: argparse.Namespace) -> None:
    """Bytes per target of a reference, with and without its head, compared with float16 logits."""
    from scoremode.core.references.format import estimate_bytes

    kept = estimate_bytes(given.tokens, given.width, "bfloat16", given.vocabulary)
    states, whole = (kept["logits_fp16"] / kept[name] for name in ("states", "total"))
    print(f"D {given.width}, V {given.vocabulary:,}, {given.tokens:,} targets: 1/{states:.1f} of float16 logits")
    print(f"with the head, which is stored once: 1/{whole:.1f}")


def models(given: argparse.Namespace) -> None:
    """Wall time, CPU time and the peak of memory of ``scoremode compare``, in each source tree in turn."""
    words = "The quick brown fox jumps over the lazy dog while nobody is looking. "
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
        print(f"{tree}: {wall:.1f} s, {cpu:.1f} s of CPU, {peak:.0f} MiB at the peak", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "bytes", "models"))
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("candidates", nargs="*")
    parser.add_argument("--src", nargs="+", default=[str(SRC)], help="source trees of versions")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--targets", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    given = parser.parse_args(words)
    {"memory": memory, "bytes": size, "models": models}[given.what](given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
