"""The options of the engine, and the choice of device, precision, batches and libraries before anything is loaded."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from importlib.metadata import distributions, version
from typing import TYPE_CHECKING

from scoremode.core.engine.options import CheckpointOptions, option
from scoremode.core.installation import pip_install
from scoremode.core.plan.path import DECODE
from scoremode.errors import ModelError, OptionError

if TYPE_CHECKING:
    from scoremode.core.models.facts import ModelFacts

BATCH_TOKENS = {"cpu": 512, "cuda": 16384}  # on a CPU, long windows are scored alone: a larger batch is not faster
LIBRARIES = {  # quant_method -> the packages that Transformers asks for
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel",),
}
CACHE_BITS = {"int8": 8, "int4": 4, "int2": 2}  # bits per element of a quantized K/V cache


@dataclass(frozen=True, slots=True)
class TransformersOptions(CheckpointOptions):
    device: str | None = option("cpu, cuda, cuda:N, or auto for several GPUs")
    batch_tokens: int | None = option("tokens in one forward pass", metavar="N")
    attn_implementation: str | None = option(
        "attention code of Transformers: eager, sdpa, flash_attention_2, … (default: its own choice)", metavar="NAME"
    )
    kv_cache_dtype: str | None = option(
        "type of the K/V cache, with --path decode (default: auto, the model's dtype)",
        choices=("auto", *CACHE_BITS),
        metavar="DTYPE",
        path=DECODE,
        cache_part="kv",
    )
    adapter: str | None = option(
        "folder of a PEFT adapter to put on the model", metavar="FOLDER", in_identity=False, may_vary=False
    )


def chosen_device_and_dtype(options: TransformersOptions, facts: ModelFacts) -> tuple[str, str]:
    """The names of the device and the dtype that a model would use here."""
    device = choose_device(options.device)
    choose_batch_tokens(options.batch_tokens, device)
    return device, choose_dtype(options.dtype, device, facts)


def choose_device(wanted: str | None) -> str:
    if wanted is None:
        count = _cuda_devices()
        return "auto" if count > 1 else "cuda" if count else "cpu"
    kind = wanted.split(":")[0]
    if kind == "cuda" and not _cuda_devices():
        raise OptionError("--device cuda: this machine has no CUDA device", fix="use --device cpu")
    if kind not in ("cpu", "cuda", "auto", "mps", "xpu"):
        raise OptionError(f"--device {wanted} is not known", fix="give cpu, cuda, cuda:N or auto")
    return wanted


def _cuda_devices() -> int:
    """The number of CUDA devices that torch can use: 0, without an import, without CUDA in torch or a driver here."""
    if "torch" not in sys.modules and (version("torch").endswith("+cpu") or not _has_a_driver()):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_a_driver() -> bool:
    """May this machine have a GPU that torch calls a CUDA device? It needs NVIDIA's driver, or AMD's."""
    if sys.platform != "linux" or os.path.exists("/dev/kfd"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def choose_batch_tokens(wanted: int | None, kind: str) -> int:
    if wanted is not None and wanted < 1:
        raise OptionError(f"--batch-tokens {wanted} leaves no batch", fix="give 1 or more")
    return wanted if wanted is not None else BATCH_TOKENS.get(kind, 4096)


def choose_dtype(wanted: str | None, device: str, facts: ModelFacts) -> str:
    if wanted is not None and wanted != "auto":
        return wanted
    if device == "cpu" and "quantization_config" not in facts.config:
        return "float32"  # on a CPU, half precision is slow and adds rounding that serving on a GPU does not have
    return "auto"


def require_quantization_library(facts: ModelFacts) -> None:
    """Refuse a checkpoint whose quantization needs a package that is not installed."""
    quantization = facts.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    missing = [name for name in LIBRARIES.get(str(method), ()) if not any(distributions(name=name))]
    if missing:
        raise ModelError(
            f"{facts.name} is quantized with {method}, and Transformers needs {' and '.join(missing)} for that",
            fix=pip_install("quantized"),
        )


def require_cache_library(options: TransformersOptions) -> None:
    """Refuse a quantized K/V cache if the package that quantizes it is not installed."""
    if options.kv_cache_dtype in CACHE_BITS and not any(distributions(name="hqq")):
        raise OptionError(f"--kv-cache-dtype {options.kv_cache_dtype} needs the package 'hqq'", fix=pip_install("hqq"))
