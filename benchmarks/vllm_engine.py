"""Score mode on vLLM against what stock vLLM offers, on the same prompts, each in a fresh process.

plain      generate one token, no log-probabilities: no way of scoring can be faster
logprobs0  prompt_logprobs=0: log-probability and rank of each prompt token
ours       every column: logprob, rank, entropy, top token and its logprob; exact head
against    like ours, plus KL to a reference of the same prompts, made by the same engine; × ours in the same process

Weights are random (``load_format=dummy``) in the shapes named, or real with ``--model FOLDER``. No tokenizer is loaded,
so no variant spends time on decoding text. Prefix caching is off, and so is compilation.

``scoring MiB`` is what the scoring call itself allocates at its peak, measured inside the worker in a pass that is not
timed; ``step MiB`` is the peak of whole steps above the idle engine (layers included).

    python benchmarks/vllm_engine.py [--shapes llama-8b,llama-8b-w4a16,qwen-0.5b] [--variants …] [--repeat 3]
    python benchmarks/vllm_engine.py --shapes tiny --dtype float32 --context 256 --prompts 8        # anywhere
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import (
    PROBE,
    llama_shape,
    own_windows,
    parsed_with_child,
    say,
    score_all,
    temporary_folder,
    variant_result,
    write_config,
)

from scoremode.core.engine.base import Wanted
from scoremode.core.engine.baseline import states_in
from scoremode.core.scores.answers import measured

VARIANTS = ("plain", "logprobs0", "ours", "against")
PARAMETERS: dict[str, dict[str, Any]] = {"plain": {}, "logprobs0": {"prompt_logprobs": 0}}
LLAMA: dict[str, Any] = {
    **llama_shape((4096, 14336, 32, 32, 8, 128256)),
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16"},
    **{"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "bos_token_id": 1, "eos_token_id": 2},
}
FOUR_BITS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
GROUP = {"targets": ["Linear"], "weights": FOUR_BITS, "input_activations": None, "output_activations": None}
W4A16 = {
    **{"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"},
    **{"ignore": ["lm_head"], "config_groups": {"group_0": GROUP}},
}
QWEN = {
    **LLAMA,
    **llama_shape((896, 4864, 24, 14, 2, 151936), tied=True),
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
}
TINY = LLAMA | llama_shape((256, 512, 2, 4, 2, 8003))
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA,
    "llama-8b-w4a16": LLAMA | {"quantization_config": W4A16},
    "qwen-0.5b": QWEN,
    "tiny": TINY,
}
PROMPTS = {"qwen-0.5b": 256, "tiny": 8}  # else 64
TARGETS = {"llama-8b": 0.93, "llama-8b-w4a16": 0.93, "qwen-0.5b": 0.82}  # × plain prefill, on an H200
STOCK_TARGETS = {"qwen-0.5b": 3.1}  # × logprobs0
AGAINST_TARGET = 1.3  # × the time of scoring alone
MEMORY_TARGET = 256  # MiB for scoring


# ── in the child ─────────────────────────────────────────────────────────────────────────────────────────────────────
class Contender:
    """One variant, ready to score."""

    llm: Any

    def prepare(self, ids: Any) -> None:
        """Prepare what is needed before the first pass."""

    def run(self, ids: Any) -> Any:
        """One pass over prompts (n, context); returns what a caller would get."""
        raise NotImplementedError

    def mean_logprob(self, result: Any, ids: Any) -> float | None:
        """Mean over the first prompts, to show that the variants agree. Not timed."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the engine."""


class Stock(Contender):
    def __init__(self, model: str, arguments: dict[str, Any], variant: str) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(model=model, skip_tokenizer_init=True, enable_prefix_caching=False, **arguments)
        self.params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **PARAMETERS[variant])

    def run(self, ids: Any) -> Any:
        prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
        return self.llm.generate(prompts, self.params, use_tqdm=False)

    def mean_logprob(self, result: Any, ids: Any) -> float | None:
        if self.params.prompt_logprobs is None:
            return None
        return statistics.fmean(
            output.prompt_logprobs[i][int(row[i])].logprob
            for output, row in zip(result[:2], ids[:2], strict=True)
            for i in range(1, len(row))
        )


