"""Comparisons that look real without a model: the text of python-docs, and scores drawn from a seeded generator.

``python -m tests.reports.demo report.html`` writes such a report; ``--formats`` writes one with ten candidates in three
formats.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.core.scores.columns import Divergences, Scores, TargetFacts
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store.run import Run
from scoremode.core.text import corpus
from scoremode.reports.html.page import render

PIECES = re.compile(r"\s?[^\W\d_]{1,7}|\d{1,3}|\n+|\s?[^\w\s]{1,3}|\s+|_")
SIZES = {"Q8_0": (8.5, 0.004), "Q4_K_M": (4.85, 0.09), "Q2_K": (3.35, 0.5)}  # bits per weight, how far scores move


def pieces(count: int) -> tuple[list[str], list[int]]:
    """Tokens of python-docs and the document of each; the text is repeated if it is too short."""
    words: list[str] = []
    documents: list[int] = []
    number = 0
    while len(words) < count:
        for text in corpus.load("python-docs").texts():
            found = PIECES.findall(text)
            words += found
            documents += [number] * len(found)
            number += 1
            if len(words) >= count:
                break
    return words[:count], documents[:count]


def make_facts(words: Sequence[str], documents: Sequence[int], context: int = 512) -> TargetFacts:
    n = len(words)
    token = np.arange(1, n + 1)
    text = np.array([*words, None], dtype=object)[:-1]
    return TargetFacts(
        window=(token - 1) // context,
        document=np.asarray(documents, dtype=np.int64),
        token=token,
        id=np.array([hash_id(w) for w in words], dtype=np.int32),
        byte_len=np.array([len(w.encode("utf-8", "replace")) for w in words], dtype=np.int32),
        word_starts=np.array([w[:1].isspace() for w in words], dtype=np.int32),
        group=np.asarray(documents, dtype=np.int64),
        weight=np.ones(n),
        text=text,
        top_text=text,
    )


def hash_id(word: str) -> int:
    return int.from_bytes(hashlib.sha256(word.encode("utf-8", "replace")).digest()[:2], "big")


def stored(value: float, stderr: float, n: int) -> dict[str, Any]:
    """An estimate as a manifest keeps it."""
    bounds = {"low": value - 2.2 * stderr, "high": value + 2.2 * stderr}
    return {"value": value, "stderr": stderr, "n": n, "groups": 12, "freedom": 11.0, **bounds}


def make_run(facts: TargetFacts, logprob: Any, seed: int, **manifest: Any) -> Run:
    n = len(facts.token)
    chance = np.random.default_rng(seed)
    rank = np.where(logprob > -0.9, 1, 1 + np.floor(np.exp(np.minimum(9.5, -logprob * chance.uniform(0.5, 1, n)))))
    top_logprob = np.where(rank == 1, logprob, np.maximum(logprob, -chance.exponential(0.9, n)))
    other = chance.permutation(n)
    top_text = np.where(rank == 1, facts.text, facts.text[other])
    top = np.where(rank == 1, facts.id, facts.id[other])
    scores = Scores(logprob, rank.astype(np.int64), -logprob * 0.9, top, top_logprob)
    own = TargetFacts(**{name: getattr(facts, name) for name in facts.__slots__} | {"top_text": top_text})
    nll = float(-np.mean(logprob)) if n else 0.0
    known = {
        "metrics": {
            "perplexity": stored(float(np.exp(nll)), 0.31, n),
            "mean_nll": stored(nll, 0.02, n),
            "bits_per_byte": stored(0.871, 0.013, n),
            "top1_accuracy": stored(0.483, 0.014, n),
        },
        "model": "smollm2-135m",
        "model_fingerprint": "5f1c" * 16,
        "engine": "transformers",
        "versions": {"scoremode": "0.1.0", "torch": "2.13.0", "transformers": "5.19.0", "python": "3.11.7"},
        "dtype": "bfloat16",
        "device": "cuda",
        "head": "exact-fp32",
        "engine_settings": {"head_kernel": "fused-triton", "batch_tokens": 8192},
        "hardware": {"machine": "x86_64", "processor": "AMD EPYC 9654", "system": "Linux"},
        "method": "sliding-once",
        "stderr_groups": "documents",
        "method_settings": {"context_length": 2048, "stride": 512},
        "notes": ["stride 512"],
        "corpus": "python-docs",
        "corpus_sha256": "31a44d4e" * 8,
        "corpus_bytes": 40805,
        "tokenizer": "9be2" * 16,
        "targets": n,
        "tokens": n + 1,
        "coverage": 1.0,
        "forward_tokens": n + 1,
        "plan_digest": "27fefac7135b2437" * 4,
        "windows": int(facts.window.max()) + 1 if n else 0,
        "seconds": 41.7,
        "tokens_per_second": 9876.5,
    }
    return Run("27fefac7135b2437" * 4, scores, own, {**known, **manifest}, f"runs/{seed}")


def base_logprob(n: int, seed: int = 1) -> Any:
    chance = np.random.default_rng(seed)
    return -np.where(chance.random(n) < 0.45, chance.exponential(0.15, n), chance.gamma(1.6, 2.1, n))


def make_comparison(
    name: str,
    baseline: Run,
    seed: int,
    moved: float | None = None,
    served: Mapping[str, Any] | None = None,
    **manifest: Any,
) -> Comparison:
    """``served`` goes into the manifest of the candidate's run, ``manifest`` into that of the comparison."""
    n = len(baseline.scores)
    bits, spread = SIZES.get(name, (4.5, 0.1)) if moved is None else (4.5, moved)
    chance = np.random.default_rng(seed)
    size = spread * chance.lognormal(-1.2, 1.3, n) * np.minimum(1.0, 0.15 - baseline.scores.logprob / 3)
    move = size * chance.standard_normal(n) - size * 0.25
    logprob = np.minimum(-1e-4, baseline.scores.logprob + move)
    kl = 0.4 * size**2 + 0.02 * size * chance.exponential(1.0, n)
    noise = 1e-5 * chance.lognormal(-1.5, 1.6, min(n, 4000))
    model = f"{baseline.manifest['model']}-{name}"
    candidate = make_run(baseline.facts, logprob, seed, **{"model": model, "dtype": "float16", **(served or {})})
    facts = {
        "command": f"scoremode compare smollm2-135m {model} --corpus python-docs --context-length 2048 --stride 512",
        "bits_per_weight": bits,
        "bytes": int(bits / 8 * 134_515_008),
        **manifest,
    }
    apart = Divergences(kl=kl)
    return Comparison(name, baseline, candidate, baseline.facts.group, np.ones(n), apart, noise, facts)


