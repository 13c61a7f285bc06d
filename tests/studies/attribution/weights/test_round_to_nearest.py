"""rtn:BITS:GROUP against a longhand version, number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scoremode.errors import ModelError, OptionError
from scoremode.studies.attribution.weight_formats.round_to_nearest import round_groups
from tests.studies.attribution.weights.checkpoints import llama_tensors, opened


def longhand(row: list[float], bits: int, group: int) -> list[float]:
    """Each group: the largest number becomes the largest step; the scale is rounded to float16."""
    found = []
    for begin in range(0, len(row), group):
        numbers = [np.float32(x) for x in row[begin : begin + group]]
        largest = 2 ** (bits - 1) - 1
        scale = np.float32(np.float16(max(abs(x) for x in numbers) / np.float32(largest)))
        for number in numbers:
            step = 0.0 if scale == 0 else float(np.round(number / scale))  # half to even
            found.append(float(np.float32(min(max(step, -largest - 1), largest)) * scale))
    return found


def longhand_asymmetric(row: list[float], bits: int, group: int) -> list[float]:
    """Each group: the smallest number is step 0, the largest the last step; scale and smallest in float16."""
    found = []
    for begin in range(0, len(row), group):
        numbers = [np.float32(x) for x in row[begin : begin + group]]
        least, last = np.float32(np.float16(min(numbers))), 2**bits - 1
        scale = np.float32(np.float16((max(numbers) - min(numbers)) / np.float32(last)))
        for number in numbers:
            step = 0.0 if scale == 0 else float(np.round((number - least) / scale))
            found.append(float(np.float32(min(max(step, 0), last)) * scale + least))
    return found


@pytest.mark.parametrize(("bits", "group", "columns"), [(2, 4, 12), (3, 32, 64), (4, 5, 17), (6, 32, 33), (8, 64, 7)])
def test_against_longhand_with_groups_that_do_not_divide_the_row(bits: int, group: int, columns: int) -> None:
    weight = torch.randn(3, columns, generator=torch.Generator().manual_seed(bits)) * 0.05
    weight[1] = 0
    weight[2, 0] = 1e-9  # its scale is 0 in float16 if the group is small
    expected = torch.tensor([longhand(row, bits, group) for row in weight.tolist()])
    assert torch.equal(round_groups(weight, bits, group), expected)
    weight[0] += 0.3  # all numbers of a group on one side of zero
    expected = torch.tensor([longhand_asymmetric(row, bits, group) for row in weight.tolist()])
    assert torch.equal(round_groups(weight, bits, group, asymmetric=True), expected)


def test_only_matrices_of_layers_are_rounded_unless_all_are_asked_for() -> None:
    baseline = llama_tensors()
    found = opened("rtn:4:8", baseline)
    rounded = {name for name in baseline if not torch.equal(found.tensor(name), baseline[name])}
    assert rounded == {name for name, tensor in baseline.items() if ".layers." in name and tensor.dim() == 2}
    assert found.stored["model.layers.0.mlp.down_proj.weight"].bits == 4 + 16 / 8
    assert found.stored["lm_head.weight"].bits == 32
    assert found.notes == (
        "rtn:4:8 is the baseline rounded to nearest; embedding, head, norms and biases are unchanged",
    )
    wider = opened("rtn:4:8:asym", baseline).stored["model.layers.0.mlp.down_proj.weight"]
    assert (wider.bits, wider.format) == (4 + 32 / 8, "rtn 4 bit g8 asym")
    both = opened("rtn:4:8:all", baseline)
    assert not torch.equal(both.tensor("lm_head.weight"), baseline["lm_head.weight"])
    assert both.stored["model.embed_tokens.weight"].format == "rtn 4 bit g8"
    assert torch.equal(both.tensor("model.norm.weight"), baseline["model.norm.weight"])


def test_routers_of_experts_stay() -> None:
    names = ("mlp.gate.weight", "mlp.shared_expert_gate.weight", "mlp.router.weight", "mlp.gate_proj.weight")
    baseline = {f"model.layers.0.{name}": torch.randn(4, 8) for name in names}
    baseline["model.layers.0.mlp.experts.gate_up_proj"] = torch.randn(2, 6, 8)
    found = opened("rtn:2:8", baseline)
    rounded = {name for name in baseline if not torch.equal(found.tensor(name), baseline[name])}
    assert rounded == {"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"}


def test_a_group_that_does_not_divide_the_row_costs_one_scale_more() -> None:
    found = opened("rtn:3:10", llama_tensors())
    assert found.stored["model.layers.0.mlp.up_proj.weight"].bits == 3 + 16 * 2 / 16
    assert found.stored["model.layers.0.mlp.down_proj.weight"].bits == 3 + 16 * 3 / 24


def test_matrices_that_are_stored_input_first_are_grouped_along_their_input() -> None:
    weight = torch.randn(8, 6)
    found = opened("rtn:3:4", {"h.0.mlp.c_fc.weight": weight}, "gpt2")
    assert torch.equal(found.tensor("h.0.mlp.c_fc.weight"), round_groups(weight.T, 3, 4).T)
    assert found.stored["h.0.mlp.c_fc.weight"].bits == 3 + 16 * 2 / 8


@pytest.mark.parametrize(
    "name",
    ["rtn:", "rtn:4", "rtn:4:32:most", "rtn:4:32:all:asym", "rtn:1:32", "rtn:17:32", "rtn:4:0", "rtn:-4:32", "rtn:4:x"],
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(OptionError) as refusal:
        opened(name, llama_tensors())
    assert "as in rtn:4:32" in refusal.value.fix


def test_a_baseline_without_matrices_is_refused() -> None:
    with pytest.raises(ModelError, match="no matrices"):
        opened("rtn:4:32", {"model.norm.weight": torch.ones(4)})
