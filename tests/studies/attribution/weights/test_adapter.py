"""LoRA adapters: merged as PEFT merges them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scoremode.errors import ModelError, OptionError
from scoremode.studies.attribution.weights import open_weights
from tests.studies.attribution.weights.checkpoints import Tensors, llama_tensors, opened, shapes_of

NAME = "model.layers.1.mlp.down_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}


def adapter(folder: Path, tensors: Tensors, **config: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return str(folder)


def pair(name: str = NAME, rows: int = 16, columns: int = 24, rank: int = 2) -> Tensors:
    random = torch.Generator().manual_seed(rank)
    return {
        f"base_model.model.{name}.lora_A.weight": torch.randn(rank, columns, generator=random),
        f"base_model.model.{name}.lora_B.weight": torch.randn(rows, rank, generator=random),
    }


def test_one_matrix_changes_by_alpha_over_r_times_b_a(tmp_path: Path) -> None:
    baseline, tensors = llama_tensors(), pair()
    found = opened(adapter(tmp_path / "lora", tensors), baseline)
    a, b = (tensor.double() for tensor in tensors.values())
    expected = baseline[f"{NAME}.weight"].double() + 6 / 2 * (b @ a)
    assert torch.allclose(found.tensor(f"{NAME}.weight").double(), expected, atol=1e-5)
    for name in baseline.keys() - {f"{NAME}.weight"}:
        assert torch.equal(found.tensor(name), baseline[name])
    assert found.stored[f"{NAME}.weight"].format == "float32 + LoRA"
    assert found.stored[f"{NAME}.weight"].bits == 32
    assert "1 of 19 tensors change, none takes more bits" in found.notes[0]


def test_modules_that_are_saved_whole_replace_the_baselines(tmp_path: Path) -> None:
    head = torch.randn(19, 16)
    found = opened(adapter(tmp_path / "lora", {**pair(), "base_model.model.lm_head.weight": head}), llama_tensors())
    assert torch.equal(found.tensor("lm_head.weight"), head)


def test_a_weight_that_is_stored_beside_its_change_is_the_one_that_changes(tmp_path: Path) -> None:
    """PEFT stores an embedding so."""
    own = torch.randn(16, 24)
    tensors = {**pair(), f"base_model.model.{NAME}.base_layer.weight": own}
    found = opened(adapter(tmp_path / "lora", tensors), {**llama_tensors(), f"{NAME}.weight": torch.zeros(16, 24)})
    change = opened(adapter(tmp_path / "change", pair()), {**llama_tensors(), f"{NAME}.weight": torch.zeros(16, 24)})
    assert torch.equal(found.tensor(f"{NAME}.weight"), own + change.tensor(f"{NAME}.weight"))


def test_peft_merges_the_same(tiny: Path, tmp_path: Path) -> None:
    """Bit for bit: ranks and alphas of their own, an embedding, a module that is saved whole, rank-stabilized."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=["q_proj", "down_proj", "embed_tokens"],
        rank_pattern={"layers.1.self_attn.q_proj": 2},
        alpha_pattern={"down_proj": 5},
        modules_to_save=["lm_head"],
        use_rslora=True,
    )
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    wrapped.save_pretrained(tmp_path / "lora")
    merged = dict(wrapped.merge_and_unload().named_parameters())
    baseline = load_file(tiny / "model.safetensors")
    found = opened(str(tmp_path / "lora"), baseline)
    assert set(merged) == set(baseline)
    changed = [name for name in baseline if not torch.equal(merged[name], baseline[name])]
    assert len(changed) == 6
    for name in baseline:
        assert torch.equal(found.tensor(name), merged[name].detach()), name


@pytest.mark.parametrize(
    ("tensors", "config", "says"),
    [
        (pair(), {"peft_type": "LOHA"}, "of the type LOHA, and only LORA"),
        (pair(), {"use_dora": True}, "has use_dora, which scoremode cannot merge"),
        (pair(), {"rank_pattern": {"(": 4}}, "has a pattern that is none"),
        (pair(), {"r": 0}, f"has no rank or no alpha for {NAME}"),
        (
            pair("model.layers.9.mlp.up_proj"),
            {},
            "changes model.layers.9.mlp.up_proj.weight, which the baseline does not",
        ),
        (pair(rows=17), {}, f"has another shape for {NAME}.weight"),
        (dict([pair().popitem()]), {}, f"lacks base_model.model.{NAME}.lora_A.weight"),
    ],
)
def test_what_is_refused(tmp_path: Path, tensors: Tensors, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says) as refusal:
        opened(adapter(tmp_path / "lora", tensors, **config), llama_tensors())
    assert "\n" not in str(refusal.value)


def test_without_a_baseline_or_weights_it_is_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora", pair())
    with pytest.raises(OptionError, match="made from a baseline"):
        open_weights(folder, shapes_of(llama_tensors()))
    (Path(folder) / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model.safetensors"):
        opened(folder, llama_tensors())