class Ours(Contender):
    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        from scoremode.engines.vllm.engine import VllmEngine
        from scoremode.engines.vllm.support import LaunchArguments

        self.engine = VllmEngine(model, LaunchArguments.named(arguments))
        self.llm = self.engine.llm
        say(f"head: {self.engine.facts.head}")

    def run(self, ids: Any) -> Any:
        return score_all(self.engine, own_windows(ids))

    def mean_logprob(self, result: Any, ids: Any) -> float | None:
        return statistics.fmean(float(answers.logprob.mean()) for answers in result[:2])

    def close(self) -> None:
        self.engine.close()


class Against(Ours):
    """The engine as its own baseline: measures the work of a comparison; the divergence does not matter."""

    def prepare(self, ids: Any) -> None:
        import numpy as np

        from scoremode.core.engine.baseline import stored_states
        from scoremode.core.references.writer import StatesWriter

        a_prompt = ids.shape[1] - 1
        head = self.engine.stored_head()
        folder = temporary_folder("reference") / "reference"
        facts = dict.fromkeys(("plan_digest", "method", "model_fingerprint", "tokenizer"), "benchmark")
        shape: dict[str, Any] = {
            "targets": len(ids) * a_prompt,
            "width": head.weight.shape[1],
            "dtype": self.engine.facts.dtype,
        }
        with StatesWriter(folder, **shape, identity={}) as writer:
            begin = time.perf_counter()
            for i, answers in self.engine.score(own_windows(ids), np.zeros(len(ids), np.bool_), Wanted(states=True)):
                writer.write(i * a_prompt, states_in(answers))
            say(f"states kept at {ids.size / (time.perf_counter() - begin):,.0f} tokens/s")
            shape_of_logits: dict[str, Any] = {
                "scale": head.scale,
                "softcap": head.softcap,
                "vocabulary": head.vocabulary,
            }
            writer.write_head(head.weight, head.bias, **shape_of_logits)
            stored = writer.finish({**facts, "engine": {}})
        self.baseline = stored_states(stored, np.arange(len(ids) + 1) * a_prompt)

    def run(self, ids: Any) -> Any:
        return score_all(self.engine, own_windows(ids), Wanted(against=self.baseline))

    def mean_logprob(self, result: Any, ids: Any) -> float | None:
        largest = max(float(abs(measured(answers.kl)).max()) for answers in result)
        say(f"largest KL of the model to itself: {largest:.2g}")
        return super().mean_logprob(result, ids)


