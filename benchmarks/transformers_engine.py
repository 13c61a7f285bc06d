"""The Transformers engine against what a user would write instead, on the same windows, each in a fresh process.

body      the model without its head: no way of scoring can be faster
matmul    hidden @ weight.T, once, result discarded: the lowest possible cost of a head
labels    model(ids, labels=ids): mean loss only
naive     log_softmax(model(ids).logits.float()) + gather: logprob only
scoremode every column: logprob, rank, entropy, top token and its logprob

    python benchmarks/transformers_engine.py [--context 2048] [--windows 2] [--repeat 3]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import own_windows, parsed_with_child, peak_mib, score_all, temporary_folder, variant_result

VARIANTS = ("body", "matmul", "labels", "naive", "scoremode")


def prepare(model_name: str, context: int, windows: int) -> tuple[Any, Any]:
    """The engine, and the windows as ids (windows, context)."""
    import numpy as np

    from scoremode.core.engine.registry import choose
    from scoremode.core.text.corpus import load
    from scoremode.engines.transformers.choices import TransformersOptions
    from scoremode.engines.transformers.engine import TransformersEngine

    subject = choose(model_name).subject
    assert subject.checkpoint is not None
    text = "\n\n".join(load("python-docs").texts())[: 8 * context * windows]
    ids = subject.tokenizer.encode(text, special=False).ids[: context * windows]
    engine = TransformersEngine.load(subject.checkpoint, TransformersOptions(batch_tokens=context))
    return engine, np.asarray(ids).reshape(windows, context)


def way(variant: str, engine: Any, ids: Any) -> Callable[[], float]:
    """One pass over all windows, as a function; its return value keeps the work from being skipped."""
    import numpy as np
    import torch

    rows = [torch.from_numpy(row.astype(np.int64))[None] for row in ids]
    hidden = torch.randn(ids.shape[1], engine.model.config.hidden_size)
    weight = engine.model.get_output_embeddings().weight

    def body() -> float:
        return sum(float(engine.body(input_ids=row, use_cache=False).last_hidden_state[0, -1, 0]) for row in rows)

    def matmul() -> float:
        return sum(float((hidden @ weight.T)[0, 0]) for _ in rows)

    def labels() -> float:
        return sum(float(engine.model(row, labels=row, use_cache=False).loss) for row in rows)

    def naive() -> float:
        total = 0.0
        for row in rows:
            logp = torch.log_softmax(engine.model(row, use_cache=False).logits[0, :-1].float(), dim=-1)
            total += float(logp.gather(1, row[0, 1:, None]).sum())
        return total

    def scoremode() -> float:
        return sum(float(answers.logprob.sum()) for answers in score_all(engine, own_windows(ids)))

    found: dict[str, Callable[[], float]] = dict(zip(VARIANTS, (body, matmul, labels, naive, scoremode), strict=True))
    return found[variant]


def child(variant: str, arguments: argparse.Namespace) -> dict[str, float]:
    import torch

    engine, ids = prepare(arguments.model, arguments.context, arguments.windows)
    loaded = peak_mib()
    with torch.inference_mode():
        run = way(variant, engine, ids)
        run()  # warm up
        seconds = []
        for _ in range(arguments.repeat):
            begin = time.perf_counter()
            answer = run()
            seconds.append(time.perf_counter() - begin)
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "extra_peak_mib": peak_mib() - loaded,
        "answer": answer,
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds a variant may take")
    arguments = parsed_with_child(parser, words)
    if arguments.child:
        Path(arguments.result).write_text(json.dumps(child(arguments.child, arguments)))
        return 0
    results, work = {}, temporary_folder("benchmark")
    for variant in VARIANTS:
        command = [__file__, *arguments.words, "--child", variant]
        results[variant] = variant_result(variant, command, work, arguments)
        if "error" in results[variant]:
            return 1
    report(arguments, results)
    return 0


def report(arguments: argparse.Namespace, results: dict[str, dict[str, float]]) -> None:
    floor = results["body"]["seconds"] + results["matmul"]["seconds"]
    tokens = arguments.context * arguments.windows
    import torch
    import transformers

    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, ", end="")
    print(
        f"transformers {transformers.__version__}, {arguments.model}, {arguments.windows} × {arguments.context} tokens"
    )
    print(f"{'':10} {'seconds':>8} {'tokens/s':>9} {'× (body + matmul)':>18} {'extra peak MiB':>15}")
    for name in VARIANTS:
        r = results[name]
        ratio = f"{r['seconds'] / floor:18.3f}"
        print(f"{name:10} {r['seconds']:8.2f} {tokens / r['seconds']:9.0f} {ratio} {r['extra_peak_mib']:15.0f}")


if __name__ == "__main__":
    sys.exit(main())
