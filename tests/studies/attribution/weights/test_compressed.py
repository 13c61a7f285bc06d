"""compressed-tensors checkpoints: against longhand, and against what Transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scoremode.core.models.facts import inspect
from scoremode.core.models.safetensors import read_header
from scoremode.errors import ModelError
from tests.makers import checkpoint_maker
from tests.studies.attribution.weights.checkpoints import Tensors, llama_tensors, opened, save

pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
NAME = "model.layers.1.mlp.down_proj"
ROWS, COLUMNS, GROUP = 6, 64, 32
INTS: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


def config(weights: dict[str, Any], kind: str, **more: Any) -> dict[str, Any]:
    group = {"weights": weights, "targets": ["Linear"], **more}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def packed_by(kind: str, weights: dict[str, Any], state: Tensors) -> Tensors:
    """A module as the library packs it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    found = BaseCompressor.get_value_from_registry(kind).compress(state, scheme)
    return {f"{NAME}.{leaf}": tensor.detach() for leaf, tensor in found.items()}


def checkpoint(folder: Path, module: Tensors, quantization: dict[str, Any]) -> str:
    tensors = {name: tensor for name, tensor in llama_tensors(1).items() if name != f"{NAME}.weight"}
    return save(folder, {**tensors, **module}, quantization_config=quantization)


