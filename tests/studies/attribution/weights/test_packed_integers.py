"""GPTQ and AWQ, packed here by their definitions: one number after the other, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scoremode.errors import ModelError
from tests.studies.attribution.weights.checkpoints import Tensors, llama_tensors, opened, save

NAME = "model.layers.1.mlp.down_proj"
AWQ_BITS = (0, 4, 1, 5, 2, 6, 3, 7)  # output j of eight is stored in the four bits of this number


def packed(columns: list[list[int]], bits: int) -> torch.Tensor:
    """Each list of numbers as a stream of bits in 32-bit words, the lowest bit first: (words, lists)."""
    streams = []
    for numbers in columns:
        stream = sum(number << (bits * place) for place, number in enumerate(numbers))
        count = -(-len(numbers) * bits // 32)
        words = [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(count)]
        streams.append(np.array(words, np.uint32).view(np.int32))
    return torch.from_numpy(np.stack(streams, axis=1).copy())


def gptq(
    inputs: int, outputs: int, bits: int, group: int, *, version: int = 1, order: bool = False
) -> tuple[Tensors, torch.Tensor]:
    """The tensors of a module, and its weight by the definition: scale · (number − zero point)."""
    random = np.random.default_rng(inputs + bits)
    groups = -(-inputs // group) if group > 0 else 1
    numbers = random.integers(0, 2**bits, (inputs, outputs))
    zeros = random.integers(0, 2**bits, (groups, outputs))
    scales = random.uniform(0.01, 0.1, (groups, outputs)).astype(np.float16)
    g_idx = np.arange(inputs) // group if group > 0 else np.zeros(inputs, np.int64)
    g_idx = random.permutation(g_idx) if order else g_idx
    weight = np.zeros((outputs, inputs), np.float32)
    for i in range(inputs):
        for o in range(outputs):
            g = int(g_idx[i])
            weight[o, i] = np.float32(scales[g, o]) * np.float32(int(numbers[i, o]) - int(zeros[g, o]))
    less = (zeros - version) % 2**bits  # the first version stores zero points less 1
    tensors = {
        f"{NAME}.qweight": packed(numbers.T.tolist(), bits),
        f"{NAME}.qzeros": packed(less.tolist(), bits).T.contiguous(),
        f"{NAME}.scales": torch.from_numpy(scales),
        f"{NAME}.g_idx": torch.from_numpy(g_idx.astype(np.int32)),
    }
    return tensors, torch.from_numpy(weight)


def checkpoint(tmp_path: Path, module: Tensors, **quantization: Any) -> str:
    tensors = {**llama_tensors(1), **module}
    tensors.pop(f"{NAME}.weight")
    return save(tmp_path / "packed", tensors, quantization_config=quantization)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("group", "order", "version"), [(16, False, 1), (16, True, 0), (-1, False, 1)])
def test_gptq(tmp_path: Path, bits: int, group: int, order: bool, version: int) -> None:
    """The second version stores zero points as they are."""
    module, weight = gptq(96, 32, bits, group, order=order, version=version)
    kind = "gptq" if version else "gptq_v2"
    folder = checkpoint(tmp_path, module, quant_method="gptq", bits=bits, group_size=group, checkpoint_format=kind)
    found = opened(folder, {**llama_tensors(), f"{NAME}.weight": torch.zeros(32, 96)})
    assert torch.equal(found.tensor(f"{NAME}.weight"), weight)
    assert torch.equal(found.tensor("lm_head.weight"), llama_tensors(1)["lm_head.weight"])
    stored = sum(tensor.numel() * tensor.itemsize for tensor in module.values())
    assert found.stored[f"{NAME}.weight"].bits == 8 * stored / (32 * 96)
    assert found.stored[f"{NAME}.weight"].format == f"GPTQ {bits} bit" + ("" if group < 0 else f" g{group}")


def test_awq(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    inputs, outputs, group = 24, 16, 8
    numbers = random.integers(0, 16, (inputs, outputs))
    zeros = random.integers(0, 16, (inputs // group, outputs))
    scales = random.uniform(0.01, 0.1, (inputs // group, outputs)).astype(np.float16)
    weight = np.zeros((outputs, inputs), np.float32)
    for i in range(inputs):
        for o in range(outputs):
            steps = np.float32(int(numbers[i, o]) - int(zeros[i // group, o]))
            weight[o, i] = np.float32(scales[i // group, o]) * steps

    def words(rows: Any) -> torch.Tensor:
        found = np.zeros((len(rows), outputs // 8), np.uint32)
        for row, values in enumerate(rows):
            for output, value in enumerate(values):
                found[row, output // 8] |= np.uint32(int(value) << (4 * AWQ_BITS[output % 8]))
        return torch.from_numpy(found.view(np.int32))

    module = {
        f"{NAME}.qweight": words(numbers),
        f"{NAME}.qzeros": words(zeros),
        f"{NAME}.scales": torch.from_numpy(scales),
    }
    folder = checkpoint(tmp_path, module, quant_method="awq", bits=4, group_size=group, version="gemm")
    found = opened(folder, {**llama_tensors(), f"{NAME}.weight": torch.zeros(outputs, inputs)})
    assert torch.equal(found.tensor(f"{NAME}.weight"), torch.from_numpy(weight))
    assert found.stored[f"{NAME}.weight"].format == "AWQ 4 bit g8"
    assert found.stored[f"{NAME}.weight"].bits == 4 + (16 + 4) / group


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "gptq", "bits": 5, "group_size": 16}, "is GPTQ with 5 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "gives 0 as the size of a group"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "do not fit its config"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 16}, "do not fit its config"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "marlin"}, "in the version marlin"),
        ({"quant_method": "awq", "bits": 8, "group_size": 16}, "is AWQ with 8 bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemv"}, "in the version gemv"),
    ],
)
def test_configs_that_do_not_fit_are_refused(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    module, _ = gptq(96, 32, 4, 16)
    with pytest.raises(ModelError, match=says):
        opened(checkpoint(tmp_path, module, **config), {**llama_tensors(), f"{NAME}.weight": torch.zeros(32, 96)})


def test_groups_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    module, _ = gptq(96, 32, 4, 16)
    module[f"{NAME}.g_idx"][5] = 99
    found = opened(
        checkpoint(tmp_path, module, quant_method="gptq", bits=4, group_size=16),
        {**llama_tensors(), f"{NAME}.weight": torch.zeros(32, 96)},
    )
    with pytest.raises(ModelError, match="do not fit its config"):
        found.tensor(f"{NAME}.weight")
