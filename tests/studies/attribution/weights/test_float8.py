"""Checkpoints of the method fp8, against longhand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scoremode.errors import ModelError
from tests.studies.attribution.weights.checkpoints import Tensors, llama_tensors, opened, save

NAME = "model.layers.1.mlp.down_proj.weight"


def checkpoint(folder: Path, module: Tensors, **quantization: Any) -> str:
    tensors = {name: tensor for name, tensor in llama_tensors(1).items() if name != NAME}
    return save(folder, {**tensors, **module}, quantization_config={"quant_method": "fp8", **quantization})


def test_one_scale_for_each_block_and_blocks_that_are_cut_off(tmp_path: Path) -> None:
    numbers = torch.randn(10, 7).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2) + 0.1
    expected = torch.empty(10, 7)
    for row in range(10):
        for column in range(7):
            expected[row, column] = numbers[row, column].float() * scales[row // 4, column // 5]
    module = {NAME: numbers, f"{NAME}_scale_inv": scales}
    folder = checkpoint(tmp_path / "blocks", module, weight_block_size=[4, 5])
    found = opened(folder, {**llama_tensors(), NAME: torch.zeros(10, 7)})
    assert torch.equal(found.tensor(NAME), expected)
    assert torch.equal(found.tensor("lm_head.weight"), llama_tensors(1)["lm_head.weight"])
    assert found.stored[NAME].format == "FP8 blocks 4×5"
    assert found.stored[NAME].bits == pytest.approx(8 + 6 * 32 / 70)
    assert "also rounds activations" in found.notes[0]


@pytest.mark.parametrize("shape", [(), (1,), (10, 1)])
def test_one_scale_for_a_matrix_or_a_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    numbers, scale = torch.randn(10, 7).to(torch.float8_e4m3fn), torch.rand(shape) + 0.1
    module = {NAME: numbers, f"{NAME}_scale": scale, NAME.replace("weight", "input_scale"): torch.ones(())}
    found = opened(checkpoint(tmp_path / "whole", module), {**llama_tensors(), NAME: torch.zeros(10, 7)})
    assert torch.equal(found.tensor(NAME), numbers.float() * scale)


@pytest.mark.parametrize(
    ("scales", "config", "says"),
    [
        ({}, {}, "do not fit its config"),
        ({f"{NAME}_scale_inv": torch.ones(2, 2)}, {"weight_block_size": [4, 5]}, "do not fit its config"),
        ({f"{NAME}_scale_inv": torch.ones(3, 2)}, {"weight_block_size": [4]}, "as the size of a block"),
    ],
)
def test_what_is_refused(tmp_path: Path, scales: Tensors, config: dict[str, Any], says: str) -> None:
    module = {NAME: torch.randn(10, 7).to(torch.float8_e4m3fn), **scales}
    with pytest.raises(ModelError, match=says):
        opened(checkpoint(tmp_path / "bad", module, **config), {**llama_tensors(), NAME: torch.zeros(10, 7)})
