"""Peaks of memory, in a process of their own: threads of libraries, left by other tests, would allocate too."""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from tests import forked

ROOT = Path(__file__).resolve().parents[1]


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that NumPy and Python held at once, beyond what they held before."""
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measured_alone(function: Callable[[str], list[int]], word: str) -> list[int]:
    """What a function of a test file returns in a process that does nothing else."""
    code = f"import json; from {function.__module__} import {function.__name__} as f; print(json.dumps(f({word!r})))"
    done = forked.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found
