"""Our model of lm-evaluation-harness against the harness's own backends: same tasks, same rows, one process each.

hf            the harness's own HF backend
transformers  ours, on the Transformers engine
stock-vllm    the harness's own vLLM backend
vllm          ours, on the vLLM engine

Tasks are the harness's own, on local rows (``--task-data``: arc_easy_validation*.jsonl and the like). Requests are made
once per process by the harness, and only ``loglikelihood`` is timed: from texts to answers, tokenizing included. The
model is loaded before, and a first pass over a few requests is not timed. Few-shot examples come from the same rows:
what they say does not matter here, only how long contexts become.

``ratio`` is of requests/s; in parentheses of the process's CPU time, which other work on the machine does not change.
``host MiB`` is how much the peak of the process's memory grew while all requests were answered, and next to it the
same for a quarter of them: a backend whose memory does not depend on the number of requests has two equal numbers.

    python benchmarks/harness.py MODEL --task-data DIR --tasks arc_easy,hellaswag --num-fewshot 5 --limit 50
    python benchmarks/harness.py MODEL --task-data DIR --backends stock-vllm,vllm --dtype bfloat16 --limit 1000
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import parsed_with_child, peak_mib, temporary_folder, variant_result

PAIRS = {"transformers": "hf", "vllm": "stock-vllm"}  # ours -> what a user would use instead
TARGET = 3.0  # × requests/s on four-choice tasks with long contexts
SPLITS = ("validation", "test", "train")
WARM_UP = 8  # requests


# ── in the child ─────────────────────────────────────────────────────────────────────────────────────────────────────
def load_tasks(names: list[str], folder: Path, fewshot: int) -> dict[str, Any]:
    """The harness's own tasks with the rows of local files instead of those on the hub."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    found = {}
    for name in names:
        files = sorted(folder.glob(f"{name}*.jsonl"))
        if not files:
            raise SystemExit(f"{folder} has no rows for {name}")
        split = next(s for s in SPLITS if s in files[0].name)
        wanted: dict[str, Any] = {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(files[0])}},
            "num_fewshot": fewshot,
            "fewshot_split": split if fewshot else None,
            **{f"{s}_split" if s != "train" else "training_split": split if s == split else None for s in SPLITS},
        }
        entry = manager.task_index[name]
        found[name] = manager._factory.build(entry, overrides=wanted, registry=manager.task_index)
    return found


def make_requests(task: Any, limit: int) -> list[Any]:
    task.set_fewshot_seed(1234)  # every process asks the same
    task.build_all_requests(limit=limit, rank=0, world_size=1)
    return list(task.instances)


def open_backend(asked: argparse.Namespace) -> Any:
    dtype, size, longest = asked.dtype, asked.batch_size, asked.max_length
    if asked.child == "hf":
        from lm_eval.models.huggingface import HFLM

        return HFLM(pretrained=asked.model, dtype=dtype, batch_size=size, device=asked.device, max_length=longest)
    if asked.child == "stock-vllm":
        from lm_eval.models.vllm_causallms import VLLM

        return VLLM(pretrained=asked.model, dtype=dtype, batch_size="auto", max_model_len=longest)
    from scoremode.studies.tasks.model import ScoremodeLM

    return ScoremodeLM(pretrained=asked.model, engine=asked.child, dtype=dtype, max_length=longest)


def tokens_of(lm: Any, text: str) -> int:
    return len(lm.encoder.text(text) if hasattr(lm, "encoder") else lm.tok_encode(text))


