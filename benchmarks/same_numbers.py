"""Do all numbers stay the same? 29 commands, run before and after a change, compared bit for bit.

    python benchmarks/same_numbers.py record before/     # keeps the runs, references, caches and printed figures
    python benchmarks/same_numbers.py record after/
    python benchmarks/same_numbers.py compare before/ after/
    python benchmarks/same_numbers.py open before/       # folders of an earlier version still open, with equal numbers

Plan digests, every column of every target and every printed statistic must be equal. vLLM's batches, and so its
scores, vary from run to run: they may differ by the largest difference between two passes of ``before``.
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
VOLATILE = {"seconds", "tokens_per_second", "run", "reference", "cached", "versions", "seal", "hardware", "out"}
PAIRS = [("The capital of France is", " Paris"), ("The capital of Fran", "ce is Paris"), ("2 + 2 =", " 4")]


def texts(folder: Path) -> None:
    """Twelve documents of made-up prose: the same on every machine, and not part of any version."""
    words = [
        "the",
        "model",
        "reads",
        "a",
        "long",
        "text",
        "and",
        "gives",
        "every",
        "token",
        "its",
        "own",
        "probability",
        "before",
        "it",
        "sees",
        "what",
        "follows",
    ]
    dice = random.Random(7)
    documents = [" ".join(dice.choice(words) for _ in range(dice.randint(20, 120))) + "." for _ in range(12)]
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    (folder / "pairs.jsonl").write_text("".join(json.dumps({"prompt": p, "target": t}) + "\n" for p, t in PAIRS))


def commands(given: argparse.Namespace) -> dict[str, list[str]]:
    """What is run, by name."""
    found = all_commands(not given.no_vllm)
    return {name: found[name] for name in given.only or found}


def all_commands(vllm: bool) -> dict[str, list[str]]:
    corpus = ["--corpus", "documents.jsonl"]
    short = [*corpus, "--num-samples", "5", "--context-length", "96", "--stride", "48"]
    found: dict[str, list[str]] = {}
    for method, sizes in METHODS.items():
        for model in (MODEL,) if method in NEEDS_PREFIX else ("table:uniform", MODEL):
            asked = [
                "ppl",
                model,
                *corpus,
                "--num-samples",
                "12" if model != MODEL else "4",
                "--method",
                method,
                *sizes,
            ]
            found[f"ppl-{model.replace(':', '-')}-{method}"] = [*asked, "--out", f"ppl-{model[:5]}-{method}"]
    found["plan"] = ["plan", MODEL, *short]
    found["cached"] = ["ppl", MODEL, "--text", "A run without a folder is kept in the cache."]
    found["prob"] = ["prob", MODEL, "--file", "pairs.jsonl"]
    found["prob-out"] = ["prob", MODEL, "--file", "pairs.jsonl", "--out", "pairs.results.jsonl"]
    found["noise"] = ["noise", MODEL, *short, "--vary", "batch-tokens=96,192"]
    found["reference-table"] = ["reference", "table:uniform", *short, "--out", "reference-table"]
    found["reference"] = ["reference", MODEL, *short, "--out", "reference"]
    found["compare-table"] = ["compare", "table:uniform", "table:uniform", *short, "--out", "compare-table"]
    found["compare-reference"] = ["compare", "reference", MODEL, "--dtype", "bfloat16", "--out", "compare-reference"]
    sides = ["--baseline-dtype", "float32", "--dtype", "bfloat16"]
    found["compare-live"] = ["compare", MODEL, MODEL, *short, *sides, "--out", "compare-live"]
    if vllm:
        engine = ["--engine", "vllm", "--dtype", "float32"]
        found["vllm-ppl"] = ["ppl", MODEL, *short, *engine, "--out", "vllm-ppl"]
        found["vllm-again"] = ["ppl", MODEL, *short, *engine, "--out", "vllm-again"]
        found["vllm-prob"] = ["prob", MODEL, "--file", "pairs.jsonl", *engine]
        found["vllm-reference"] = ["reference", MODEL, *short, *engine, "--out", "vllm-reference"]
        found["vllm-compare"] = ["compare", "vllm-reference", MODEL, *engine, "--out", "vllm-compare"]
    return found


def run(folder: Path, arguments: list[str]) -> Any:
    cache = {"SCOREMODE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-m", "scoremode", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **cache}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout) if done.stdout.strip() else None


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
        if not ({"--out"} & set(arguments) or name == "cached"):
            continue
        before = json.loads((folder / f"{name}.printed.json").read_text())
        after = run(folder.resolve(), arguments)
        found = after.get("cached") if isinstance(after, dict) and "cached" in after else None
        differing = [*differences(before, after)]
        wrong += bool(differing) or found is False
        print(f"{name}: {'differs: ' + str(differing[:3]) if differing else 'the same'}, cached: {found}")
    return wrong


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def differences(a: Any, b: Any, at: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        names = sorted((a.keys() | b.keys()) - VOLATILE)
        return [d for n in names for d in differences(a.get(n, "absent"), b.get(n, "absent"), f"{at}.{n}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{at}[{i}]")]
    return [] if a == b else [f"{at}: {str(a)[:60]} -> {str(b)[:60]}"]


def columns(folder: Path) -> dict[str, dict[str, Any]]:
    import pyarrow.parquet as pq

    found = {}
    for path in sorted(folder.rglob("scores.parquet")):
        if "cache" not in path.parts:
            table = pq.read_table(path)
            found[str(path.parent.relative_to(folder))] = {n: table.column(n).to_numpy() for n in table.column_names}
    return found


def states(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.glob("reference*/*.safetensors")}


def rerun_noise(one: dict[str, dict[str, Any]]) -> float:
    if "vllm-ppl" not in one:
        return 0.0
    return float(np.abs(one["vllm-ppl"]["logprob"] - one["vllm-again"]["logprob"]).max())


def compare(before: Path, after: Path) -> int:
    one, other, wrong = columns(before), columns(after), 0
    floor = max(rerun_noise(one), rerun_noise(other))
    print(f"vLLM's own rerun noise: {floor:.3g} nats")
    for name in sorted(one.keys() | other.keys()):
        a, b = one.get(name, {}), other.get(name, {})
        moved = [n for n in sorted(a.keys() | b.keys()) if n not in a or n not in b or not np.array_equal(a[n], b[n])]
        if name.startswith("vllm") and moved and a.keys() == b.keys() and len(a["logprob"]) == len(b["logprob"]):
            largest = float(np.abs(a["logprob"] - b["logprob"]).max())
            print(f"{name}: within {largest:.3g} nats of before, in {', '.join(moved)}")
            wrong += largest > max(2 * floor, 1e-5)
            continue
        wrong += bool(moved)
        rows = len(a.get("logprob", ()))
        print(f"{name}: {rows} targets, {len(a)} columns, {'MOVED ' + ', '.join(moved) if moved else 'equal'}")
    kept, now = states(before), states(after)
    wrong += kept != now
    print(f"{len(kept)} files of hidden states and heads: {'equal' if kept == now else 'MOVED'}")
    for path in sorted(before.glob("*.printed.json")):
        found = differences(json.loads(path.read_text()), json.loads((after / path.name).read_text()))
        if path.name.startswith("vllm"):
            found = [d for d in found if "digest" in d]
        wrong += bool(found)
        print(f"{path.name}: {'equal' if not found else 'MOVED ' + '; '.join(found[:4])}")
    print("all equal" if not wrong else f"{wrong} differences")
    return wrong


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare", "open"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--no-vllm", action="store_true")
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
