"""The weights of a checkpoint, as Transformers loads and de-quantizes them: in main memory, in the baseline's dtype.

compressed-tensors   de-quantized while it is loaded (``dequantize=True``)
GPTQ, AWQ            by the layers of gptqmodel, one matrix at a time, rounded to float16
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from scoremode.core.engine.options import CheckpointOptions
from scoremode.core.models.facts import ModelFacts, weight_files
from scoremode.core.models.safetensors import BESIDE_WEIGHTS, read_header
from scoremode.core.models.subject import scheme_of
from scoremode.engines.transformers.choices import TransformersOptions, require_quantization_library
from scoremode.engines.transformers.loading import load_model
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.stored import TensorReader, stored_weights

COMPRESSED, PACKED = "compressed-tensors", ("gptq", "awq")
OTHER_FORMAT = "give a checkpoint in another format, such as compressed-tensors or GGUF"
EMULATED = "{} emulates a quantization of {:.3g} bits per weight; the bits of its parts are those of its files"


class CheckpointWeights(TensorReader):
    """A candidate that Transformers loaded; a head that is its embedding has no weights of its own."""

    def __init__(self, label: str, facts: ModelFacts, options: CheckpointOptions) -> None:
        self._label = label
        quantization = facts.config.get("quantization_config") or {}
        method = _method(label, quantization)
        require_quantization_library(facts)
        loading = TransformersOptions(device="cpu", dtype=options.dtype, trust_remote_code=options.trust_remote_code)
        model, notes = load_model(facts, loading, **_loading(facts, method))
        formats = {name: _format(module) for name, module in _matrices(model, "quantization_scheme")}
        packed = dict(_matrices(model, "qweight"))
        formats |= dict.fromkeys(packed, _packed_format(quantization))
        self._packed, self._plain = (
            packed,
            {
                name: parameter.detach()
                for name, parameter in model.named_parameters()
                if name.rpartition(".")[2] not in BESIDE_WEIGHTS
            },
        )
        usual = next(iter(formats.values()), "quantized")
        shapes = {name: tuple(weight.shape) for name, weight in self._plain.items()}
        shapes |= {name: (module.out_features, module.in_features) for name, module in packed.items()}
        header = [tensor for file in weight_files(facts.path)[0] for tensor in read_header(file).values()]
        self.stored = stored_weights(label, shapes, header, formats, usual)
        self.notes = (*notes, *_notes(label, facts, model))

    def read(self, name: str) -> Tensor:
        weight = self._plain[name] if name in self._plain else self._unpacked(self._packed[name])
        return weight.float()

    def _unpacked(self, module: Any) -> Tensor:
        """The weight of a layer of gptqmodel: scale · (number − zero point), as (outputs, inputs)."""
        if hasattr(module, "dequantize_weight"):  # GPTQ
            return module.dequantize_weight().T.contiguous()  # type: ignore[no-any-return]
        if hasattr(module, "awq_weight_dequantize"):
            return module.awq_weight_dequantize("cpu", torch.float16).T.contiguous()  # type: ignore[no-any-return]
        message = f"{self._label} was loaded with {type(module).__name__}, which does not give its weights"
        raise ModelError(message, fix=OTHER_FORMAT)


def _method(label: str, quantization: Any) -> str | None:
    """The method of a quantization; ModelError if Transformers gives no weights of it."""
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if method not in (COMPRESSED, *PACKED):
        message = f"{label} is quantized by the method {method!r}, whose weights scoremode cannot read"
        raise ModelError(message, fix=OTHER_FORMAT)
    if quantization.get("transform_config") or (quantization.get("sparsity_config") or {}).get("format") not in (
        None,
        "dense",
    ):
        raise ModelError(f"the weights of {label} are rotated or sparse, and cannot be unpacked", fix=OTHER_FORMAT)
    return str(method)


def _loading(facts: ModelFacts, method: str | None) -> dict[str, Any]:
    """The arguments that make Transformers de-quantize while it loads."""
    if method != COMPRESSED:
        return {}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(facts.path)
    config.quantization_config = {**facts.config["quantization_config"], "dequantize": True}
    return {"config": config}


def _matrices(model: Any, mark: str) -> list[tuple[str, Any]]:
    """The matrices whose modules have this attribute."""
    return [(f"{name}.weight", module) for name, module in model.named_modules() if hasattr(module, mark)]


def _packed_format(quantization: Mapping[str, Any]) -> str:
    bits, group = quantization.get("bits", quantization.get("w_bit")), quantization.get("group_size", 128)
    return f"{str(quantization.get('quant_method')).upper()} {bits} bit{f' g{group}' if group > 0 else ''}"


def _format(module: Any) -> str:
    """The format of a matrix in words, by the scheme that compressed-tensors attached to its module."""
    scheme = module.quantization_scheme
    weights = scheme.weights
    if weights.type == "float" and weights.num_bits == 4:
        name = "NVFP4" if weights.strategy == "tensor_group" else "MXFP4"
        return name if scheme.input_activations else f"{name} A16"
    size, block = weights.group_size, weights.block_structure
    suffix = f" g{size}" if size and size > 0 else f" blocks {block[0]}×{block[1]}" if block else ""
    return scheme_of(scheme.model_dump(mode="json")) + ("" if weights.symmetric else " asym") + suffix


def _notes(label: str, facts: ModelFacts, model: Any) -> list[str]:
    schemes = [module.quantization_scheme for _, module in _matrices(model, "quantization_scheme")]
    notes = [EMULATED.format(label, facts.bits_per_weight)] if facts.emulated_bytes is not None else []
    if any(scheme.input_activations for scheme in schemes):
        notes.append(f"{label} also rounds activations; here only its weights are put in")
    return notes