def time_task(lm: Any, task: Any, limit: int) -> dict[str, Any]:
    requests = make_requests(task, limit)
    lm.loglikelihood(requests[-WARM_UP:])
    before = peak_mib()
    lm.loglikelihood(requests[: len(requests) // 4])
    quarter = peak_mib() - before
    begun, begun_cpu = time.perf_counter(), time.process_time()
    answers = lm.loglikelihood(requests)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
    lengths = [tokens_of(lm, request.args[0]) for request in requests[:: max(1, len(requests) // 50)]]
    return {
        "requests": len(requests),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "context_tokens": sum(lengths) / len(lengths),
        "host_mib_quarter": quarter,
        "host_mib": peak_mib() - before,
        "tokens": [tokens_of(lm, "".join(r.args)) - tokens_of(lm, r.args[0].rstrip()) for r in requests],
        "answers": [[float(value), bool(greedy)] for value, greedy in answers],
        "accuracy": accuracy(task, requests, answers),
    }


def accuracy(task: Any, requests: list[Any], answers: Any) -> dict[str, float]:
    """The task's own metrics, as the harness averages them."""
    by_document: dict[int, list[Any]] = {}
    for request, answer in zip(requests, answers, strict=True):
        by_document.setdefault(request.doc_id, []).append(answer)
    documents = dict(task.doc_iterator(rank=0, limit=None, world_size=1))
    totals: dict[str, list[float]] = {}
    for number, found in by_document.items():
        for name, value in task.process_results(documents[number], found).items():
            if isinstance(value, int | float):
                totals.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in totals.items() if name in ("acc", "acc_norm")}


def child(asked: argparse.Namespace) -> None:
    tasks = load_tasks(asked.tasks.split(","), Path(asked.task_data), asked.num_fewshot)
    lm = open_backend(asked)
    found = {name: time_task(lm, task, asked.limit) for name, task in tasks.items()}
    Path(asked.result).write_text(json.dumps(found), encoding="utf-8")


# ── in the parent ────────────────────────────────────────────────────────────────────────────────────────────────────
def run_backends(asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    folder = temporary_folder("harness")
    found = {}
    for backend in asked.backends.split(","):
        command = [__file__, *asked.words, "--child", backend]
        result = variant_result(backend, command, folder, asked, SCOREMODE_CACHE=str(folder / "cache"))
        if "error" not in result:
            found[backend] = result
    return found


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    pairs = list(zip(ours["answers"], theirs["answers"], strict=True))
    apart = [abs(a[0] - b[0]) for a, b in pairs]
    a_token = max(d / n for d, n in zip(apart, ours["tokens"], strict=True))
    flags = sum(a[1] != b[1] for a, b in pairs)
    return f"largest |Δ| {max(apart):.2g} nats of an answer, {a_token:.2g} per token; {flags} greedy flags differ"


def show(found: dict[str, dict[str, Any]]) -> None:
    print(
        f"{'task':<12} {'backend':<13} {'requests':>8} {'context':>8} {'req/s':>9} {'ratio':>13} {'host MiB':>15}  acc"
    )
    for task in next(iter(found.values())):
        for backend, results in found.items():
            row = results[task]
            rate = row["requests"] / row["seconds"]
            other = found.get(PAIRS.get(backend, ""), {}).get(task)
            ratio = "" if other is None else f"{rate * other['seconds'] / other['requests']:.2f}"
            memory = f"{row['host_mib_quarter']:.0f} / {row['host_mib']:.0f}"
            acc = ", ".join(f"{name} {value:.4f}" for name, value in row["accuracy"].items())
            if other is not None and backend == "transformers":
                ratio += f" ({other['cpu_seconds'] / row['cpu_seconds']:.2f})"
            print(
                f"{task:<12} {backend:<13} {row['requests']:>8} {row['context_tokens']:>8.0f} {rate:>9.1f} "
                f"{ratio:>13} {memory:>15}  {acc}"
            )
            if other is not None:
                print(f"{'':<12} {differences(row, other)}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task-data", required=True)
    parser.add_argument("--tasks", default="arc_easy,hellaswag,piqa,winogrande")
    parser.add_argument("--backends", default="hf,transformers")
    parser.add_argument("--num-fewshot", type=int, default=5)
    parser.add_argument("--limit", type=int, default=50, help="documents of each task")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", help="of the HF backend")
    parser.add_argument("--batch-size", default="8", help="of the HF backend")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--timeout", type=float, default=3000)
    asked = parsed_with_child(parser, words)
    if asked.child:
        child(asked)
        return 0
    found = run_backends(asked)
    if not found:
        raise SystemExit("no backend finished")
    show(found)
    return 0


if __name__ == "__main__":
    code = main()
    if "--child" in sys.argv:  # threads of vLLM and of datasets end badly when the interpreter does
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
