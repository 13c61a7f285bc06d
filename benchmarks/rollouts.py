"""Rollouts on vLLM against plain ``generate`` with the same settings, in turns on one engine.

plain      stock vLLM: the same prompts, temperature, filters, seeds and lengths; token ids alone are asked for
rollouts   the writer of ``scoremode rollouts``: both log-probabilities of every token

vLLM's host code runs at a different speed in every process, and its speed drifts. So both ways share an engine (for
``plain``, its sampler is as it was before), take many short turns, and each is first in every other turn; the ratio is
the median of the turns' ratios. All have vLLM's own defaults. Weights are random in the shapes named, or real with
``--model FOLDER``. No text ends before ``--tokens``, and no tokenizer is loaded.

    python benchmarks/rollouts.py [--shapes qwen-0.5b] [--texts 64,256] [--tokens 256] [--repeat 11]
    python benchmarks/rollouts.py --shapes tiny --dtype float32 --texts 3 --tokens 20 --repeat 1        # anywhere
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import parsed_with_child, say, temporary_folder, variant_result, write_config
from vllm_engine import SHAPES, verdict

RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "own": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.95},
}
ENGINES = (("greedy", "own"), ("filtered",))  # rules whose engines are started alike
PROMPT = 32  # tokens
GOAL = 0.95  # × plain


# ── in the child ─────────────────────────────────────────────────────────────────────────────────────────────────────
Write = Callable[[Any], int]
"""Writes one text after each prompt (n, PROMPT), and returns how many tokens it wrote."""


def use_stock_sampler(worker: Any, on: bool) -> str:
    """Runs in vLLM's worker: takes our wrapper away from its sampler, or puts it back. Returns the runner's name."""
    runner = worker.model_runner
    if not hasattr(worker, "wrapped"):
        worker.wrapped, sampler = runner.sampler, runner.sampler
        worker.stock = getattr(sampler, "_stock", sampler)  # the V2 runner's is another object
        worker.ours = {name: vars(worker.stock)[name] for name in ("forward", "sample") if name in vars(worker.stock)}
        worker.modes = "raw_logprobs", getattr(getattr(sampler, "topk_topp_sampler", None), "logprobs_mode", None)
    for name, own in worker.ours.items():
        vars(worker.stock).pop(name, None) if on else vars(worker.stock).update({name: own})
    runner.sampler = worker.stock if on else worker.wrapped
    if worker.modes[1] is not None:
        runner.sampler.topk_topp_sampler.logprobs_mode = worker.modes[0 if on else 1]
    return f"{type(runner).__module__}.{type(runner).__name__}"


def plain(llm: Any, rules: dict[str, Any], tokens: int) -> Write:
    from vllm import SamplingParams

    settings: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False, **rules}

    def write(prompts: Any) -> int:
        params = [SamplingParams(seed=seed, **settings) for seed in range(len(prompts))]
        made = llm.generate([{"prompt_token_ids": row.tolist()} for row in prompts], params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in made)

    return write


def rollouts(writer: Any, tokens: int) -> Write:
    import numpy as np

    from scoremode.studies.rollouts.writing import WritingRequest

    def write(prompts: Any) -> int:
        asked = [WritingRequest(row, seed, tokens) for seed, row in enumerate(prompts)]
        made = writer.write(asked, np.zeros(len(asked), bool), lambda _: None)
        return sum(len(text.ids) for _, text in made)

    return write


def child(names: Sequence[str], model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # a function is sent to vLLM's worker
    import numpy as np

    from scoremode.core.engine.plugin import Work
    from scoremode.engines.vllm.support import VllmOptions
    from scoremode.studies.rollouts.engines.vllm_writer import VllmWriter
    from scoremode.studies.rollouts.writing import DrawingRules

    counts = [int(count) for count in arguments.texts.split(",")]
    given = {
        "dtype": arguments.dtype,
        "max_model_len": PROMPT + arguments.tokens,
        "max_num_seqs": max(counts),
        "load_format": "auto" if arguments.model else "dummy",
        **json.loads(arguments.engine),
    }
    facts: Any = SimpleNamespace(path=Path(model), context_length=None, notes=())
    options = VllmOptions.of({"engine_args": given})
    writer = VllmWriter(facts, options, Work(), DrawingRules(**RULES[names[0]]), frozenset())
    vocabulary = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = np.random.default_rng(1).integers(0, vocabulary, (max(counts), PROMPT), dtype=np.int32)
    found: dict[str, Any] = {}
    for name in names:
        writer.rules = DrawingRules(**RULES[name])
        ways = {
            "plain": plain(writer.llm, RULES[name], arguments.tokens),
            "rollouts": rollouts(writer, arguments.tokens),
        }
        for count in counts:
            rates = take_turns(writer.llm, ways, prompts[:count], arguments)
            found[f"{name} {count}"] = rates
            say(f"{name} {count}: {rates}")
    found["runner"] = writer.llm.collective_rpc(use_stock_sampler, args=(False,))[0]
    return found


def take_turns(llm: Any, ways: dict[str, Write], prompts: Any, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of each way in each turn; a first turn is not counted."""
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(arguments.repeat + 1):
        for way, write in list(ways.items())[:: -1 if turn % 2 else 1]:
            llm.collective_rpc(use_stock_sampler, args=(way == "plain",))
            begin = time.perf_counter()
            written = write(prompts)
            seconds = time.perf_counter() - begin
            assert written == len(prompts) * arguments.tokens, f"{written} tokens were written"
            if turn:
                rates[way].append(written / seconds)
    return rates


