"""Time and memory of calls: medians, interleaved, so that a drifting clock rate affects all of them equally."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from head_ways import CannotRunError, Problem, Size, Way, build

SECONDS = 0.3  # measuring time per call, all rounds together
MOST_CALLS = 200
MIB = 2**20

Call = Callable[[], object]


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def time_together(calls: Mapping[str, Call], rounds: int, device: str) -> dict[str, list[float]]:
    """Milliseconds of every single call. Each round runs every call, each for about the same share of ``SECONDS``."""
    burst = _burst_on_gpu if device == "cuda" else _burst_on_cpu
    counts = {}
    for name, call in calls.items():
        burst(call, 1)
        counts[name] = _calls_a_round(burst(call, 1)[0], rounds)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name] += burst(call, counts[name])
    return found


def _calls_a_round(milliseconds: float, rounds: int) -> int:
    wanted = 1000 * SECONDS / rounds / max(milliseconds, 1e-3)
    return max(1, min(round(wanted), MOST_CALLS // rounds))


def _burst_on_gpu(call: Call, count: int) -> list[float]:
    """Consecutive calls without waiting between them, as in use: a launch may overlap with earlier work."""
    call()  # what earlier calls left in the allocator is not the cost of this one
    event: Any = torch.cuda.Event  # has no types
    marks = [event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [float(a.elapsed_time(b)) for a, b in pairwise(marks)]


def _burst_on_cpu(call: Call, count: int) -> list[float]:
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        result = call()
        found.append(1000 * (time.perf_counter() - begin))
        del result  # freeing a product is not part of computing it
    return found


def spread(milliseconds: list[float]) -> float:
    """Interquartile range as a share of the median."""
    if len(milliseconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
    return (high - low) / middle


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def prepare_way(name: str, problem: Problem) -> tuple[Way, float, float | None]:
    """An implementation that has run once, the MiB it needs (without inputs and results; NaN on a CPU), its error."""
    release()
    _warm_library(problem)
    on_gpu = problem.size.device == "cuda"
    way = build(name, problem)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    way.call()  # compiles, tunes
    release()
    if on_gpu:
        # memory kept between calls is counted: ``before`` was taken before the first call
        torch.cuda.reset_peak_memory_stats()
    result = way.call()
    extra = float("nan")
    if on_gpu:
        torch.cuda.synchronize()
        extra = (torch.cuda.max_memory_allocated() - before - way.result_bytes(result)) / MIB
    return way, extra, way.largest_error(problem, result)


def release() -> None:
    """Release unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _warm_library(problem: Problem) -> None:
    """Allocate the library's workspace before anything is measured, so that it is counted for no implementation."""
    torch.mm(problem.hidden[:64], problem.weight.T)


def memory_on_cpu(name: str, size: Size) -> float:
    """MiB that the process grows by during a second call, beyond results, in a separate process."""
    context = multiprocessing.get_context("forkserver")  # torch is loaded once, and never used before the fork
    context.set_forkserver_preload(["torch", "scoremode.head.kernels"])
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_memory_child, args=(name, size, theirs))
    child.start()
    theirs.close()
    try:
        found: float | str = ours.recv()
    except EOFError:
        child.join()
        raise CannotRunError(f"the process that measures its memory ended with {child.exitcode}") from None
    child.join()
    if isinstance(found, str):
        raise CannotRunError(found)
    return found


def _memory_child(name: str, size: Size, answer: Connection) -> None:
    try:
        with torch.no_grad():
            answer.send(_growth(name, size))
    except Exception as error:
        answer.send(reason(error))


def _growth(name: str, size: Size) -> float:
    problem = Problem(size)
    _warm_library(problem)
    way = build(name, problem)
    way.call()  # memory of the compiler is not memory of the call
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc keeps freed memory, in which the call would not show
        ctypes.CDLL(None).malloc_trim(0)
    before = _resident_now()
    result = way.call()
    return max(0.0, _resident_peak() - before - way.result_bytes(result)) / MIB


def _resident_now() -> float:
    """Resident bytes; also resets the peak, if the system allows it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return _resident_peak()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_bytes(status, "VmRSS")


def _resident_peak() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        return _status_bytes(status, "VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status_bytes(status: Path, field: str) -> float:
    line = next(x for x in status.read_text(encoding="ascii").splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def reason(error: BaseException) -> str:
    """An exception in one line."""
    if isinstance(error, CannotRunError):
        return str(error)
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}"
