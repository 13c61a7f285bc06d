"""Engines for served formats against the code that serves them, on the same windows and in one process.

llamacpp    llama.cpp decodes the windows with all logits switched on, and nothing is read from them
exllamav3   ``model.forward`` of the same windows, and ExLlamaV3's own way to a perplexity
server      see server_engine.py

    python benchmarks/formats.py MODEL [--context 512] [--windows 8] [--repeat 5]

The two ways take turns, so that both meet the same state of the machine. A ratio of 1.10 is allowed.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from common import own_windows, peak_mib, score_all

from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import ChosenEngine, choose, open_engine
from scoremode.core.scores.answers import WindowList
from scoremode.core.text.corpus import load


def windows_of(chosen: ChosenEngine, corpus: str, context: int, count: int) -> WindowList:
    """Disjoint windows of which every token but the first is a target."""
    text = "\n\n".join(load(corpus).texts())[: 12 * context * count]
    return own_windows(chosen.subject.tokenizer.encode(text, special=False).ids[: context * count].reshape(-1, context))


def bare_llamacpp(engine: Any, source: WindowList) -> Callable[[], None]:
    """Every window from an empty cache, all logits on, nothing read."""
    every = np.arange(len(source.window(0).ids), dtype=np.int32)

    def run() -> None:
        for window in source.items:
            for first in range(0, len(window.ids), engine.at_once):
                part = window.ids[first : first + engine.at_once]
                engine._decode(part, first, every[: len(part)])

    return run


def bare_exllamav3(engine: Any, source: WindowList) -> Callable[[], None]:
    import torch

    def run() -> None:
        for window in source.items:
            ids = torch.from_numpy(window.ids.astype(np.int64))[None]
            engine.model.forward(ids, {"attn_mode": "flash_attn_nc"})
        torch.cuda.synchronize()

    return run


def perplexity_by_exllamav3(engine: Any, source: WindowList) -> float:
    """As ExLlamaV3's evaluation script computes it: log-softmax of its logits, mean over all targets."""
    import torch

    total = count = 0.0
    for window in source.items:
        ids = torch.from_numpy(window.ids.astype(np.int64))[None]
        logits = engine.model.forward(ids, {"attn_mode": "flash_attn_nc"})[0, :-1, : engine.vocabulary].float()
        logp = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:, None].to(logits.device))
        total, count = total - float(logp.sum()), count + len(logp)
    return math.exp(total / count)


BARE = {"llamacpp": bare_llamacpp, "exllamav3": bare_exllamav3}


def scoremode_perplexity(engine: Any, source: WindowList) -> float:
    return math.exp(-float(np.concatenate([answers.logprob for answers in score_all(engine, source)]).mean()))


def measure(model: str, corpus: str, context: int, count: int, repeat: int) -> dict[str, Any]:
    chosen = choose(model)
    source = windows_of(chosen, corpus, context, count)
    engine = open_engine(chosen, Work(longest=context))
    bare = BARE[engine.facts.engine](engine, source)
    bare()  # once, to warm up
    perplexity = scoremode_perplexity(engine, source)
    taken: dict[str, list[float]] = {"bare": [], "scoremode": []}
    for _ in range(repeat):
        for name, way in (("bare", bare), ("scoremode", lambda: scoremode_perplexity(engine, source))):
            begin = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - begin)
    seconds = {name: statistics.median(times) for name, times in taken.items()}
    ratios = [mine / theirs for mine, theirs in zip(taken["scoremode"], taken["bare"], strict=True)]
    found = {
        "engine": engine.facts.engine,
        "versions": engine.facts.versions,
        "kernels": engine.facts.settings.get("kernels"),
        "device": engine.facts.device,
        "machine": platform.machine(),
        "windows": len(source),
        "context": context,
        "tokens": len(source) * context,
        "seconds": seconds,
        "tokens_per_second": len(source) * context / seconds["scoremode"],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "batch_of_logits_mb": context * engine.facts.known_vocabulary * 4 / 1e6,
        "peak_mib": peak_mib(),
        "perplexity": perplexity,
    }
    if engine.facts.engine == "exllamav3":
        own = perplexity_by_exllamav3(engine, source)
        found |= {"perplexity_by_exllamav3": own, "relative_difference": perplexity / own - 1}
    engine.close()
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--corpus", default="python-docs")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args(words)
    found = measure(given.model, given.corpus, given.context, given.windows, given.repeat)
    for name, value in found.items():
        print(f"{name:24} {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
