"""Do all numbers stay the same? 39 commands, run before and after a change, compared bit for bit.

    python benchmarks/same_numbers.py record before/     # keeps the runs, references, caches and printed figures
    python benchmarks/same_numbers.py record after/
    python benchmarks/same_numbers.py compare before/ after/
    python benchmarks/same_numbers.py open before/       # folders of an earlier version still open, with equal numbers

Plan digests, every column of every target and every printed statistic must be equal; columns and statistics that only
``after`` has are named. vLLM's batches, and so its scores, vary from run to run: they may differ by twice the largest
difference between two passes of one version, or by 1e-5 nats.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

METHODS = {
    "sliding-once": ["--context-length", "96", "--stride", "48"],
    "exl3-2025": ["--context-length", "96", "--stride", "32"],
    "exl3-2026": ["--context-length", "96"],
    "gptq": ["--context-length", "96"],
    "llamacpp": ["--context-length", "96"],
    "hf-stride": ["--context-length", "96", "--stride", "48"],
    "lm-eval-rolling": ["--context-length", "96"],
    "mean-of-texts": ["--context-length", "96"],
}
NEEDS_PREFIX = ("lm-eval-rolling", "mean-of-texts")  # they add a prefix token, which a table over bytes does not have
MODEL = "smollm2-135m"
GGUF = "its GGUF"  # stands for the path of the file that MODEL is made from
VOLATILE = {"seconds", "tokens_per_second", "run", "reference", "cached", "versions", "seal", "hardware", "out"}
SHORT = ["--corpus", "documents.jsonl", "--num-samples", "5", "--context-length", "96", "--stride", "48"]
WORDS = "the model reads a long text and gives every token its own probability before it sees what follows"
PAIRS = [("The capital of France is", " Paris"), ("The capital of Fran", "ce is Paris"), ("2 + 2 =", " 4")]


def texts(folder: Path) -> None:
    """Twelve documents of made-up prose: the same on every machine, and not part of any version."""
    words = WORDS.split()
    dice = random.Random(7)
    documents = [" ".join(dice.choice(words) for _ in range(dice.randint(20, 120))) + "." for _ in range(12)]
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    (folder / "pairs.jsonl").write_text("".join(json.dumps({"prompt": p, "target": t}) + "\n" for p, t in PAIRS))


def commands(given: argparse.Namespace) -> dict[str, list[str]]:
    """What is run, by name."""
    found = all_commands() | vllm_commands() | llamacpp_commands()
    names = given.only or [name for name in found if not name.startswith(tuple(given.without))]
    return {name: found[name] for name in names}


def all_commands() -> dict[str, list[str]]:
    corpus = SHORT[:2]
    found: dict[str, list[str]] = {}
    for method, sizes in METHODS.items():
        for model in (MODEL,) if method in NEEDS_PREFIX else ("table:uniform", MODEL):
            asked = [
                "ppl",
                model,
                *corpus,
                "--num-samples",
                "4" if model == MODEL else "12",
                "--method",
                method,
                *sizes,
            ]
            found[f"ppl-{model.replace(':', '-')}-{method}"] = [*asked, "--out", f"ppl-{model[:5]}-{method}"]
    found["plan"] = ["plan", MODEL, *SHORT]
    found["cached"] = ["ppl", MODEL, "--text", "A run without a folder is kept in the cache."]
    found["prob"] = ["prob", MODEL, "--file", "pairs.jsonl"]
    found["prob-out"] = ["prob", MODEL, "--file", "pairs.jsonl", "--out", "pairs.results.jsonl"]
    found["noise"] = ["paths", MODEL, *SHORT, "--vary", "batch-tokens=96,192"]
    found["reference-table"] = ["reference", "table:uniform", *SHORT, "--out", "reference-table"]
    found["reference"] = ["reference", MODEL, *SHORT, "--out", "reference"]
    found["compare-table"] = ["compare", "table:uniform", "table:uniform", *SHORT, "--out", "compare-table"]
    found["compare-reference"] = ["compare", "reference", MODEL, "--dtype", "bfloat16", "--out", "compare-reference"]
    sides = ["--baseline-dtype", "float32", "--dtype", "bfloat16"]
    found["compare-live"] = ["compare", MODEL, MODEL, *SHORT, *sides, "--out", "compare-live"]
    return found


def vllm_commands() -> dict[str, list[str]]:
    engine = ["--engine", "vllm", "--dtype", "float32"]
    return {
        "vllm-ppl": ["ppl", MODEL, *SHORT, *engine, "--out", "vllm-ppl"],
        "vllm-again": ["ppl", MODEL, *SHORT, *engine, "--out", "vllm-again"],
        "vllm-prob": ["prob", MODEL, "--file", "pairs.jsonl", *engine],
        "vllm-reference": ["reference", MODEL, *SHORT, *engine, "--out", "vllm-reference"],
        "vllm-compare": ["compare", "vllm-reference", MODEL, *engine, "--out", "vllm-compare"],
    }


def llamacpp_commands() -> dict[str, list[str]]:
    """Commands on the embedded model's GGUF file; ``coarse`` has keys in 8 bits, so that two runs of a file differ."""
    threads = ["--threads", "2"]
    coarse = ["--cache-type-k", "q8_0", *threads]
    found = {}
    for method in ("sliding-once", "exl3-2026", "llamacpp", "hf-stride"):
        asked = ["ppl", GGUF, *SHORT[:2], "--num-samples", "4", "--method", method, *METHODS[method], *threads]
        found[f"llamacpp-ppl-{method}"] = [*asked, "--out", f"llamacpp-ppl-{method}"]
    found["llamacpp-coarse"] = ["ppl", GGUF, *SHORT, *coarse, "--out", "llamacpp-coarse"]
    found["llamacpp-prob"] = ["prob", GGUF, "--file", "pairs.jsonl", *threads]
    found["llamacpp-noise"] = ["paths", GGUF, *SHORT, "--vary", "n-ubatch=64,128", *threads]
    found["llamacpp-compare"] = ["compare", "reference", GGUF, *threads, "--out", "llamacpp-compare"]
    kld = ["reference", GGUF, *SHORT[:2], "--context-length", "96", "--max-windows", "3", *threads]
    found["llamacpp-kld"] = [*kld, "--kld", "llamacpp-base.kld"]
    found["llamacpp-compare-kld"] = ["compare", "llamacpp-base.kld", GGUF, *coarse, "--out", "llamacpp-compare-kld"]
    return found


