"""Every type that llama-quantize writes: llama-perplexity's figures against ours on the same kernels, chunk by chunk.

    python benchmarks/llamacpp_types.py smollm2.gguf text.txt --perplexity CMD --quantize CMD [--imatrix FILE]
    python benchmarks/llamacpp_types.py smollm2.gguf text.txt --perplexity CMD --speed --context 512 --chunks 8

CMD is llama.cpp's own llama-perplexity, linked to the library that scoremode uses: another build of llama.cpp has other
kernels and gives other digits. docs/gguf.md says how to make it. The model is widened first, because most types need
rows of a multiple of 256 weights and SmolLM2 has 576: llama-quantize would quietly use other types.

With ``--speed``, the file is scored as it is by both, in turn, and the CPU seconds of the whole processes are compared:
the same windows, rows and threads. A ratio of 1.10 is allowed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

import scoremode as sm

PLAIN = (
    *("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0"),
    *("IQ4_NL", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "IQ3_XS", "Q2_K", "TQ2_0", "TQ1_0"),
)
WITH_IMATRIX = ("IQ3_XXS", "Q2_K_S", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")
HIDDEN, HEADS, KEY_VALUE_HEADS = 768, 12, 4  # of the widened SmolLM2


def widen(source: Path, target: Path) -> None:
    """SmolLM2 in float32 with a hidden size of 768 and the same logits: see wider.py."""
    reader = GGUFReader(source)
    old = int(reader.fields["llama.embedding_length"].contents())
    shrink = old / HIDDEN
    epsilon = float(reader.fields["llama.attention.layer_norm_rms_epsilon"].contents())
    changed = {
        "llama.embedding_length": HIDDEN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KEY_VALUE_HEADS,
        "llama.attention.layer_norm_rms_epsilon": epsilon * shrink,
    }
    writer = GGUFWriter(target, "llama")
    writer.add_file_type(0)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, changed.get(name, field.contents()), field.types[0], inner)
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if weights.ndim == 1:
            writer.add_tensor(tensor.name, np.pad(weights * math.sqrt(shrink), (0, HIDDEN - old)))
        else:
            rows = {"attn_q": HEADS * 64, "attn_k": KEY_VALUE_HEADS * 64, "attn_v": KEY_VALUE_HEADS * 64}
            kind = tensor.name.split(".")[-2]
            wide = rows.get(kind, HIDDEN if weights.shape[0] == old else weights.shape[0])
            deep = HIDDEN if weights.shape[1] == old else weights.shape[1]
            writer.add_tensor(
                tensor.name, np.pad(weights, ((0, wide - weights.shape[0]), (0, deep - weights.shape[1])))
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_llama_perplexity(command: str, model: Path, text: Path, context: int, chunks: int, *more: str) -> list[str]:
    """The running estimates that it prints, as printed."""
    asked = [*shlex.split(command), "-m", str(model), "-f", str(text), "-c", str(context), "--chunks", str(chunks)]
    made = subprocess.run([*asked, "-fa", "off", *more], capture_output=True, text=True, check=True)
    return re.findall(r"\[\d+\]([\d.]+)", made.stdout)


def by_scoremode(model: Path, text: Path, context: int, chunks: int) -> list[str]:
    run = sm.ppl(str(model), corpus=str(text), method="llamacpp", context_length=context, max_windows=chunks)
    logprob, window = run.scores.logprob, run.facts.window
    return [f"{math.exp(-float(logprob[window <= last].mean())):.4f}" for last in range(chunks)]


def measure(given: Any, folder: Path) -> list[dict[str, Any]]:
    wide = folder / "F32.gguf"
    widen(given.model, wide)
    rows = []
    for kind in given.types or (*PLAIN, *(WITH_IMATRIX if given.imatrix else ())):
        file = wide if kind == "F32" else folder / f"{kind}.gguf"
        if file != wide:
            more = ["--imatrix", str(given.imatrix)] if given.imatrix else []
            command = [*shlex.split(given.quantize), *more, str(wide), str(file), kind]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                rows.append({"type": kind, "problem": "llama-quantize does not write it"})
                print(rows[-1], flush=True)
                continue
        theirs = by_llama_perplexity(given.perplexity, file, given.text, given.context, given.chunks)
        ours = by_scoremode(file, given.text, given.context, given.chunks)
        rows.append({"type": kind, "llama-perplexity": theirs, "scoremode": ours, "equal": ours == theirs})
        print(rows[-1], flush=True)
        if file != wide:
            file.unlink()
    return rows


def compare_speed(given: Any) -> dict[str, Any]:
    """CPU seconds of whole processes, ours and llama-perplexity's in turn, and what each of them found."""
    sizes = ["--context-length", str(given.context), "--max-windows", str(given.chunks)]
    ours = [*shlex.split(given.scoremode), "ppl", str(given.model), "--corpus", str(given.text), "--method", "llamacpp"]
    seconds: dict[str, list[float]] = {"scoremode": [], "llama-perplexity": []}
    for _ in range(given.turns):
        begin = cpu_of_children()
        command = [*ours, *sizes, "--threads", str(given.threads), "--fresh", "--json"]
        made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        between = cpu_of_children()
        theirs = by_llama_perplexity(
            given.perplexity, given.model, given.text, given.context, given.chunks, "-t", str(given.threads)
        )
        seconds["scoremode"].append(between - begin)
        seconds["llama-perplexity"].append(cpu_of_children() - between)
    found = json.loads(made.stdout)
    return {
        "cpu_seconds": seconds,
        "ratio": statistics.median(a / b for a, b in zip(*seconds.values(), strict=True)),
        "perplexity": [f"{found['perplexity']:.4f}", theirs[-1]],
        "kernels": found["engine_settings"]["kernels"],
    }


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--perplexity", required=True, metavar="CMD")
    parser.add_argument("--quantize", metavar="CMD")
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--types", nargs="+", help="F32 Q8_0 … (default: all)")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--scoremode", default=f"{sys.executable} -m scoremode", metavar="CMD")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1)
    given = parser.parse_args(words)
    if given.speed:
        print(json.dumps(compare_speed(given), indent=1))
        return 0
    if not given.quantize:
        parser.error("give --quantize, or --speed")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(given, Path(folder))
    json.dump(rows, sys.stdout, indent=1)
    unequal = [row["type"] for row in rows if not row.get("equal", True)]
    print(f"\n{sum('equal' in row for row in rows)} types, {len(unequal)} unequal {unequal}")
    return 1 if unequal else 0


if __name__ == "__main__":
    raise SystemExit(main())
