"""Round-to-nearest compressed-tensors checkpoints of a model: no calibration data, no llmcompressor, seconds each.

    python make_checkpoints.py MODEL OUT w8a8 fp8            the two that vLLM also serves on any CPU
    python make_checkpoints.py MODEL OUT w4a16 w4a16-asym    on x86 CPUs with AVX-512, in bfloat16
    python make_checkpoints.py MODEL OUT --all               also w8a16 nvfp4a16, for a GPU

MODEL is smollm2-135m, or the folder of a checkpoint. Transformers can open the result too, and emulates it: integers
times scales in float32, int8 activations rounded and de-quantized again.

The head stays unquantized, as in nearly all published checkpoints, unless a name ends in "+head".
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from scoremode.core.models.facts import resolve

GROUP = 64  # the preset's 128 does not divide SmolLM2's hidden size of 576
PRESETS = {
    "w8a8": "W8A8",
    "fp8": "FP8_DYNAMIC",
    "w8a16": "W8A16",
    "w4a16": "W4A16",
    "w4a16-asym": "W4A16_ASYM",
    "nvfp4a16": "NVFP4A16",
}
ON_CPU = ("w8a8", "fp8")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def scheme_named(name: str) -> QuantizationScheme:
    scheme = preset_name_to_scheme(PRESETS[name], ["Linear"])
    if scheme.weights.group_size == 128:
        scheme.weights.group_size = GROUP
    return scheme


def grouped(weight: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """The weight as (outputs, groups, members): the members of the last axis share one scale."""
    size = args.group_size if args.group_size and args.group_size > 0 else weight.shape[1]
    return weight.reshape(len(weight), -1, size)


def fused_with(network: Any, name: str) -> list[Any]:
    """The layers that a server fuses into one matrix with this one, including itself."""
    parent, _, leaf = name.rpartition(".")
    leaves = next((group for group in FUSED if leaf in group), (leaf,))
    return [network.get_submodule(f"{parent}.{other}" if parent else other) for other in leaves]


def round_to_nearest(module: Any, fused: list[Any]) -> None:
    """Set a layer's scales (and zero points) from its own weight alone.

    Only FP4's second scale, one per matrix, must be that of the whole fused matrix: a server keeps only one for it.
    """
    args = module.quantization_scheme.weights
    low, high = grouped(module.weight, args).aminmax(dim=-1)
    fourbit_float = args.num_bits == 4 and args.type == "float"
    least, most = (min(m.weight.min() for m in fused), max(m.weight.max() for m in fused))
    global_scale = generate_gparam(least, most) if fourbit_float else None
    scale, zero_point = calculate_qparams(low, high, args, global_scale)
    module.weight_scale.data.copy_(scale)
    if global_scale is not None:
        module.weight_global_scale.data.copy_(global_scale)
    if not args.symmetric:
        module.weight_zero_point.data.copy_(zero_point)


def make(model: str, folder: Path, name: str) -> Path:
    """Write MODEL quantized as ``name`` to a folder, with the tokenizer's files."""
    from transformers import AutoModelForCausalLM

    base, plus, _ = name.partition("+")
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = QuantizationConfig(
        config_groups={"group_0": scheme_named(base)},
        ignore=[] if plus else ["lm_head"],
        quantization_status=QuantizationStatus.INITIALIZED,
    )
    apply_quantization_config(network, config)
    with torch.no_grad():
        for layer, module in network.named_modules():
            if getattr(module, "quantization_scheme", None) is not None:
                round_to_nearest(module, fused_with(network, layer))
                module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(network)
    compressor.compress_model(network)
    network.save_pretrained(folder)
    compressor.update_config(str(folder))
    for file in Path(model).glob("*token*"):
        shutil.copy(file, folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PRESETS)}")
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    model = str(resolve(given.model))
    for name in PRESETS if given.all else given.names or ON_CPU:
        print(make(model, given.out / name, name), flush=True)


if __name__ == "__main__":
    main()