# ── in the parent ────────────────────────────────────────────────────────────────────────────────────────────────────
def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    if arguments.child:
        result = child(arguments.child.split(","), arguments.folder, arguments)
        Path(arguments.result).write_text(json.dumps(result), encoding="utf-8")
        return 0
    work, failed, asked = temporary_folder("benchmark"), False, arguments.rules.split(",")
    for shape in ["model"] if arguments.model else arguments.shapes.split(","):
        folder = Path(arguments.model) if arguments.model else write_config(work / shape, SHAPES[shape])
        print(f"\n{shape}, {arguments.dtype}, texts of {arguments.tokens} tokens, median of {arguments.repeat} turns")
        print(f"{'':10} {'texts':>6} {'plain, tokens/s':>16} {'rollouts':>10} {'× plain':>8} {'half of the turns':>18}")
        for names in ENGINES:
            some = [name for name in names if name in asked]
            own = ["--child", ",".join(some), "--folder", str(folder)]
            results = (
                variant_result(", ".join(some), [__file__, *arguments.words, *own], work, arguments) if some else {}
            )
            failed |= "error" in results
            runner = results.pop("runner", None)
            for case, rates in results.items() if "error" not in results else ():
                print_case(case, rates["plain"], rates["rollouts"])
            if runner:
                print(f"{'':10} by {runner}")
    return int(failed)


def print_case(case: str, stock: Sequence[float], ours: Sequence[float]) -> None:
    turns = sorted(b / a for a, b in zip(stock, ours, strict=True))
    ratio, (name, count) = statistics.median(turns), case.split()
    low, _, high = statistics.quantiles(turns * 2, n=4)
    rates = f"{statistics.median(stock):16,.0f} {statistics.median(ours):10,.0f}"
    print(f"{name:10} {count:>6} {rates} {ratio:8.3f} {low:9.3f} to {high:.3f}", verdict(ratio >= GOAL))


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen-0.5b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--model", help="a checkpoint's folder: real weights instead of shapes")
    parser.add_argument("--rules", default=",".join(RULES), help=f"of {', '.join(RULES)}")
    parser.add_argument("--texts", default="64,256", help="numbers of texts that are written side by side")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=11, help="turns of each; one more is not counted")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine", default="{}", help="more arguments of vLLM, as JSON, the same for both")
    parser.add_argument("--timeout", type=float, default=300, help="seconds an engine may take, start included")
    return parsed_with_child(parser, words)


if __name__ == "__main__":
    sys.exit(main())
