"""The cost of scores, given hidden states (n, D) and a head (V, D): several implementations, compared in one run.

matmul                      hidden @ weight.T alone, in the dtype of the inputs: the unit
naive                       log_softmax of all logits in float32, gather, rank by comparison
vllm                        the same, 1,024 rows at a time: what vLLM does
compiled                    torch.compile'd reduction to every column, 2,048 rows at a time
liger                       Liger-Kernel's fused linear cross entropy, one loss per token
cut-cross-entropy           Apple's, one loss per token
torch linear_cross_entropy  PyTorch's own, one loss per token
scoremode                   logprob, rank, entropy, top token and its logprob, by the kernel chosen on this device
naive KL                    KL(p‖q) of two models, log_softmax of both in float32, 1,024 rows at a time
scoremode KL                KL(p‖q) and the columns of q
scoremode divergence        every column of a divergence, and those of q

``ms`` is a median over interleaved rounds; ``× matmul`` divides it by matmul's in the same rounds (a divergence needs
two products). ``peak MiB`` is what a warm call takes in addition to its inputs and the columns it returns: the
allocator's peak on a GPU, the growth of a separate process on a CPU. ``max error`` is the largest distance from float64
over 256 rows spread over the batch, in nats of log-probability, or of KL. Implementations that cannot run here are
skipped, with the reason.

    python benchmarks/head.py [--device cpu] [--shapes llama-8b,896:151936] [--only naive,scoremode] [--kernels]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from common import say
from head_ways import BUILDERS, OTHER_KERNELS, Problem, Size, Way
from measure import memory_on_cpu, prepare_way, reason, release, spread, time_together

import scoremode

SHAPES = {
    "llama-8b": (4096, 128256),
    "qwen-0.5b": (896, 151936),
    "gemma-4b": (2560, 262144),
    "smollm2": (576, 49152),
}
DEFAULT_SHAPES = {"cuda": "llama-8b,qwen-0.5b,gemma-4b", "cpu": "smollm2,1024:49152"}
DEFAULT_ROWS = {"cuda": 8192, "cpu": 2048}
DEFAULT_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
PACKAGES = ("triton", "liger-kernel", "cut-cross-entropy")

Row = dict[str, Any]


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────
def measure_shape(size: Size, names: list[str], rounds: int) -> tuple[list[Row], list[Row]]:
    """One row per implementation that runs, and the reason for each that does not."""
    problem = Problem(size)
    ready: dict[str, tuple[Way, float, float | None]] = {}
    skipped: list[Row] = []
    for name in names:
        if "scoremode" in ready and name == f"scoremode ({ready['scoremode'][0].kernel})":
            continue  # the kernel that was already chosen
        say(f"{size.label} {name}")
        try:
            ready[name] = _prepare(name, problem)
        except Exception as error:  # a library that fails must not stop the other measurements
            skipped.append({"implementation": name, "shape": size.label, "reason": reason(error)})
        release()
    times = time_together({name: way.call for name, (way, _, _) in ready.items()}, rounds, size.device)
    unit = statistics.median(times["matmul"]) if "matmul" in times else None
    rows = []
    for name, (way, peak, largest_error) in ready.items():
        milliseconds = statistics.median(times[name])
        rows.append(
            {
                "implementation": name,
                "shape": size.label,
                "milliseconds": milliseconds,
                "x_matmul": milliseconds / unit if unit else None,
                "peak_mib": peak,
                "max_error": largest_error,
                "columns": way.columns,
                "calls": len(times[name]),
                "spread": spread(times[name]),
            }
        )
    return rows, skipped


def _prepare(name: str, problem: Problem) -> tuple[Way, float, float | None]:
    on_cpu = memory_on_cpu(name, problem.size) if problem.size.device == "cpu" else None
    way, peak, error = prepare_way(name, problem)
    if error is not None and not error < float("inf"):
        raise ValueError("its answers are not finite")
    return way, peak if on_cpu is None else on_cpu, error


# ── what is printed and kept ─────────────────────────────────────────────────────────────────────────────────────────
def hardware(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    model = platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "scoremode": scoremode.__version__,
        "torch": str(torch.__version__),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def print_table(title: str, rows: list[Row], skipped: list[Row]) -> None:
    wide = max(len(r["implementation"]) for r in [*rows, *skipped])
    print(f"\n{title}")
    print(f"{'':{wide}} {'ms':>10} {'× matmul':>9} {'peak MiB':>9} {'max error':>10}  columns")
    for row in rows:
        ratio = "-" if row["x_matmul"] is None else f"{row['x_matmul']:.3f}"
        error = "-" if row["max_error"] is None else f"{row['max_error']:.1e}"
        numbers = f"{row['milliseconds']:10.3f} {ratio:>9} {row['peak_mib']:9,.0f} {error:>10}"
        print(f"{row['implementation']:{wide}} {numbers}  {row['columns']}")
    for row in skipped:
        print(f"{row['implementation']:{wide}} skipped: {row['reason']}")
    sys.stdout.flush()


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, help="hidden states; default 8192 on a GPU, 2048 on a CPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default bfloat16 on a GPU")
    parser.add_argument("--shapes", help=f"of {', '.join(SHAPES)}, or D:V")
    parser.add_argument("--only", help=f"of {', '.join(BUILDERS)}; matmul is always measured")
    parser.add_argument("--kernels", action="store_true", help="a row for each of scoremode's other kernels")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved rounds of about 0.3 s in all")
    arguments = parser.parse_args(words)
    if arguments.repeats < 1 or (arguments.rows is not None and arguments.rows < 1):
        parser.error("--repeats and --rows must be at least 1")
    arguments.rows = arguments.rows or DEFAULT_ROWS[arguments.device]
    arguments.dtype = arguments.dtype or DEFAULT_DTYPE[arguments.device]
    return arguments


def wanted_names(only: str | None, kernels: bool) -> list[str]:
    """What to measure, in the order of the table: other kernels after the chosen one, divergences last."""
    order = [*list(BUILDERS)[:-2], *OTHER_KERNELS, *list(BUILDERS)[-2:]]
    if only is None:
        asked = set(BUILDERS)
    else:
        asked = {name.strip() for name in only.split(",")} | {"matmul"}
        if unknown := asked - set(order):
            sys.exit(f"error: {', '.join(sorted(unknown))} is not known: of {', '.join(order)}")
    return [name for name in order if name in asked | (set(OTHER_KERNELS) if kernels else set())]


def wanted_sizes(arguments: argparse.Namespace) -> list[tuple[str, Size]]:
    text = arguments.shapes or DEFAULT_SHAPES[arguments.device]
    found = []
    for name in text.split(","):
        width, vocabulary = SHAPES[name] if name in SHAPES else _numbers(name)
        found.append((name, Size(arguments.rows, width, vocabulary, arguments.dtype, arguments.device)))
    return found


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(":")
    if len(parts) != 2 or not all(p.isdecimal() and int(p) > 0 for p in parts):
        sys.exit(f"error: {text} is neither a name ({', '.join(SHAPES)}) nor D:V")
    return tuple(int(p) for p in parts)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    names, failed = wanted_names(arguments.only, arguments.kernels), False
    print(hardware(arguments.device))
    print(", ".join(f"{name} {v}" for name, v in versions().items() if v), flush=True)
    with torch.no_grad():
        for name, size in wanted_sizes(arguments):
            rows, skipped = measure_shape(size, names, arguments.repeats)
            print_table(f"{name}: {size.label}, {size.rows} rows, {size.dtype}", rows, skipped)
            failed |= any(row["implementation"] in ("scoremode", "scoremode KL") for row in skipped)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
