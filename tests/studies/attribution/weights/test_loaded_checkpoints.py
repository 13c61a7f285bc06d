"""Checkpoints as Transformers de-quantizes them: against longhand, number by number, and refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scoremode.core.models.facts import inspect
from scoremode.core.models.safetensors import StoredTensor
from scoremode.errors import ModelError
from scoremode.studies.attribution.weight_formats.stored import stored_weights
from tests.makers import checkpoint_maker, make_mixture
from tests.studies.attribution.weights.checkpoints import (
    Tensors,
    assert_equal,
    llama_tensors,
    opened,
    save,
    shapes_of,
)

needs_compressed_tensors = pytest.mark.skipif(
    find_spec("compressed_tensors") is None, reason="needs compressed-tensors"
)
NAME = "model.layers.1.mlp.down_proj"
WIDE: dict[str, Any] = {"intermediate_size": 64}
ROWS, COLUMNS, GROUP = 16, 64, 32
INTS: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


def wide(seed: int) -> Tensors:
    """A Llama whose down_proj has rows of 64."""
    return llama_tensors(seed, inner=COLUMNS)


# ── plain ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_fine_tune_is_read_with_the_bits_of_its_files(tmp_path: Path) -> None:
    tuned = {name: tensor.bfloat16() for name, tensor in llama_tensors(1).items()}
    tuned["model.norm.weight"] = tuned["model.norm.weight"].float()
    weights = opened(save(tmp_path / "tuned", tuned), llama_tensors())
    assert_equal(weights, tuned)
    stored = weights.stored["lm_head.weight"]
    assert (stored.bits, stored.format, weights.stored["model.norm.weight"].bits) == (16, "bfloat16", 32)
    assert weights.notes == ()


def test_a_head_that_is_not_stored_is_the_embedding_and_one_that_the_baseline_lacks_must_be(tmp_path: Path) -> None:
    tied, whole = llama_tensors(2, tied=True), llama_tensors(3)
    weights = opened(save(tmp_path / "tied", tied, tie_word_embeddings=True), whole)
    assert torch.equal(weights.tensor("lm_head.weight"), tied["model.embed_tokens.weight"])
    assert weights.stored["lm_head.weight"].bits == 32
    with pytest.raises(ModelError, match=r"lacks lm_head.weight"):
        opened(save(tmp_path / "untied", tied), whole)
    twice = {**tied, "lm_head.weight": tied["model.embed_tokens.weight"].clone()}
    assert_equal(opened(save(tmp_path / "twice", twice), tied), tied)
    with pytest.raises(ModelError, match=r"has a head of its own \(lm_head.weight\)"):
        opened(save(tmp_path / "own", whole), tied)


def test_experts_that_are_stored_one_by_one_have_the_bits_of_their_files(tmp_path: Path) -> None:
    folder = make_mixture(tmp_path, num_hidden_layers=1)
    files = load_file(folder / "model.safetensors")
    prefix = "model.layers.0.block_sparse_moe.experts"
    assert f"{prefix}.3.w1.weight" in files
    experts = {
        f"model.layers.0.mlp.experts.{name}": torch.stack(
            [
                torch.cat([files[f"model.layers.0.block_sparse_moe.experts.{i}.{w}.weight"] for w in ws])
                for i in range(4)
            ]
        )
        for name, ws in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",)))
    }
    other = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in files.items() if "experts" not in name}
    baseline = {**other, **experts}
    weights = opened(str(folder), baseline, "mixtral")
    assert_equal(weights, baseline)
    assert {(w.bits, w.format) for w in weights.stored.values()} == {(32, "float32")}


def test_quantized_experts_have_the_mean_bits_of_their_files_and_the_usual_format() -> None:
    layer, shapes = "model.layers.0.mlp.experts", {"gate_up_proj": (2, 8, 32), "down_proj": (2, 32, 4)}
    files = [
        StoredTensor(Path("x"), f"{layer}.{expert}.{piece}.weight_{leaf}", dtype, shape)
        for expert in range(2)
        for piece in ("gate_proj", "up_proj", "down_proj")
        for leaf, dtype, shape in (("packed", "I32", (4, 4)), ("scale", "BF16", (4, 1)))
    ]
    weights = stored_weights(
        "m", {f"{layer}.{name}": shape for name, shape in shapes.items()}, files, usual="W4A16 g32"
    )
    assert {(w.bits, w.format) for w in weights.values()} == {(4 + 16 / 32, "W4A16 g32")}
    with pytest.raises(ModelError, match="have no tensors for model"):
        stored_weights("m", {"model.layers.1.mlp.up_proj.weight": (4, 4)}, files)


def test_an_emulated_quantization_and_tensors_that_are_not_used_are_noted(tmp_path: Path) -> None:
    more = {**llama_tensors(), "visual.patch.weight": torch.ones(2)}
    notes = opened(save(tmp_path / "emulated", more, bits_per_weight=4.5), llama_tensors()).notes
    assert any("emulates a quantization of 4.5 bits per weight" in note for note in notes)
    assert "1 tensor of the checkpoint is not used: visual.patch.weight" in notes


def test_refusals_name_what_differs(tmp_path: Path) -> None:
    baseline = llama_tensors()
    fewer = {name: tensor for name, tensor in baseline.items() if name != "model.layers.1.mlp.up_proj.weight"}
    cases: list[tuple[Tensors, dict[str, Any], str]] = [
        (baseline, {"model_type": "qwen2"}, "is a qwen2 model, and the baseline is a llama"),
        (llama_tensors(layers=3), {"num_hidden_layers": 3}, "has 3 layers, and the baseline has 2"),
        (fewer, {}, "lacks model.layers.1.mlp.up_proj.weight"),
        (wide(0), WIDE, "has the shape 64 × 16, and the baseline's"),
        (baseline, {"quantization_config": {"quant_method": "fp8"}}, "quantized by the method 'fp8', whose weights"),
        (baseline, {"quantization_config": "awq"}, "quantized by the method None, whose weights"),
    ]
    for number, (tensors, config, says) in enumerate(cases):
        with pytest.raises(ModelError, match=says) as refusal:
            opened(save(tmp_path / str(number), tensors, **config), baseline)
        assert "\n" not in str(refusal.value)
        assert refusal.value.fix


def test_an_adapter_is_to_be_merged_first(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="is an adapter") as refused:
        opened(str(tmp_path), llama_tensors())
    assert "merge_and_unload" in refused.value.fix


# ── compressed-tensors ───────────────────────────────────────────────────────────────────────────────────────────────
def config(weights: dict[str, Any], kind: str, **more: Any) -> dict[str, Any]:
    group = {"weights": weights, "targets": ["re:.*layers.1.mlp.down_proj"], **more}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": kind,
        "config_groups": {"group_0": group},
    }


def packed_by(kind: str, weights: dict[str, Any], state: Tensors, name: str = NAME) -> Tensors:
    """A module as the library packs it."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    packed = BaseCompressor.get_value_from_registry(kind).compress(state, scheme)
    return {f"{name}.{leaf}": tensor.detach() for leaf, tensor in packed.items()}


