"""Flags that several verbs share, under the names that people of this field know."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from typing import TYPE_CHECKING, Any

from scoremode.errors import OptionError
from scoremode.text import json_files

if TYPE_CHECKING:
    from scoremode.engines.base import EngineOptions

QUESTION = (
    "corpus",
    "text",
    "method",
    "context_length",
    "stride",
    "max_windows",
    "num_samples",
    "document_tokens",
    "field",
    "dataset",
    "dataset_config",
    "split",
    "assistant_only",
    "tokenizer",
)
ENGINE = (
    "dtype",
    "device",
    "batch_tokens",
    "head",
    "head_kernel",
    "quantization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "max_num_batched_tokens",
    "max_model_len",
    "enforce_eager",
    "allow_untested_vllm",
    "trust_remote_code",
)


def integer(text: str) -> int:
    """A whole number in plain digits, for argparse: not ``1e3``, ``' 5'`` or ``1_000``."""
    if not re.fullmatch(r"[+-]?[0-9]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"'{_cut(text)}' is not a whole number, as in 512")
    if len(text) > 18:
        raise argparse.ArgumentTypeError(f"{_cut(text)} is too large")
    return int(text)


def count(text: str) -> int:
    """A number that is not negative, for argparse."""
    value = integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def share(text: str) -> float:
    """A number above 0 and up to 1, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"'{_cut(text)}' is not a number above 0 and up to 1, as in 0.9")
    return value


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="smollm2-135m, a checkpoint folder, or a name on the hub")


def add_question(parser: argparse.ArgumentParser) -> None:
    text = parser.add_argument_group("text")
    text.add_argument(
        "--corpus",
        nargs="+",
        action="extend",
        metavar="NAME-or-FILE",
        help="wikitext2, wikitext2:FILE, python-docs, files (.txt .md .jsonl .parquet), or - for stdin; one or several",
    )
    text.add_argument("--text", help="a text given here")
    text.add_argument("--dataset", metavar="NAME", help="a dataset on the Hugging Face hub")
    text.add_argument("--dataset-config", metavar="CONFIG")
    text.add_argument("--split", help="of the dataset (default: test)")
    text.add_argument("--field", help="of .jsonl or .parquet rows (default: text, or messages)")
    text.add_argument(
        "--num-samples", type=integer, metavar="N", help="only the first N rows (of one plain text: lines)"
    )
    text.add_argument("--document-tokens", type=integer, metavar="N", help="only the first N tokens of each document")
    text.add_argument("--assistant-only", action="store_true", help="of chat rows, score the assistant's tokens alone")
    rule = parser.add_argument_group("method")
    rule.add_argument("--method", default="sliding-once", help="see scoremode methods (default: sliding-once)")
    rule.add_argument("--context-length", type=integer, metavar="N", help="tokens per window (default: the method's)")
    rule.add_argument("--stride", type=integer, metavar="N", help="tokens between windows (default: the method's)")
    rule.add_argument("--max-windows", type=integer, metavar="N", help="0 for all (default: the method's own limit)")


def add_engine(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--engine", help="see scoremode engines (default: the one that fits the model)")
    engine.add_argument("--tokenizer", metavar="FOLDER", help="another tokenizer than the model's own")
    engine.add_argument("--dtype", help="float32, bfloat16, float16, float64 or auto (default: auto; float32 on a CPU)")
    engine.add_argument("--device", help="cpu, cuda, cuda:N, or auto for several GPUs")
    engine.add_argument("--batch-tokens", type=integer, metavar="N", help="tokens in one forward pass")
    engine.add_argument("--head", choices=("exact", "as-served"), help="logits in float32, or as the model rounds them")
    engine.add_argument(
        "--head-kernel",
        metavar="NAME",
        help="fused, rows, blocked or plain (default: the fastest that passes its self-test)",
    )
    engine.add_argument(
        "--trust-remote-code", action="store_true", help="execute Python code shipped with the model; off unless given"
    )


def add_vllm(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine vllm", "under vLLM's own names; None is vLLM's own choice")
    engine.add_argument("--quantization", metavar="NAME", help="the method, if the checkpoint does not declare one")
    engine.add_argument("--tensor-parallel-size", type=integer, metavar="N")
    engine.add_argument("--pipeline-parallel-size", type=integer, metavar="N")
    engine.add_argument("--gpu-memory-utilization", type=share, metavar="SHARE")
    engine.add_argument("--kv-cache-dtype", metavar="DTYPE", help="as in fp8")
    engine.add_argument("--max-num-batched-tokens", type=integer, metavar="N", help="tokens in one forward pass")
    engine.add_argument("--max-model-len", type=integer, metavar="N", help="default: the longest window of the plan")
    engine.add_argument("--enforce-eager", action="store_true", default=None, help="no CUDA graphs, no compilation")
    engine.add_argument("--engine-arg", action="append", metavar="NAME=VALUE", help="any other argument of vllm.LLM")
    engine.add_argument("--allow-untested-vllm", action="store_true", default=None)


def engine_arg(text: str) -> tuple[str, Any]:
    """``name=value``, the value read as JSON where it is JSON."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise OptionError(f"--engine-arg {text} is not NAME=VALUE", fix="as in --engine-arg max_num_seqs=64")
    try:
        return name, json_files.parse(value)
    except ValueError:
        return name, value


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the facts for machines, and nothing else")


def question(parsed: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(parsed, name) for name in QUESTION}


def engine_options(parsed: argparse.Namespace) -> EngineOptions:
    from scoremode.engines.base import EngineOptions

    given = {name: getattr(parsed, name) for name in ENGINE}
    more = tuple(engine_arg(text) for text in parsed.engine_arg or ()) or None
    return EngineOptions(**{**given, "trust_remote_code": given["trust_remote_code"] or None, "engine_args": more})


def print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=1, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def print_parts(parts: list[Any]) -> None:
    from scoremode.report.terminal.console import console

    out = console()
    for part in parts:
        out.print(part)
