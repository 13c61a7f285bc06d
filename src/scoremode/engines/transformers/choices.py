"""The device, precision, batches and libraries of a model: decided before it is loaded."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from scoremode.engines.transformers.transformers_options import TransformersOptions
from scoremode.errors import ModelError, OptionError
from scoremode.models.facts import ModelFacts

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16", "float64")
BATCH_TOKENS = {"cpu": 512, "cuda": 16384}  # on a CPU, long windows are scored alone: a larger batch is not faster
LIBRARIES = {  # quant_method -> the packages that Transformers asks for
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel",),
}


def chosen_device_and_dtype(options: TransformersOptions, facts: ModelFacts) -> tuple[str, str]:
    """The names of the device and the dtype that a model would use here."""
    device = choose_device(options.device)
    choose_batch_tokens(options.batch_tokens, device)
    return device, _dtype_name(options.dtype, device, facts)


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
    """CUDA devices that torch can use. Its build for CPUs has none, and is not imported to say so."""
    if "torch" not in sys.modules and version("torch").endswith("+cpu"):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_batch_tokens(wanted: int | None, kind: str) -> int:
    if wanted is not None and wanted < 1:
        raise OptionError(f"--batch-tokens {wanted} leaves no batch", fix="give 1 or more")
    return wanted if wanted is not None else BATCH_TOKENS.get(kind, 4096)


def choose_dtype(wanted: str | None, device: str, facts: ModelFacts) -> Any:
    """A dtype of torch, or "auto"."""
    import torch

    name = _dtype_name(wanted, device, facts)
    return name if name == "auto" else getattr(torch, name)


def _dtype_name(wanted: str | None, device: str, facts: ModelFacts) -> str:
    if wanted is not None and wanted != "auto":
        if wanted not in DTYPES:
            raise OptionError(f"--dtype {wanted} is not known", fix=f"give one of auto, {', '.join(DTYPES)}")
        return wanted
    if device == "cpu" and "quantization_config" not in facts.config:
        return "float32"  # on a CPU, half precision is slow and adds rounding that serving on a GPU does not have
    return "auto"


def describe_device(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type


def versions() -> dict[str, str]:
    import torch
    import transformers

    return {"torch": str(torch.__version__), "transformers": str(transformers.__version__)}


def require_quantization_library(facts: ModelFacts) -> None:
    """Refuse a checkpoint whose quantization needs a package that is not installed."""
    quantization = facts.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    missing = [name for name in LIBRARIES.get(str(method), ()) if not _is_installed(name)]
    if not missing:
        return
    raise ModelError(
        f"{facts.name} is quantized with {method}, and Transformers needs {' and '.join(missing)} for that",
        fix="pip install '.[quantized]'",
    )


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