def with_statistics(comparison: Comparison, **changes: Any) -> Comparison:
    """A comparison as if some of its statistics were others."""
    found = replace(comparison)
    vars(found)["_statistics"] = comparison.statistics() | changes
    return found


def make_baseline(count: int, **manifest: Any) -> Run:
    words, documents = pieces(count)
    return make_run(make_facts(words, documents), base_logprob(count), 1, **manifest)


def make_demo(count: int = 12_000, names: Sequence[str] = tuple(SIZES)) -> list[Comparison]:
    baseline = make_baseline(count)
    return [make_comparison(name, baseline, seed) for seed, name in enumerate(names, start=2)]


LLAMA = {"engine": "llamacpp", "versions": {"scoremode": "0.1.0", "llamacpp": "b6910"}, "device": "cpu"}
EXLLAMA = {"engine": "exllamav3", "versions": {"scoremode": "0.1.0", "exllamav3": "0.0.7"}, "dtype": "float16"}
VLLM = {"engine": "vllm", "versions": {"scoremode": "0.1.0", "vllm": "0.32.0"}, "dtype": "bfloat16"}
FORMATS: tuple[tuple[str, str, float, float, dict[str, Any]], ...] = (  # name, format, bits per weight, how far, engine
    ("Qwen3-4B-Instruct-2507-Q8_0.gguf", "GGUF Q8_0", 8.51, 0.02, LLAMA),
    ("Qwen3-4B-Instruct-2507-Q6_K.gguf", "GGUF Q6_K", 6.57, 0.05, LLAMA),
    ("Qwen3-4B-Instruct-2507-Q4_K_M.gguf", "GGUF Q4_K_M", 4.96, 0.12, LLAMA),
    ("Qwen3-4B-Instruct-2507-IQ4_XS.gguf", "GGUF IQ4_XS", 4.52, 0.15, LLAMA),
    ("Qwen3-4B-Instruct-2507-Q2_K.gguf", "GGUF Q2_K", 3.31, 0.55, LLAMA),
    ("Qwen3-4B-Instruct-2507-exl3-6.0bpw", "EXL3 6.0 bpw", 6.35, 0.04, EXLLAMA),
    ("Qwen3-4B-Instruct-2507-exl3-4.0bpw", "EXL3 4.0 bpw", 4.55, 0.11, EXLLAMA),
    ("Qwen3-4B-Instruct-2507-exl3-3.0bpw", "EXL3 3.0 bpw", 3.66, 0.26, EXLLAMA),
    ("Qwen3-4B-Instruct-2507-W8A8", "compressed-tensors W8A8", 8.85, 0.09, VLLM),
    ("Qwen3-4B-Instruct-2507-W4A16", "compressed-tensors W4A16", 5.66, 0.17, VLLM),
)


def make_formats(count: int = 3000) -> list[Comparison]:
    """Ten candidates in three formats, each by the engine that serves it."""
    baseline = make_baseline(
        count, model_format="safetensors bfloat16", bits_per_weight=16.0, weight_bytes=8_044_982_272
    )
    made = []
    for seed, (name, kind, bits, moved, engine) in enumerate(FORMATS, start=2):
        body, embedding = 3_633_511_936, 388_956_160
        sizes = {"body": {"bytes": int(body * (bits - 0.2) / 8), "weights": body}}
        sizes["embedding"] = {"bytes": int(embedding * (bits + 1.87) / 8), "weights": embedding}
        facts = {"bits_per_weight": bits, "bytes": int(bits / 8 * (body + embedding)), "sizes": sizes}
        made.append(make_comparison(name, baseline, seed, moved, {"model_format": kind, **engine}, **facts))
    return made


def write(path: Path, page: str) -> Path:
    path.write_text(page)
    return path


if __name__ == "__main__":
    make = make_formats if "--formats" in sys.argv else make_demo
    counts = [int(word) for word in sys.argv[2:] if word.isdecimal()]
    print(write(Path(sys.argv[1]), render(make(counts[0] if counts else 12_000))))
