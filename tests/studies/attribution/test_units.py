"""Units: every parameter is in exactly one, whatever a model is divided by."""

from __future__ import annotations

import pytest

from scoremode.studies.attribution.units import BY, units_of

LLAMA = {
    "model.embed_tokens.weight": (9, 4),
    **{
        f"model.layers.{i}.{name}": shape
        for i in range(2)
        for name, shape in {
            "self_attn.q_proj.weight": (4, 4),
            "self_attn.q_proj.bias": (4,),
            "self_attn.q_norm.weight": (2,),
            "mlp.up_proj.weight": (8, 4),
            "input_layernorm.weight": (4,),
        }.items()
    },
    "model.norm.weight": (4,),
    "lm_head.weight": (9, 4),
}


def names(shapes: dict[str, tuple[int, ...]], by: str, layers: str = "model.layers") -> list[str]:
    return [unit.name for unit in units_of(shapes, by, layers)]


@pytest.mark.parametrize("by", BY)
def test_every_parameter_is_in_one_unit(by: str) -> None:
    units = units_of(LLAMA, by)
    tensors = [name for unit in units for name in unit.tensors]
    assert sorted(tensors) == sorted(LLAMA)
    assert sum(unit.weights for unit in units) == 36 + 2 * (16 + 4 + 2 + 32 + 4) + 4 + 36


def test_units_have_names_for_people() -> None:
    assert names(LLAMA, "layer") == ["embedding", "layer 0", "layer 1", "last norm", "head"]
    assert names(LLAMA, "kind") == ["embedding", "q_proj", "norms", "up_proj", "head"]
    matrices = ["layer 0 q_proj", "layer 0 norms", "layer 0 up_proj"]
    more = [name.replace("0", "1") for name in matrices]
    assert names(LLAMA, "matrix") == ["embedding", *matrices, *more, "last norm", "head"]


def test_a_bias_belongs_to_its_matrix() -> None:
    q = next(unit for unit in units_of(LLAMA, "matrix") if unit.name == "layer 1 q_proj")
    assert q.tensors == ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.bias")
    assert (q.layer, q.kind, q.weights) == (1, "q_proj", 20)


def test_experts_and_modules_of_one_name() -> None:
    shapes = {
        "model.layers.0.mlp.experts.0.w1.weight": (4, 4),
        "model.layers.0.mlp.experts.1.w1.weight": (4, 4),
        "model.layers.0.mlp.experts.down_proj": (2, 4, 4),
        "model.layers.0.mlp.experts.down_proj_bias": (2, 4),
        "model.layers.0.mlp.shared_expert.up_proj.weight": (4, 4),
        "model.layers.0.mlp.up_proj.weight": (4, 4),
    }
    kinds = ["experts.w1", "experts.down_proj", "shared_expert.up_proj", "mlp.up_proj"]
    assert names(shapes, "kind") == kinds
    assert names(shapes, "matrix") == [f"layer 0 {kind}" for kind in kinds]


def test_other_architectures() -> None:
    gpt2 = {
        "transformer.wte.weight": (9, 4),
        "transformer.wpe.weight": (5, 4),
        "transformer.h.0.ln_1.weight": (4,),
        "transformer.h.0.ln_1.bias": (4,),
        "transformer.h.0.attn.c_attn.weight": (4, 12),
        "transformer.h.0.attn.c_attn.bias": (12,),
        "transformer.ln_f.weight": (4,),
    }
    assert names(gpt2, "matrix", "transformer.h") == [
        *("embedding and head", "wpe", "layer 0 norms", "layer 0 c_attn", "last norm")
    ]
