"""The decode path on vLLM against plain ``generate`` of the same lengths and batch, each in a fresh process.

plain      stock vLLM: one prompt token, then as many generated tokens as a text has; greedy, nothing else asked
replay     texts forced token by token, every column of each token; exact head
as-served  the same, from the logits that the sampler sees
against    replay, and replay with KL to a reference of the same texts, in one process

All have vLLM's own defaults: its runner, CUDA graphs, compilation, scheduling. Weights are random in the shapes named,
or real with ``--model FOLDER``. No tokenizer is loaded, and prefix caching is off.

``step MiB`` is the peak of a pass above the idle engine; the extra memory is what replay has more than plain.

    python benchmarks/decode.py [--shapes qwen-0.5b,llama-8b] [--sequences 64,256] [--tokens 512] [--repeat 3]
    python benchmarks/decode.py --shapes tiny --dtype float32 --sequences 3 --tokens 40 --repeat 1        # anywhere
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from common import own_windows, parsed_with_child, say, score_all
from vllm_engine import SHAPES, Against, run_shapes, verdict

VARIANTS = ("plain", "replay", "as-served", "against")
GOALS = {"replay": 0.85, "against with KL": 0.75}  # × plain
MEMORY_GOAL = 256  # MiB more than plain


# ── in the child ─────────────────────────────────────────────────────────────────────────────────────────────────────
class Plain:
    def __init__(self, model: str, arguments: dict[str, Any], sequences: int, _: str) -> None:
        from vllm import LLM

        off: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
        self.llm = LLM(model=model, max_num_seqs=sequences, **off, **arguments)

    def prepare(self, ids: Any) -> None:
        """Nothing is needed."""

    def run(self, ids: Any) -> Any:
        from vllm import SamplingParams

        given = {"temperature": 0.0, "max_tokens": ids.shape[1], "ignore_eos": True, "detokenize": False}
        prompts = [{"prompt_token_ids": row[:1].tolist()} for row in ids]
        return self.llm.generate(prompts, SamplingParams(**given), use_tqdm=False)

    def close(self) -> None:
        """The process ends now."""


class Replayed(Against):
    """Both scoring alone and against a reference, with one engine; see ``Against`` for the reference."""

    def __init__(self, model: str, arguments: dict[str, Any], sequences: int, head: Any) -> None:
        from scoremode.core.plan.path import DecodePath
        from scoremode.engines.vllm.decode import VllmDecodeEngine
        from scoremode.engines.vllm.support import LaunchArguments

        taken = LaunchArguments.named(arguments, head=head, path=DecodePath(sequences))
        self.engine = VllmDecodeEngine(model, taken)
        self.llm = self.engine.llm
        say(f"head: {self.engine.facts.head}; {self.engine.facts.settings}")

    def alone(self, ids: Any) -> Any:
        return score_all(self.engine, own_windows(ids))


def step_memory(worker: Any, *, begins: bool) -> float:
    """Runs in vLLM's worker: the MiB of a pass at its peak, above what was allocated when it began."""
    import torch

    torch.cuda.synchronize()
    if begins:
        torch.cuda.reset_peak_memory_stats()
        worker.scoremode_before = torch.cuda.memory_allocated()
    return float(torch.cuda.max_memory_allocated() - worker.scoremode_before) / 2**20


def child(variant: str, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    import numpy as np

    counts = [int(count) for count in arguments.sequences.split(",")]
    given: dict[str, Any] = {
        "dtype": arguments.dtype,
        "max_model_len": arguments.tokens + 16,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "load_format": "auto" if arguments.model else "dummy",
        **json.loads(arguments.engine),
    }
    head = "as-served" if variant == "as-served" else "exact"
    contender: Any = (Plain if variant == "plain" else Replayed)(model, given, max(counts), head)
    found: dict[str, Any] = {}
    vocabulary = int(contender.llm.llm_engine.vllm_config.model_config.get_vocab_size())
    random = np.random.default_rng(1)
    ids = random.integers(0, vocabulary, (max(counts), arguments.tokens), dtype=np.int32)
    passes: dict[str, Callable[[Any], Any]] = {"": contender.run}
    if variant != "plain":
        passes = {"": contender.alone}
    if variant == "against":
        contender.prepare(ids)
        passes[" with KL"] = contender.run
    for count in counts:
        for name, run in passes.items():
            found[f"{count}{name}"] = timed(contender.llm, run, ids[:count], arguments.repeat)
            say(f"{variant} {count}{name}: {found[f'{count}{name}']}")
    contender.close()
    return found


def timed(llm: Any, run: Callable[[Any], Any], ids: Any, repeat: int) -> dict[str, float]:
    """The median rate of some passes after one that is not counted, and on a GPU the memory of one more."""
    import torch

    run(ids[:, : max(2, ids.shape[1] // 4)])
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run(ids)
        seconds.append(time.perf_counter() - begin)
    memory = 0.0
    if torch.cuda.is_available():
        llm.collective_rpc(step_memory, kwargs={"begins": True})
        run(ids)
        (memory,) = llm.collective_rpc(step_memory, kwargs={"begins": False})
    return {"tokens_per_second": ids.size / statistics.median(seconds), "step_mib": memory}


# ── in the parent ────────────────────────────────────────────────────────────────────────────────────────────────────
def main(words: Sequence[str] | None = None) -> int:
    # a function of this file runs in the worker
    return run_shapes(__file__, parse(words), child, report, VLLM_ALLOW_INSECURE_SERIALIZATION="1")


def report(shape: str, results: dict[str, Any], arguments: argparse.Namespace) -> None:
    print(f"\n{shape}, {arguments.dtype}, texts of {arguments.tokens} tokens, one of each prefilled")
    print(f"{'':16} {'sequences':>9} {'tokens/s':>10} {'× plain':>8} {'step MiB':>9} {'extra MiB':>9}")
    for name, found in results.items():
        if "error" in found:
            print(f"{name:16} failed: {found['error']}")
            continue
        for run, one in found.items():
            count, _, kl = run.partition(" ")
            plain = results.get("plain", {}).get(count)
            ratio = one["tokens_per_second"] / plain["tokens_per_second"] if plain else None
            extra = one["step_mib"] - plain["step_mib"] if plain else None
            label = f"{name} with KL" if kl else "replay" if name == "against" else name
            figures = f"{one['tokens_per_second']:10,.0f} {show(ratio, '.3f'):>8} {one['step_mib']:9.0f}"
            print(f"{label:16} {count:>9} {figures} {show(extra, '.0f'):>9}", judged(label, ratio, extra))
    sys.stdout.flush()


def judged(name: str, ratio: float | None, extra: float | None) -> str:
    goal = GOALS.get(name)
    if goal is None or ratio is None or extra is None:
        return ""
    return f"wanted {goal}: {verdict(ratio >= goal)}; below {MEMORY_GOAL} MiB: {verdict(extra < MEMORY_GOAL)}"


def show(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen-0.5b,llama-8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--model", help="a checkpoint's folder: real weights instead of shapes")
    parser.add_argument("--variants", default="plain,as-served,against", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--sequences", default="64,256")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine", default="{}", help="more arguments of vLLM, as JSON, the same for all")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8)
    parser.add_argument("--timeout", type=float, default=300, help="seconds a variant may take, start included")
    parser.add_argument("--shape", help=argparse.SUPPRESS)  # of a child
    return parsed_with_child(parser, words)


if __name__ == "__main__":
    sys.exit(main())