def run(folder: Path, arguments: list[str]) -> Any:
    cache = {"SCOREMODE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-m", "scoremode", *map(with_path, arguments), "--json"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **cache}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout) if done.stdout.strip() else None


def with_path(argument: str) -> str:
    if argument != GGUF:
        return argument
    from scoremode.core.models.embedded import embedded_gguf

    return str(embedded_gguf())


def record(folder: Path, asked: dict[str, list[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    texts(folder)
    for name, arguments in asked.items():
        if (folder / f"{name}.printed.json").exists():
            continue
        printed = run(folder, arguments)
        (folder / f"{name}.printed.json").write_text(json.dumps(printed, indent=1))
        print(f"{name}: recorded", flush=True)


def reopen(folder: Path, asked: dict[str, list[str]]) -> int:
    """Run every command again on the recorded folders: each result must be found, not scored."""
    wrong = 0
    for name, arguments in asked.items():
        if not ({"--out"} & set(arguments) or name == "cached") or name == "prob-out":  # a file of before is refused
            continue
        before = json.loads((folder / f"{name}.printed.json").read_text())
        after = run(folder.resolve(), arguments)
        found = after.get("cached") if isinstance(after, dict) and "cached" in after else None
        differing = [*differences(before, after)]
        wrong += bool(differing) or found is False
        print(f"{name}: {'differs: ' + str(differing[:3]) if differing else 'the same'}, cached: {found}")
    return wrong


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def differences(a: Any, b: Any, at: str = "", allowed: float = 0.0) -> list[str]:
    """What ``a`` has and ``b`` has otherwise; numbers may differ by ``allowed``, relative to those above 1."""
    if isinstance(a, dict) and isinstance(b, dict):
        names = sorted(a.keys() - VOLATILE)
        return [d for n in names for d in differences(a[n], b.get(n, "absent"), f"{at}.{n}", allowed)]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{at}[{i}]", allowed)]
    if isinstance(a, float) and isinstance(b, float) and abs(a - b) <= allowed * max(1.0, abs(a)):
        return []
    return [] if a == b else [f"{at}: {str(a)[:60]} -> {str(b)[:60]}"]


def additions(a: Any, b: Any, at: str = "") -> list[str]:
    """The names of statistics that only ``b`` has."""
    if isinstance(a, dict) and isinstance(b, dict):
        new = [f"{at}.{n}" for n in sorted(b.keys() - a.keys() - VOLATILE)]
        return new + [d for n in sorted(a.keys() & b.keys() - VOLATILE) for d in additions(a[n], b[n], f"{at}.{n}")]
    if isinstance(a, list) and isinstance(b, list):
        return sorted({d for x, y in zip(a, b, strict=False) for d in additions(x, y, f"{at}[]")})
    return []


def columns(folder: Path) -> dict[str, dict[str, Any]]:
    import pyarrow.parquet as pq

    found = {}
    for path in sorted(folder.rglob("scores.parquet")):
        if "cache" not in path.parts:
            table = pq.read_table(path)
            found[str(path.parent.relative_to(folder))] = {n: table.column(n).to_numpy() for n in table.column_names}
    return found


def states(folder: Path) -> dict[str, Any]:
    """Hidden states and heads of references by file and name; base logits as they lie in their file."""
    from safetensors.numpy import load_file

    found: dict[str, Any] = {p.name: np.fromfile(p, np.uint8) for p in folder.glob("*.kld")}
    for path in sorted(folder.glob("*reference*/*.safetensors")):
        found |= {f"{path.relative_to(folder)}:{name}": array for name, array in load_file(path).items()}
    return found


def rerun_noise(one: dict[str, dict[str, Any]]) -> float:
    if "vllm-ppl" not in one:
        return 0.0
    return float(np.abs(one["vllm-ppl"]["logprob"] - one["vllm-again"]["logprob"]).max())


def furthest(a: Any, b: Any) -> float:
    """The largest difference of two arrays of numbers, relative to values above 1; infinite where none can be taken."""
    if a.shape != b.shape or a.dtype.kind != "f" or b.dtype.kind != "f":
        return float("inf")
    apart = np.abs(a.astype(np.float64) - b) / np.maximum(1.0, np.abs(a.astype(np.float64)))
    return float(apart.max(initial=0.0)) if np.array_equal(np.isnan(a), np.isnan(b)) else float("inf")


def compare_arrays(kind: str, one: dict[str, Any], other: dict[str, Any], allowed: float) -> int:
    """Prints how the arrays of one place agree, and returns 1 if they do not."""
    moved = [n for n in one if n not in other or not same(one[n], other[n])]
    far = {n: furthest(one[n], other[n]) if n in other else float("inf") for n in moved}
    wrong = any(f > allowed for f in far.values())
    said = "; ".join(f"{'MOVED' if far[n] > allowed else 'within'} {far[n]:.3g}: {n}" for n in moved[:6])
    new = sorted(other.keys() - one.keys())
    print(f"{kind}: {len(one)} compared, {said or 'equal'}{', new: ' + ', '.join(new[:9]) if new else ''}")
    return int(wrong)


def same(a: Any, b: Any) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f" and b.dtype.kind == "f")


def compare(before: Path, after: Path) -> int:
    one, other, wrong = columns(before), columns(after), 0
    floor = max(rerun_noise(one), rerun_noise(other))
    noisy = max(2 * floor, 1e-5)
    print(f"vLLM's own rerun noise: {floor:.3g} nats; {noisy:.3g} allowed")
    for name in sorted(one):
        allowed = noisy if name.startswith("vllm") else 0.0
        rows = len(one[name].get("logprob", ()))
        wrong += compare_arrays(f"{name}, columns of {rows} targets", one[name], other.get(name, {}), allowed)
    kept, now = states(before), states(after)
    for of, noisy_ones in (("hidden states, heads and base logits", False), ("the same of vLLM", True)):
        mine, theirs = ({n: a for n, a in x.items() if n.startswith("vllm") == noisy_ones} for x in (kept, now))
        wrong += compare_arrays(of, mine, theirs, noisy if noisy_ones else 0.0)
    for path in sorted(before.glob("*.printed.json")):
        a = json.loads(path.read_text())
        b = json.loads((after / path.name).read_text()) if (after / path.name).exists() else "absent"
        found, new = differences(a, b), additions(a, b)
        too_far = differences(a, b, allowed=noisy) if path.name.startswith("vllm") else found
        wrong += bool(too_far)
        said = f"{'MOVED' if too_far else 'within the noise'} {'; '.join((too_far or found)[:4])}" if found else "equal"
        print(f"{path.name}: {said}{', new: ' + ', '.join(new[:9]) if new else ''}")
    print("all equal" if not wrong else f"{wrong} differences")
    return wrong


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare", "open"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--without", nargs="+", choices=("vllm", "llamacpp"), default=[], help="not this engine")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these commands")
    given = parser.parse_args(words)
    if given.what == "record":
        record(given.folders[0], commands(given))
        return 0
    if given.what == "open":
        return min(1, reopen(given.folders[0], commands(given)))
    return min(1, compare(*given.folders))


if __name__ == "__main__":
    raise SystemExit(main())