def child(variant: str, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    import numpy as np

    engine_arguments: dict[str, Any] = {
        "dtype": arguments.dtype,
        "enforce_eager": True,
        "max_model_len": arguments.context + 16,
        "max_num_batched_tokens": arguments.batch_tokens,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "load_format": "auto" if arguments.model else "dummy",
        "worker_extension_cls": PROBE,
    }
    ours = {"ours": Ours, "against": Against}.get(variant)
    contender = ours(model, engine_arguments) if ours else Stock(model, engine_arguments, variant)
    vocabulary = int(contender.llm.llm_engine.vllm_config.model_config.get_vocab_size())
    random, prompts = np.random.default_rng(1), arguments.prompts or PROMPTS.get(arguments.shape, 64)
    ids = random.integers(0, vocabulary, (prompts, arguments.context), dtype=np.int32)
    warm = ids[: max(1, prompts // 4)]
    contender.prepare(ids)
    contender.run(warm)
    times, result = time_passes(contender, ids, arguments.repeat)
    seconds, alone = times["seconds"], times["alone"]
    memory: dict[str, float] = {}
    if all(contender.llm.collective_rpc("scoremode_meter_begin")):
        contender.run(warm)
        memory = contender.llm.collective_rpc("scoremode_meter_end")[0]
    found = {
        "tokens_per_second": ids.size / statistics.median(seconds),
        "mean_logprob": contender.mean_logprob(result, ids),
        "x_alone": statistics.median(seconds) / statistics.median(alone) if alone else None,
        **memory,
    }
    contender.close()
    return found


def time_passes(contender: Contender, ids: Any, repeat: int) -> tuple[dict[str, list[float]], Any]:
    """The time of each pass, and the result of the last one; for a comparison, also of scoring alone."""
    times: dict[str, list[float]] = {"seconds": [], "alone": []}
    result: Any = None
    for _ in range(repeat):
        result = None  # the results of the last pass must not be freed while the next one is timed
        begin = time.perf_counter()
        result = contender.run(ids)
        times["seconds"].append(time.perf_counter() - begin)
        if isinstance(contender, Against):
            begin = time.perf_counter()
            Ours.run(contender, ids)
            times["alone"].append(time.perf_counter() - begin)
    return times, result


# ── in the parent ────────────────────────────────────────────────────────────────────────────────────────────────────
def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    if not arguments.child:
        check_names(arguments)
    return run_shapes(__file__, arguments, child, report)


def run_shapes(
    script: str, arguments: argparse.Namespace, child: Callable[..., Any], report: Callable[..., None], **changes: str
) -> int:
    """All variants of all shapes, each in a process of its own: this one, if it is such a child."""
    if arguments.child:
        result = child(arguments.child, arguments.folder, arguments)
        Path(arguments.result).write_text(json.dumps(result), encoding="utf-8")
        return 0
    work, failed = temporary_folder("benchmark"), False
    for shape in ["model"] if arguments.model else arguments.shapes.split(","):
        folder = Path(arguments.model) if arguments.model else write_config(work / shape, SHAPES[shape])
        results = {}
        for variant in arguments.variants.split(","):
            command = [script, *arguments.words, "--child", variant, "--folder", str(folder), "--shape", shape]
            results[variant] = variant_result(f"{shape} {variant}", command, work, arguments, **changes)
            failed |= "error" in results[variant]
        report(shape, results, arguments)
    return int(failed)


def check_names(arguments: argparse.Namespace) -> None:
    shapes = [] if arguments.model else arguments.shapes.split(",")
    for names, choices in ((shapes, (*SHAPES,)), (arguments.variants.split(","), VARIANTS)):
        for name in names:
            if name not in choices:
                sys.exit(f"error: {name} is not known: one of {', '.join(choices)}")


def report(shape: str, results: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    plain = results.get("plain", {}).get("tokens_per_second")
    print(f"\n{shape}, {arguments.dtype}, prompts of {arguments.context} tokens, {arguments.batch_tokens} per batch")
    print(f"{'':10} {'tokens/s':>10} {'× plain':>8} {'scoring MiB':>12} {'step MiB':>9} {'mean logp':>10}")
    show: Callable[[Any, str], str] = lambda value, form: "-" if value is None else format(value, form)  # noqa: E731
    for name, r in results.items():
        if "error" in r:
            print(f"{name:10} failed: {r['error']}")
            continue
        ratio = r["tokens_per_second"] / plain if plain else None
        memory = f"{show(r.get('scoring_mib'), '.0f'):>12} {show(r.get('step_mib'), '.0f'):>9}"
        print(
            f"{name:10} {r['tokens_per_second']:10,.0f} {show(ratio, '.3f'):>8} "
            f"{memory} {show(r['mean_logprob'], '.4f'):>10}"
        )
    ours, stock = results.get("ours", {}), results.get("logprobs0", {})
    if shape in STOCK_TARGETS and "tokens_per_second" in ours and "tokens_per_second" in stock:
        ratio = ours["tokens_per_second"] / stock["tokens_per_second"]
        print(f"ours: {ratio:.2f} × logprobs0, wanted {STOCK_TARGETS[shape]}: {verdict(ratio >= STOCK_TARGETS[shape])}")
    if ratio := results.get("against", {}).get("x_alone"):
        print(f"against: {ratio:.3f} × alone, wanted at most {AGAINST_TARGET}: {verdict(ratio <= AGAINST_TARGET)}")
    if shape in TARGETS and plain and "tokens_per_second" in ours:
        ratio, memory_used = ours["tokens_per_second"] / plain, ours.get("scoring_mib")
        print(f"ours: {ratio:.3f} × plain, wanted {TARGETS[shape]}: {verdict(ratio >= TARGETS[shape])}")
        if memory_used is not None:
            reached = verdict(memory_used < MEMORY_TARGET)
            print(f"ours: {memory_used:.0f} MiB for scoring, wanted below {MEMORY_TARGET}: {reached}")
    sys.stdout.flush()


def verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-8b,llama-8b-w4a16,qwen-0.5b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--model", help="a checkpoint's folder: real weights instead of shapes")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=0, help="a pass; 0: by shape")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="max_num_batched_tokens, the same for all")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--timeout", type=float, default=240, help="seconds a variant may take, start included")
    parser.add_argument("--shape", default="tiny", help=argparse.SUPPRESS)  # of a child
    return parsed_with_child(parser, words)


if __name__ == "__main__":
    sys.exit(main())
