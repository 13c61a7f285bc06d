"""The MLX engine against ``mlx_lm.perplexity``, on the same windows and in one process.

    python benchmarks/mlx_engine.py MODEL [--context 512] [--windows 8] [--repeat 3]

The two take turns, so that both meet the same state of the machine. Theirs computes a batch of windows at once and
gives one perplexity; ours computes one window at a time and gives every column of every token.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from common import own_windows, score_all

from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.text.corpus import load


def measure(model: str, corpus: str, context: int, count: int, repeat: int) -> dict[str, Any]:
    import mlx.core as mx

    chosen = choose(model, "mlx")
    engines = {head: open_engine(choose(model, "mlx", {"head": head}), Work()) for head in ("exact", "as-served")}
    from mlx_lm.perplexity import eval_ppl
    from mlx_lm.utils import load_model

    assert chosen.subject.checkpoint is not None
    theirs, _ = load_model(chosen.subject.checkpoint.path)
    text = "\n\n".join(load(corpus).texts())[: 12 * context * count]
    ids = chosen.subject.tokenizer.encode(text, special=False).ids[: context * count].reshape(-1, context)
    source, batch = own_windows(ids), mx.array(ids.astype(np.int32))

    def by_mlx_lm() -> float:
        with contextlib.redirect_stdout(io.StringIO()):
            return float(eval_ppl(theirs, batch, min(8, count))[0])

    def by_scoremode(head: str) -> float:
        answers = score_all(engines[head], source)
        return math.exp(-float(np.concatenate([one.logprob for one in answers]).mean()))

    ways: dict[str, Callable[[], float]] = {"mlx_lm.perplexity": by_mlx_lm}
    ways |= {head: partial(by_scoremode, head) for head in engines}
    found: dict[str, Any] = {"facts": engines["exact"].facts.versions, "targets": int(ids.size - len(ids))}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    peaks, perplexity = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    for _ in range(repeat):
        for name, way in ways.items():
            mx.reset_peak_memory()
            before, begin = mx.get_active_memory(), time.perf_counter()
            perplexity[name] = way()
            taken[name].append(time.perf_counter() - begin)
            peaks[name] = max(peaks[name], mx.get_peak_memory() - before)
    for name in ways:
        seconds = statistics.median(taken[name])
        found[name] = {"seconds": seconds, "perplexity": perplexity[name], "mlx_peak_mb": peaks[name] / 1e6}
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--corpus", default="python-docs")
    for name, usual in (("context", 512), ("windows", 8), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args(words)
    found = measure(given.model, given.corpus, given.context, given.windows, given.repeat)
    print("\n".join(f"{name:20} {found[name]}" for name in found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
