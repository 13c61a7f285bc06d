"""Which library Transformers opens a quantized checkpoint with; a missing one is named before weights are read."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from scoremode.errors import ModelError
from scoremode.models.facts import ModelFacts

LIBRARIES = {  # quant_method -> the packages that Transformers asks for
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel",),
}


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
