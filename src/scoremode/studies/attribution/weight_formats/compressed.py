"""Checkpoints in the format compressed-tensors (W4A16, W8A8, FP8, NVFP4, MXFP4, …), de-quantized by its own library."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from scoremode.core.installation import pip_install
from scoremode.core.models.safetensors import BESIDE_WEIGHTS, StoredTensor
from scoremode.core.models.subject import scheme_of
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.stored import OTHER_FORMAT, ModuleTensors, PlainTensors, Shape

if TYPE_CHECKING:
    import torch

FLOATS_IN_BYTES = ("nvfp4", "mxfp4")  # two weights in a byte
MIXED = "mixed-precision"


class CompressedTensors(ModuleTensors):
    leaves = ("weight_packed", "weight", *sorted(BESIDE_WEIGHTS))
    marks = ("weight_packed", "weight_scale")
    never_weights = BESIDE_WEIGHTS  # also scales of the K/V cache

    def __init__(self, label: str, plain: PlainTensors, quantization: Mapping[str, Any]) -> None:
        sparsity = quantization.get("sparsity_config") or {}
        if quantization.get("transform_config") or sparsity.get("format", "dense") != "dense":
            raise ModelError(f"the weights of {label} are rotated or sparse, and cannot be unpacked", fix=OTHER_FORMAT)
        self._config = _read_config(label, quantization)
        self._schemes: dict[str, tuple[str, Any]] = {}
        super().__init__(label, plain)
        notes = []
        if any(scheme.input_activations for _, scheme in self._schemes.values()):
            notes.append(f"{label} also rounds activations; here only its weights are put in")
        if any("nvfp4" in kind for kind, _ in self._schemes.values()):
            notes.append(f"compressed-tensors gives the NVFP4 weights of {label} in bfloat16")
        self.notes = tuple(notes)

    def _decoded(self, module: str, shape: Shape) -> torch.Tensor:
        import torch
        from compressed_tensors.compressors import BaseCompressor

        kind, scheme = self._schemes[module]
        compressor = BaseCompressor.get_value_from_registry(kind)
        state = {leaf: self.plain.raw(f"{module}.{leaf}") for leaf in self.parts_of(module)}
        for leaf in ("weight_scale", "weight_global_scale"):  # 16-bit scales would round the products
            if leaf in state and state[leaf].dtype in (torch.float16, torch.bfloat16):
                state[leaf] = state[leaf].float()
        try:
            weight: torch.Tensor = compressor.decompress(state, scheme)["weight"]
            if tuple(weight.shape) != shape:
                raise ValueError("its shape is another")
        except Exception as error:  # the library checks little: what is missing or does not fit raises anything
            reason = f"{type(error).__name__}: {error}"[:200]
            message = f"{module} of {self.label} cannot be de-quantized ({reason})"
            raise ModelError(message, fix="download it again") from None
        return weight.detach().float()

    def _scheme(self, module: str) -> tuple[str, Any]:
        """The format and the scheme of a module, by the groups of the config: names before classes."""
        import torch
        from compressed_tensors.compressors.format import infer_module_format
        from compressed_tensors.utils.match import match_name

        groups = list(self._config.config_groups.values())
        by_name = [group for group in groups if any(match_name(module, target) for target in group.targets)]
        by_class = [group for group in groups if {"Linear", "Embedding"} & set(group.targets)]
        chosen = next(iter([*by_name, *by_class]), None)
        if chosen is None or chosen.weights is None:
            raise ModelError(f"{self.label} does not say how {module} is quantized", fix="check its config.json")
        format_name = chosen.format or (self._config.format if self._config.format != MIXED else None)
        kind = getattr(format_name, "value", format_name) or infer_module_format(torch.nn.Linear, chosen).value
        return str(kind), chosen

    def _described(self, module: str, parts: Mapping[str, StoredTensor]) -> tuple[Shape, str]:
        kind, scheme = self._schemes[module] = self._scheme(module)
        if "weight_shape" in parts:
            shape: Shape = tuple(int(size) for size in self.plain.raw(f"{module}.weight_shape").flatten())
        elif "weight_packed" in parts:
            shape = parts["weight_packed"].shape
            self.require(len(shape) == 2 and any(float_format in kind for float_format in FLOATS_IN_BYTES), module)
            shape = (shape[0], 2 * shape[1])
        else:
            self.require("weight" in parts, module)
            shape = parts["weight"].shape
        return shape, _format(kind, scheme)


def _format(kind: str, scheme: Any) -> str:
    for float_format in FLOATS_IN_BYTES:
        if float_format in kind:
            return float_format.upper() if scheme.input_activations else f"{float_format.upper()} A16"
    size = scheme.weights.group_size
    block = scheme.weights.block_structure
    suffix = f" g{size}" if size and size > 0 else f" blocks {block[0]}×{block[1]}" if block else ""
    kind_of_zero = "" if scheme.weights.symmetric else " asym"
    return scheme_of(scheme.model_dump(mode="json")) + kind_of_zero + suffix


def _read_config(label: str, quantization: Mapping[str, Any]) -> Any:
    if find_spec("compressed_tensors") is None:
        raise ModelError(f"{label} needs the package 'compressed-tensors'", fix=pip_install("quantized"))
    from compressed_tensors.quantization import QuantizationConfig

    try:
        return QuantizationConfig.model_validate(dict(quantization))
    except ValueError as error:  # pydantic's errors are ValueErrors
        reason = str(error).strip().split("\n")[0][:200]
        raise ModelError(f"the quantization_config of {label} is not understood ({reason})", fix="check it") from None
