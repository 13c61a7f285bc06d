"""Plain checkpoints and fine-tunes: found by name, joined or split where files differ, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scoremode.errors import ModelError
from tests.studies.attribution.weights.checkpoints import Tensors, assert_equal, llama_tensors, opened, save


def test_a_fine_tune_is_read_in_float32_with_the_bits_of_its_files(tmp_path: Path) -> None:
    tuned = {name: tensor.bfloat16() for name, tensor in llama_tensors(1).items()}
    tuned["model.norm.weight"] = tuned["model.norm.weight"].float()
    found = opened(save(tmp_path / "tuned", tuned), llama_tensors())
    assert_equal(found, tuned)
    stored = found.stored["lm_head.weight"]
    assert (stored.bits, stored.format, found.stored["model.norm.weight"].bits) == (16, "bfloat16", 32)
    assert found.notes == ()


def test_tied_heads(tmp_path: Path) -> None:
    """A head that is not stored is the embedding; a head that the baseline does not have must be the embedding."""
    tied, whole = llama_tensors(2, tied=True), llama_tensors(3)
    found = opened(save(tmp_path / "tied", tied), whole)
    assert torch.equal(found.tensor("lm_head.weight"), tied["model.embed_tokens.weight"])
    with pytest.raises(ModelError, match=r"no tensor for the baseline's lm_head.weight"):
        opened(save(tmp_path / "untied", tied, tie_word_embeddings=False), whole)
    twice = {**tied, "lm_head.weight": tied["model.embed_tokens.weight"].clone()}
    assert_equal(opened(save(tmp_path / "twice", twice), tied), tied)
    with pytest.raises(ModelError, match=r"has a head of its own \(lm_head.weight\)"):
        opened(save(tmp_path / "own", whole), tied)


def fused(tensors: Tensors) -> Tensors:
    """q, k and v in one matrix, gate and up in one."""
    found = dict(tensors)
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        found[f"{attention}qkv_proj.weight"] = torch.cat([found.pop(f"{attention}{x}_proj.weight") for x in "qkv"])
        pair = [found.pop(f"{mlp}{x}_proj.weight") for x in ("gate", "up")]
        found[f"{mlp}gate_up_proj.weight"] = torch.cat(pair)
    return found


def test_fused_matrices_are_split_and_split_ones_are_fused(tmp_path: Path) -> None:
    split = llama_tensors(4)
    assert_equal(opened(save(tmp_path / "fused", fused(split)), llama_tensors()), split)
    assert_equal(opened(save(tmp_path / "split", split), fused(llama_tensors())), fused(split))
    wrong = {**fused(split), "model.layers.1.self_attn.qkv_proj.weight": torch.zeros(33, 16)}
    with pytest.raises(ModelError, match=r"no tensor for the baseline's model.layers.1.self_attn.q_proj.weight"):
        opened(save(tmp_path / "wrong", wrong), llama_tensors())


@pytest.mark.parametrize(
    ("module", "leaves"),
    [("mlp.experts", ("gate_proj", "up_proj", "down_proj")), ("block_sparse_moe.experts", ("w1", "w3", "w2"))],
)
def test_experts_that_are_stored_one_by_one_become_one_tensor(
    tmp_path: Path, module: str, leaves: tuple[str, str, str]
) -> None:
    baseline = {"model.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 10, 4)}
    baseline["model.layers.0.mlp.experts.down_proj"] = torch.randn(3, 4, 5)
    gate_up, down = baseline.values()
    stored: Tensors = {}
    for expert in range(3):
        pieces = (gate_up[expert, :5], gate_up[expert, 5:], down[expert])
        names = [f"model.layers.0.{module}.{expert}.{leaf}.weight" for leaf in leaves]
        stored |= dict(zip(names, pieces, strict=True))
    found = opened(save(tmp_path / "experts", stored, num_hidden_layers=1), baseline)
    assert_equal(found, baseline)
    more = {**stored, f"model.layers.0.{module}.3.{leaves[0]}.weight": torch.zeros(5, 4)}
    with pytest.raises(ModelError, match="no tensor for the baseline's"):
        opened(save(tmp_path / "more", more, num_hidden_layers=1), baseline)


def test_older_prefixes_are_one_name_and_what_is_not_used_is_noted(tmp_path: Path) -> None:
    weights = llama_tensors(5)
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    more = {"layers.0.rotary_emb.inv_freq": torch.ones(2), "visual.patch.weight": torch.ones(2)}
    found = opened(save(tmp_path / "bare", {**bare, **more}), weights)
    assert_equal(found, weights)
    assert found.notes == ("1 tensor of the checkpoint is not used: visual.patch.weight",)


def test_an_emulated_quantization_is_noted(tmp_path: Path) -> None:
    found = opened(save(tmp_path / "emulated", llama_tensors(), bits_per_weight=4.5), llama_tensors())
    assert "emulates a quantization of 4.5 bits per weight" in found.notes[0]


def without(tensors: Tensors, name: str) -> Tensors:
    return {other: tensor for other, tensor in tensors.items() if other != name}


def test_refusals_name_what_differs(tmp_path: Path) -> None:
    baseline = llama_tensors()
    wider = {**baseline, "model.layers.0.mlp.up_proj.weight": torch.zeros(25, 16)}
    other = {"quantization_config": {"quant_method": "fp8"}}
    cases: list[tuple[Tensors, dict[str, Any], str]] = [
        (baseline, {"model_type": "qwen2"}, "is a qwen2 model, and the baseline is a llama"),
        (llama_tensors(layers=3), {"num_hidden_layers": 3}, "has 3 layers, and the baseline has 2"),
        (without(baseline, "model.layers.1.mlp.up_proj.weight"), {}, "no tensor for the baseline's model.layers.1"),
        (wider, {}, "has the shape 25 × 16, and the baseline's"),
        (baseline, other, "quantized by the method 'fp8', whose weights scoremode cannot read"),
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