def baseline() -> Tensors:
    return {**llama_tensors(), f"{NAME}.weight": torch.zeros(ROWS, COLUMNS)}


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_with_groups_are_numbers_times_scales(tmp_path: Path, bits: int) -> None:
    """In float32: 16-bit scales do not round the products."""
    random = torch.Generator().manual_seed(bits)
    numbers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (ROWS, COLUMNS), generator=random)
    scales = torch.rand((ROWS, COLUMNS // GROUP), generator=random).bfloat16() + 0.5
    weight = torch.tensor(
        [[numbers[r, c].item() * scales[r, c // GROUP].item() for c in range(COLUMNS)] for r in range(ROWS)]
    )
    weights = {**INTS, "num_bits": bits}
    module = packed_by("pack-quantized", weights, {"weight": weight, "weight_scale": scales.float()})
    module[f"{NAME}.weight_scale"] = scales
    folder = checkpoint(tmp_path / "ints", module, config(weights, "pack-quantized"))
    found = opened(folder, baseline())
    assert torch.equal(found.tensor(f"{NAME}.weight"), weight)
    assert torch.equal(found.tensor("lm_head.weight"), llama_tensors(1)["lm_head.weight"])
    stored = found.stored[f"{NAME}.weight"]
    assert (stored.format, stored.shape) == (f"W{bits}A16 g{GROUP}", (ROWS, COLUMNS))
    assert stored.bits == bits + 16 / GROUP + 128 / (ROWS * COLUMNS)  # and two 64-bit numbers for the shape
    assert found.notes == ()
    every = [(w.bits, baseline()[w.name].numel()) for w in found.stored.values()]
    assert sum(b * n for b, n in every) / sum(n for _, n in every) == pytest.approx(inspect(folder).bits_per_weight)


def test_zero_points(tmp_path: Path) -> None:
    weights = {**INTS, "symmetric": False}
    numbers = torch.randint(-8, 8, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))
    zeros = torch.randint(-8, 8, (ROWS, COLUMNS // GROUP), generator=torch.Generator().manual_seed(1))
    scales = torch.full((ROWS, COLUMNS // GROUP), 0.25)
    weight = (numbers - zeros.repeat_interleave(GROUP, 1)) * 0.25
    state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    module = packed_by("pack-quantized", weights, state)
    found = opened(checkpoint(tmp_path / "zeros", module, config(weights, "pack-quantized")), baseline())
    assert torch.equal(found.tensor(f"{NAME}.weight"), weight)
    assert found.stored[f"{NAME}.weight"].format == f"W4A16 asym g{GROUP}"


@pytest.mark.parametrize(
    ("kind", "strategy", "format"),
    [("int", "channel", "W8A8"), ("float", "channel", "FP8"), ("float", "tensor", "FP8")],
)
def test_eight_bits_and_activations_that_are_not_emulated(
    tmp_path: Path, kind: str, strategy: str, format: str
) -> None:
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy}
    inputs = {**weights, "strategy": "token", "dynamic": True}
    numbers = (40 * torch.randn(ROWS, COLUMNS)).to(torch.int8 if kind == "int" else torch.float8_e4m3fn)
    scales = torch.rand(ROWS, 1) + 0.1 if strategy == "channel" else torch.tensor([0.37])
    module = {f"{NAME}.weight": numbers, f"{NAME}.weight_scale": scales}
    folder = checkpoint(tmp_path / "eight", module, config(weights, f"{kind}-quantized", input_activations=inputs))
    found = opened(folder, baseline())
    assert torch.equal(found.tensor(f"{NAME}.weight"), numbers.float() * scales)
    assert found.stored[f"{NAME}.weight"].format == format
    assert found.stored[f"{NAME}.weight"].bits == 8 + 32 * scales.numel() / (ROWS * COLUMNS)
    assert "also rounds activations; here only its weights" in found.notes[0]


def four_bit_floats(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, and two of them in each byte: a sign and one of eight sizes."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=random)
    values = torch.where(codes >= 8, -1.0, 1.0) * sizes[codes % 8]
    return values, (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def test_floats_of_four_bits_with_two_scales(tmp_path: Path) -> None:
    """NVFP4: a scale of 8 bits for each group of 16, and one for the matrix. The library gives bfloat16."""
    random = torch.Generator().manual_seed(4)
    values, bytes_ = four_bit_floats(random)
    scales = (torch.rand((ROWS, COLUMNS // 16), generator=random) * 400 + 1).to(torch.float8_e4m3fn)
    whole = torch.tensor([1234.5])
    module = {f"{NAME}.weight_packed": bytes_, f"{NAME}.weight_scale": scales, f"{NAME}.weight_global_scale": whole}
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    found = opened(checkpoint(tmp_path / "nv", module, config(weights, "nvfp4-pack-quantized")), baseline())
    expected = values.double() * scales.double().repeat_interleave(16, 1) / whole.double()
    assert torch.allclose(found.tensor(f"{NAME}.weight").double(), expected, rtol=2**-7, atol=0)
    stored = found.stored[f"{NAME}.weight"]
    assert (stored.format, stored.bits) == ("NVFP4 A16", 4 + 8 / 16 + 32 / (ROWS * COLUMNS))
    assert found.notes == (f"compressed-tensors gives the NVFP4 weights of {found.label} in bfloat16",)


def test_floats_of_four_bits_with_powers_of_two(tmp_path: Path) -> None:
    """MXFP4: a sign, eight sizes, and an exponent for each group of 32."""
    random = torch.Generator().manual_seed(3)
    values, bytes_ = four_bit_floats(random)
    exponents = torch.randint(120, 130, (ROWS, COLUMNS // 32), generator=random)
    weight = values * (2.0 ** (exponents - 127)).repeat_interleave(32, 1)
    module = {f"{NAME}.weight_packed": bytes_, f"{NAME}.weight_scale": exponents.to(torch.uint8)}
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    found = opened(checkpoint(tmp_path / "mx", module, config(weights, "mxfp4-pack-quantized")), baseline())
    assert torch.equal(found.tensor(f"{NAME}.weight"), weight)
    assert (found.stored[f"{NAME}.weight"].format, found.stored[f"{NAME}.weight"].bits) == ("MXFP4 A16", 4 + 8 / 32)


def test_groups_by_name_come_before_groups_by_class(tmp_path: Path) -> None:
    four, eight = INTS, {**INTS, "num_bits": 8}
    weight = torch.randint(-128, 128, (ROWS, COLUMNS)).float()
    state = {"weight": weight, "weight_scale": torch.ones(ROWS, COLUMNS // GROUP)}
    module = packed_by("pack-quantized", eight, state)
    quantization = config(four, "pack-quantized")
    quantization["config_groups"]["group_1"] = {"weights": eight, "targets": [r"re:.*layers\.1\.mlp\.down_proj$"]}
    found = opened(checkpoint(tmp_path / "mixed", module, quantization), baseline())
    assert torch.equal(found.tensor(f"{NAME}.weight"), weight)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"transform_config": {"config_groups": {"R1": {}}}}, "are rotated or sparse"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "are rotated or sparse"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": "four"}, "targets": ["Linear"]}}}, "is not understood"),
        (
            {"config_groups": {"group_0": {"weights": INTS, "targets": ["lm_head"]}}},
            f"does not say how {NAME} is quantized",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    state = {"weight": torch.ones(ROWS, COLUMNS), "weight_scale": torch.ones(ROWS, COLUMNS // GROUP)}
    module = packed_by("pack-quantized", INTS, state)
    folder = checkpoint(tmp_path / "bad", module, {**config(INTS, "pack-quantized"), **change})
    with pytest.raises(ModelError, match=says) as refusal:
        opened(folder, baseline())
    assert "\n" not in str(refusal.value)


def test_a_damaged_module_is_named_when_it_is_read(tmp_path: Path) -> None:
    state = {"weight": torch.ones(ROWS, COLUMNS), "weight_scale": torch.ones(ROWS, COLUMNS // GROUP)}
    module = packed_by("pack-quantized", INTS, state)
    for scale in ({}, {f"{NAME}.weight_scale": torch.ones(ROWS + 1, 5)}):
        damaged = {name: tensor for name, tensor in module.items() if "scale" not in name} | scale
        found = opened(checkpoint(tmp_path / "damaged", damaged, config(INTS, "pack-quantized")), baseline())
        with pytest.raises(ModelError, match=rf"{NAME} of .* cannot be de-quantized") as refusal:
            found.tensor(f"{NAME}.weight")
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["w8a8", "fp8", "w4a16-asym"])
def test_real_checkpoints_are_what_transformers_loads(small_llama: Path, tmp_path: Path, name: str) -> None:
    """Bit for bit, in float32."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    folder = checkpoint_maker()(str(small_llama), tmp_path / name, name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    loaded_now = dict(loaded.named_parameters())
    parameters = {name: loaded_now[name].detach() for name in read_header(small_llama / "model.safetensors")}
    found = opened(str(folder), parameters, {"model_type": "llama"})
    assert len(parameters) == 21
    for parameter, tensor in parameters.items():
        assert torch.equal(found.tensor(parameter), tensor.float()), parameter