def checkpoint(folder: Path, module: Tensors, quantization: dict[str, Any]) -> str:
    tensors = {name: tensor for name, tensor in wide(1).items() if name != f"{NAME}.weight"}
    return save(folder, {**tensors, **module}, quantization_config=quantization, **WIDE)


@needs_compressed_tensors
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_with_groups_are_numbers_times_scales(tmp_path: Path, bits: int) -> None:
    random = torch.Generator().manual_seed(bits)
    numbers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (ROWS, COLUMNS), generator=random)
    scales = torch.rand((ROWS, COLUMNS // GROUP), generator=random).bfloat16() + 0.5
    weight = torch.tensor(
        [[numbers[r, c].item() * scales[r, c // GROUP].item() for c in range(COLUMNS)] for r in range(ROWS)]
    )
    scheme = {**INTS, "num_bits": bits}
    module = packed_by("pack-quantized", scheme, {"weight": weight, "weight_scale": scales.float()})
    module[f"{NAME}.weight_scale"] = scales
    folder = checkpoint(tmp_path / "ints", module, config(scheme, "pack-quantized"))
    weights = opened(folder, wide(0))
    assert torch.equal(weights.tensor(f"{NAME}.weight"), weight)
    assert torch.equal(weights.tensor("lm_head.weight"), wide(1)["lm_head.weight"])
    stored = weights.stored[f"{NAME}.weight"]
    assert (stored.format, stored.shape) == (f"W{bits}A16 g{GROUP}", (ROWS, COLUMNS))
    assert stored.bits == bits + 16 / GROUP + 128 / (ROWS * COLUMNS)  # and two 64-bit numbers for the shape
    assert weights.notes == ()
    every = [(w.bits, wide(0)[w.name].numel()) for w in weights.stored.values()]
    assert sum(b * n for b, n in every) / sum(n for _, n in every) == pytest.approx(inspect(folder).bits_per_weight)
    rounded = opened(folder, wide(0), dtype="bfloat16").tensor(f"{NAME}.weight")
    assert torch.equal(rounded, weight.bfloat16().float()), "one rounding, to the dtype of the baseline"


@needs_compressed_tensors
def test_zero_points_are_taken_off(tmp_path: Path) -> None:
    scheme = {**INTS, "symmetric": False}
    numbers = torch.randint(-8, 8, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(0))
    zeros = torch.randint(-8, 8, (ROWS, COLUMNS // GROUP), generator=torch.Generator().manual_seed(1))
    scales = torch.full((ROWS, COLUMNS // GROUP), 0.25)
    weight = (numbers - zeros.repeat_interleave(GROUP, 1)) * 0.25
    state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    module = packed_by("pack-quantized", scheme, state)
    weights = opened(checkpoint(tmp_path / "zeros", module, config(scheme, "pack-quantized")), wide(0))
    assert torch.equal(weights.tensor(f"{NAME}.weight"), weight)
    assert weights.stored[f"{NAME}.weight"].format == f"W4A16 asym g{GROUP}"


@needs_compressed_tensors
@pytest.mark.parametrize(
    ("kind", "strategy", "format"),
    [("int", "channel", "W8A8"), ("float", "channel", "FP8"), ("float", "tensor", "FP8")],
)
def test_eight_bits_and_activations_that_are_not_emulated(
    tmp_path: Path, kind: str, strategy: str, format: str
) -> None:
    scheme = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy}
    inputs = {**scheme, "strategy": "token", "dynamic": True}
    numbers = (40 * torch.randn(ROWS, COLUMNS)).to(torch.int8 if kind == "int" else torch.float8_e4m3fn)
    scales = torch.rand(ROWS, 1) + 0.1 if strategy == "channel" else torch.tensor([0.37])
    module = {f"{NAME}.weight": numbers, f"{NAME}.weight_scale": scales}
    folder = checkpoint(tmp_path / "eight", module, config(scheme, f"{kind}-quantized", input_activations=inputs))
    weights = opened(folder, wide(0))
    assert torch.equal(weights.tensor(f"{NAME}.weight"), numbers.float() * scales)
    assert weights.stored[f"{NAME}.weight"].format == format
    assert weights.stored[f"{NAME}.weight"].bits == 8 + 32 * scales.numel() / (ROWS * COLUMNS)
    assert "also rounds activations; here only its weights" in weights.notes[0]


def four_bit_floats(random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, and two of them in each byte: a sign and one of eight sizes."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=random)
    values = torch.where(codes >= 8, -1.0, 1.0) * sizes[codes % 8]
    return values, (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


@needs_compressed_tensors
def test_floats_of_four_bits(tmp_path: Path) -> None:
    """NVFP4: 8 bits of scale for each group of 16, and one for the matrix. MXFP4: an exponent for each group of 32."""
    random = torch.Generator().manual_seed(4)
    values, bytes_ = four_bit_floats(random)
    scales = (torch.rand((ROWS, COLUMNS // 16), generator=random) * 400 + 1).to(torch.float8_e4m3fn)
    whole = torch.tensor([1234.5])
    module = {f"{NAME}.weight_packed": bytes_, f"{NAME}.weight_scale": scales, f"{NAME}.weight_global_scale": whole}
    scheme = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    weights = opened(checkpoint(tmp_path / "nv", module, config(scheme, "nvfp4-pack-quantized")), wide(0))
    expected = values.double() * scales.double().repeat_interleave(16, 1) / whole.double()
    assert torch.allclose(weights.tensor(f"{NAME}.weight").double(), expected, rtol=2**-7, atol=0)
    stored = weights.stored[f"{NAME}.weight"]
    assert (stored.format, stored.bits) == ("NVFP4 A16", 4 + 8 / 16 + 32 / (ROWS * COLUMNS))

    exponents = torch.randint(120, 130, (ROWS, COLUMNS // 32), generator=random)
    module = {f"{NAME}.weight_packed": bytes_, f"{NAME}.weight_scale": exponents.to(torch.uint8)}
    scheme |= {"strategy": "group", "group_size": 32}
    weights = opened(checkpoint(tmp_path / "mx", module, config(scheme, "mxfp4-pack-quantized")), wide(0))
    exact = values * (2.0 ** (exponents - 127)).repeat_interleave(32, 1)
    assert torch.equal(weights.tensor(f"{NAME}.weight"), exact)
    assert (weights.stored[f"{NAME}.weight"].format, weights.stored[f"{NAME}.weight"].bits) == ("MXFP4 A16", 4 + 8 / 32)


@needs_compressed_tensors
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"transform_config": {"config_groups": {"R1": {}}}}, "are rotated or sparse"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "are rotated or sparse"),
        (
            {"config_groups": {"group_0": {"weights": {"num_bits": "four"}, "targets": ["Linear"]}}},
            "could not be loaded",
        ),
        ({"config_groups": {"group_0": {"weights": INTS, "targets": ["lm_head"]}}}, "not be loaded"),
    ],
)
def test_what_cannot_be_de_quantized_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    state = {"weight": torch.ones(ROWS, COLUMNS), "weight_scale": torch.ones(ROWS, COLUMNS // GROUP)}
    module = packed_by("pack-quantized", INTS, state)
    folder = checkpoint(tmp_path / "bad", module, {**config(INTS, "pack-quantized"), **change})
    with pytest.raises(ModelError, match=says) as refusal:
        opened(folder, wide(0))
    assert "\n" not in str(refusal.value)


@needs_compressed_tensors
def test_experts_have_products_in_the_dtype_of_their_scales(tmp_path: Path) -> None:
    """As Transformers computes them: bfloat16. Other matrices of the same checkpoint are exact."""
    folder = make_mixture(tmp_path, num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    files, stored, exact = load_file(folder / "model.safetensors"), Tensors(), Tensors()
    for name, tensor in files.items():
        if ".layers." not in name or tensor.ndim < 2 or name.endswith("gate.weight"):
            stored[name] = tensor
            continue
        scales = (tensor.reshape(len(tensor), -1, GROUP).abs().amax(-1) / 7).bfloat16()
        steps = (tensor.reshape(len(tensor), -1, GROUP) / scales.float()[..., None]).round().clamp(-8, 7)
        exact[name] = (steps * scales.float()[..., None]).reshape(tensor.shape)
        module = name.removesuffix(".weight")
        stored |= packed_by("pack-quantized", INTS, {"weight": exact[name], "weight_scale": scales.float()}, module)
        stored[f"{module}.weight_scale"] = scales
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    config_file, quantization = folder / "config.json", config(INTS, "pack-quantized")
    quantization["config_groups"]["group_0"]["targets"] = ["Linear"]
    quantization["ignore"] = ["lm_head", "re:.*gate$"]
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "quantization_config": quantization}))
    down, q = "model.layers.0.mlp.experts.down_proj", "model.layers.0.self_attn.q_proj.weight"
    gate_up, k = down.replace("down", "gate_up"), q.replace("q_proj", "k_proj")
    other = {name.replace("block_sparse_moe", "mlp"): files[name] for name in files if "experts" not in name}
    weights = opened(str(folder), {**other, gate_up: torch.zeros(4, 128, 64), down: torch.zeros(4, 64, 64)}, "mixtral")
    assert all(torch.equal(weights.tensor(name), exact[name]) for name in (q, k))
    experts = [exact[f"model.layers.0.block_sparse_moe.experts.{i}.w2.weight"] for i in range(4)]
    assert torch.equal(weights.tensor(down), torch.stack(experts).bfloat16().float())
    assert (weights.stored[down].format, weights.stored[q].format) == (f"W4A16 g{GROUP}", f"W4A16 g{GROUP}")


@needs_compressed_tensors
def test_a_damaged_module_is_refused(tmp_path: Path) -> None:
    state = {"weight": torch.ones(ROWS, COLUMNS), "weight_scale": torch.ones(ROWS, COLUMNS // GROUP)}
    module = packed_by("pack-quantized", INTS, state)
    for number, scale in enumerate(({}, {f"{NAME}.weight_scale": torch.ones(ROWS + 1, 5)})):
        damaged = {name: tensor for name, tensor in module.items() if "scale" not in name} | scale
        with pytest.raises(ModelError) as refusal:
            opened(checkpoint(tmp_path / str(number), damaged, config(INTS, "pack-quantized")), wide(0))
        assert "\n" not in str(refusal.value)


@needs_compressed_tensors
def test_a_whole_checkpoint_has_the_bits_of_its_files(small_llama: Path, tmp_path: Path) -> None:
    folder = checkpoint_maker()(str(small_llama), tmp_path / "w4", "w4a16-asym")
    baseline = load_file(small_llama / "model.safetensors")
    weights = opened(str(folder), baseline)
    bits = [(w.bits, baseline[name].numel()) for name, w in weights.stored.items()]
    assert sum(b * n for b, n in bits) / sum(n for _, n in bits) == pytest.approx(inspect(str(folder)).bits_per_weight)
    for name, tensor in baseline.items():
        gap = (weights.tensor(name) - tensor).abs().max()
        assert (0 < gap < 0.2) if ".layers." in name and tensor.ndim == 2 else gap == 0, name


# ── GPTQ and AWQ ─────────────────────────────────────────────────────────────────────────────────────────────────────
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # output j of eight is stored in the four bits of this number


def words(rows: torch.Tensor, place: Callable[[int], int] = int) -> torch.Tensor:
    """Numbers of four bits (lines, n), eight to a 32-bit word along a line; number j of eight at ``place(j)``."""
    eights = rows.long().reshape(len(rows), -1, 8)
    packed = sum(eights[:, :, j] << (4 * place(j)) for j in range(8))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def packed_llama(method: str) -> tuple[Tensors, Tensors]:
    """A model whose layers are packed by the formats' definitions, and scale · (number − zero point)."""
    random, stored, exact = torch.Generator().manual_seed(5), Tensors(), Tensors()
    for name, tensor in llama_tensors(0, hidden=64, inner=96).items():
        if ".layers." not in name or tensor.ndim < 2:
            stored[name] = exact[name] = tensor
            continue
        (outputs, inputs), module = tensor.shape, name.removesuffix(".weight")
        numbers = torch.randint(0, 16, (inputs, outputs), generator=random)
        zeros = torch.randint(1, 16, (inputs // GROUP, outputs), generator=random)
        scales = (torch.rand(zeros.shape, generator=random) * 0.01).half()
        group = torch.arange(inputs) // GROUP
        if method == "gptq":
            group = group[torch.randperm(inputs, generator=random)]  # desc_act
            stored |= {f"{module}.qweight": words(numbers.T).T, f"{module}.qzeros": words(zeros - 1)}
            stored |= {f"{module}.g_idx": group.int()}
        else:
            stored |= {f"{module}.qweight": words(numbers, AWQ_ORDER.__getitem__)}
            stored |= {f"{module}.qzeros": words(zeros, AWQ_ORDER.__getitem__)}
        stored[f"{module}.scales"] = scales
        exact[name] = ((numbers - zeros[group]) * scales.float()[group]).T
    return stored, exact


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_packed_integers_are_rounded_to_float16(tmp_path: Path, method: str) -> None:
    """By the layers of gptqmodel; without it, the extra that brings it is named."""
    stored, exact = packed_llama(method)
    quantization = {"quant_method": method, "bits": 4, "group_size": GROUP, "desc_act": method == "gptq"}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    folder = save(tmp_path / method, stored, quantization_config=quantization, **sizes)
    if find_spec("gptqmodel") is None:
        with pytest.raises(
            ModelError, match=rf"is quantized with {method}, and Transformers needs gptqmodel"
        ) as refusal:
            opened(folder, exact)
        assert "[quantized]" in refusal.value.fix
        return
    weights = opened(folder, exact)
    assert {name: weight.shape for name, weight in weights.stored.items()} == shapes_of(exact)
    for name, tensor in exact.items():
        assert torch.equal(weights.tensor(name), tensor if tensor is stored.get(name) else tensor.half().float()), name
    packed = weights.stored[f"{NAME}.weight"]
    assert packed.format == f"{method.upper()} 4 bit g{GROUP}"
    assert packed.bits == pytest.approx(4 + 20 / GROUP + (32 / 64 if method == "gptq" else 0))
