"""Configs that do not belong to their weights: refused or noted, never ignored silently."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scoremode.core.models.facts import check_layers
from scoremode.core.verbs.ppl import ppl
from scoremode.errors import ModelError
from tests.command_line import Command, Refused

TEXT = "The quick brown fox jumps over the lazy dog. " * 6


def named(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{i}.norm.weight" for i in range(count)]


@pytest.fixture
def changed(tiny: Path, tmp_path: Path) -> Any:
    """The small model with another config, other tensors, or both."""

    def make(config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> str:
        folder = shutil.copytree(tiny, tmp_path / "changed")
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **(config or {})}))
        weights = {**load_file(folder / "model.safetensors"), **tensors}
        kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        return str(folder)

    return make


# ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "prefix",
    ["model.layers", "transformer.h", "h", "gpt_neox.layers", "language_model.model.layers", "model.decoder.layers"],
)
def test_layers_are_counted_under_any_name(prefix: str) -> None:
    assert check_layers("m", {"num_hidden_layers": 3}, named(prefix, 3)) == []
    with pytest.raises(ModelError, match="m has weights for 3 layers and a config for 2"):
        check_layers("m", {"n_layer": 2}, named(prefix, 3))
    with pytest.raises(ModelError, match="m has weights for 3 layers and a config for 4"):
        check_layers("m", {"num_hidden_layers": 4}, named(prefix, 3))


def test_experts_towers_and_unknown_names_are_no_layers() -> None:
    tensors = [*named("model.layers", 2), "model.layers.1.mlp.experts.7.w1.weight"]
    tensors += named("model.vision_tower.vision_model.encoder.layers", 9) + named("visual.blocks", 9)
    tensors += named("mtp.layers", 1) + named("model.audio_tower.layers", 5)
    assert check_layers("m", {"num_hidden_layers": 2}, tensors) == []
    assert check_layers("m", {"num_hidden_layers": 2}, ["a.b", "c"]) == []
    assert check_layers("m", {}, named("model.layers", 2)) == []


def test_layers_that_guess_further_tokens_are_noted() -> None:
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (note,) = check_layers("m", config, named("model.layers", 3))
    assert note == "layers 2 to 2 of the checkpoint predict further tokens and are not used"
    with pytest.raises(ModelError):
        check_layers("m", config, named("model.layers", 4))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"num_hidden_layers": 1}, "has weights for 2 layers and a config for 1"),
        ({"num_hidden_layers": 3}, "has weights for 2 layers and a config for 3"),
        ({"num_hidden_layers": 0}, "gives 0 as the number of layers"),
        ({"num_hidden_layers": -1}, "gives -1 as the number of layers"),
        ({"text_config": [1]}, "is not an object; download the model again"),
    ],
)
def test_a_config_with_other_layers_is_refused_before_weights_are_loaded(
    changed: Any, refused: Refused, config: dict[str, Any], problem: str
) -> None:
    """With one layer less, another model would be scored silently."""
    assert problem in refused("ppl", changed(config), "--text", TEXT)


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("config", "tensors", "words"),
    [
        ({}, {"model.layers.1.mlp.up_proj.weight": None}, r"lacks model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"intermediate_size": 96}, {}, "have different shapes than its config says"),
    ],
)
def test_missing_tensors_and_other_shapes_are_refused(
    changed: Any, config: dict[str, int], tensors: dict[str, None], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        ppl(changed(config, **tensors), text=TEXT)


def test_tensors_that_are_not_used_are_said_and_kept(changed: Any, tmp_path: Path, command: Command) -> None:
    extra = {f"second_head.{i}": torch.zeros(2) for i in range(4)}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)  # its class drops these silently
    run = ppl(changed(**extra), text=TEXT, out=tmp_path / "run")
    (note,) = run.manifest["model_notes"]
    assert note.startswith("5 tensors of the checkpoint are not used: model.layers.0.self_attn.rotary_emb.inv_freq, ")
    assert note in run.manifest["notes"]
    assert "5 tensors of the checkpoint are not used" in " ".join(command("report", tmp_path / "run").out.split())


def test_notes_of_either_model_stand_below_a_comparison(changed: Any, tiny: Path, command: Command) -> None:
    said = command("compare", tiny, changed(second_head=torch.zeros(2)), "--text", TEXT)
    assert "changed: 1 tensor of the checkpoint is not used: second_head" in " ".join(said.out.split())


# ── quantization, vocabulary, empty weights ──────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("quantization", [{"quant_method": "foo"}, {"bits": 3}, "awq", {"quant_method": ["awq"]}])
def test_an_unknown_quantization_is_refused(changed: Any, quantization: Any) -> None:
    """Transformers would load packed weights as if they were plain, or plain ones as if they had been packed."""
    with pytest.raises(ModelError, match="quantization"):
        ppl(changed({"quantization_config": quantization}), text=TEXT)


def test_ids_without_a_token_are_noted(changed: Any, tiny: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    larger = {name: torch.cat([weights[name], torch.zeros(89, 48)]) for name in names}
    run = ppl(changed({"vocab_size": 400}, **larger), text=TEXT)
    assert run.manifest["model_notes"] == ["89 of the model's 400 ids have no token, and may be given probability"]


def test_empty_weights_are_noted(changed: Any, tiny: Path) -> None:
    run = ppl(changed(**{n: torch.zeros_like(w) for n, w in load_file(tiny / "model.safetensors").items()}), text=TEXT)
    assert run.perplexity.value == pytest.approx(311)
    assert any(note.startswith("all logits are equal") for note in run.manifest["notes"])
