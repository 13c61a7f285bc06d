"""Rollouts on vLLM against plain ``generate`` with the same settings, each in a fresh process.

plain      stock vLLM: the same prompts, temperature, filters, seeds and lengths; token ids alone are asked for
rollouts   the writer of ``scoremode rollouts``: both log-probabilities of every token

All have vLLM's own defaults. Weights are random in the shapes named, or real with ``--model FOLDER``. No text ends
before ``--tokens``, and no tokenizer is loaded.

    python benchmarks/rollouts.py [--shapes qwen-0.5b] [--texts 64,256] [--tokens 512] [--repeat 3]
    python benchmarks/rollouts.py --shapes tiny --dtype float32 --texts 3 --tokens 20 --repeat 1        # anywhere
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import child_result, last_lines, parsed_with_child, say, temporary_folder, write_config
from vllm_engine import SHAPES, verdict

RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "own": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.95},
}
PROMPT = 32  # tokens
GOAL = 0.95  # × plain


# ── in the child ─────────────────────────────────────────────────────────────────────────────────────────────────────
Write = Callable[[Any], int]
"""Writes one text after each prompt (n, PROMPT), and returns how many tokens it wrote."""


def plain(model: str, given: dict[str, Any], rules: dict[str, Any], tokens: int) -> Write:
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, skip_tokenizer_init=True, enable_prefix_caching=False, **given)
    settings: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False, **rules}

    def write(prompts: Any) -> int:
        params = [SamplingParams(seed=seed, **settings) for seed in range(len(prompts))]
        made = llm.generate([{"prompt_token_ids": row.tolist()} for row in prompts], params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in made)

    return write


def rollouts(model: str, given: dict[str, Any], rules: dict[str, Any], tokens: int) -> Write:
    import numpy as np

    from scoremode.engines.plugin import Work
    from scoremode.engines.vllm.support import VllmOptions
    from scoremode.engines.vllm.writer import VllmWriter
    from scoremode.engines.writing import DrawingRules, WritingRequest

    facts: Any = SimpleNamespace(path=Path(model), context_length=None, notes=())
    options = VllmOptions.of({"engine_args": given})
    writer = VllmWriter(facts, options, Work(), DrawingRules(**rules), frozenset())

    def write(prompts: Any) -> int:
        asked = [WritingRequest(row, seed, tokens) for seed, row in enumerate(prompts)]
        made = writer.write(asked, np.zeros(len(asked), bool), lambda _: None)
        return sum(len(text.ids) for _, text in made)

    return write


def child(variant: str, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    import numpy as np

    counts = [int(count) for count in arguments.texts.split(",")]
    given = {
        "dtype": arguments.dtype,
        "max_model_len": PROMPT + arguments.tokens,
        "max_num_seqs": max(counts),
        "load_format": "auto" if arguments.model else "dummy",
        **json.loads(arguments.engine),
    }
    way, _, rules = variant.partition(" ")
    write = {"plain": plain, "rollouts": rollouts}[way](model, given, RULES[rules], arguments.tokens)
    vocabulary = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    prompts = np.random.default_rng(1).integers(0, vocabulary, (max(counts), PROMPT), dtype=np.int32)
    found = {}
    for count in counts:
        write(prompts[:count])  # not counted
        rates = []
        for _ in range(arguments.repeat):
            begin = time.perf_counter()
            written = write(prompts[:count])
            rates.append(written / (time.perf_counter() - begin))
        assert written == count * arguments.tokens, f"{written} tokens were written"
        found[str(count)] = statistics.median(rates)
        say(f"{variant} {count}: {found[str(count)]:,.0f} tokens/s")
    return found


# ── in the parent ────────────────────────────────────────────────────────────────────────────────────────────────────
def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    if arguments.child:
        result = child(arguments.child, arguments.folder, arguments)
        Path(arguments.result).write_text(json.dumps(result), encoding="utf-8")
        return 0
    work, failed = temporary_folder("benchmark"), False
    for shape in ["model"] if arguments.model else arguments.shapes.split(","):
        folder = Path(arguments.model) if arguments.model else write_config(work / shape, SHAPES[shape])
        print(f"\n{shape}, {arguments.dtype}, texts of {arguments.tokens} tokens")
        print(f"{'':10} {'texts':>6} {'plain, tokens/s':>16} {'rollouts':>10} {'× plain':>8}")
        for rules in arguments.rules.split(","):
            stock, ours = (measure(f"{way} {rules}", folder, work, arguments) for way in ("plain", "rollouts"))
            failed |= stock is None or ours is None
            for count in (stock or {}).keys() & (ours or {}).keys():
                rates = stock[count], ours[count]  # type: ignore[index]
                ratio = rates[1] / rates[0]
                print(f"{rules:10} {count:>6} {rates[0]:16,.0f} {rates[1]:10,.0f} {ratio:8.3f}", verdict(ratio >= GOAL))
    return int(failed)


def measure(variant: str, folder: Path, work: Path, arguments: argparse.Namespace) -> dict[str, float] | None:
    own = ["--child", variant, "--folder", str(folder)]
    found, why = child_result([__file__, *arguments.words, *own], work, arguments.timeout)
    if found is None:
        say(f"{variant} FAILED: {why}")
        say(last_lines(work / "log.txt", 15))
        return None
    return dict(found)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen-0.5b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--model", help="a checkpoint's folder: real weights instead of shapes")
    parser.add_argument("--rules", default=",".join(RULES), help=f"of {', '.join(RULES)}")
    parser.add_argument("--texts", default="64,256", help="numbers of texts that are written side by side")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine", default="{}", help="more arguments of vLLM, as JSON, the same for both")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a variant may take, start included")
    return parsed_with_child(parser, words)


if __name__ == "__main__":
    sys.exit(main())
