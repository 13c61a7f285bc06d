"""Recipes in the words of the tools: read back by YAML, by regular expressions and by the libraries that apply them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from scoremode.studies.attribution.tool_recipes import (
    Parameters,
    arguments_of,
    exllamav3_recipe,
    llama_quantize_recipe,
    llm_compressor_recipe,
    type_of,
    write_recipes,
)
from scoremode.studies.attribution.weight_formats.stored import StoredWeight

MODULES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
BITS = {"rtn 4 bit g32": 4.5, "rtn 8 bit g32": 8.5, "bfloat16": 16.0, "float32": 32.0, "Q4_K": 4.5, "Q6_K": 6.5625}


def mixture(formats: dict[str, str], layers: int = 12) -> Parameters:
    """A model whose parameters have these formats, by the ends of their names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (100, 512)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{module}.weight": (512, 512) for module in MODULES}
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (512,)
    shapes |= {"model.norm.weight": (512,), "lm_head.weight": (100, 512)}
    found = {}
    for name, shape in shapes.items():
        kind = next((kind for end, kind in formats.items() if re.search(end, name)), "bfloat16")
        found[name] = StoredWeight(name, shape, BITS.get(kind, 4.5), kind)
    return found


def modifier(chosen: Parameters) -> dict[str, Any]:
    (stage,) = yaml.safe_load(llm_compressor_recipe(chosen).text).values()
    found: dict[str, Any] = stage["quant_modifiers"]["QuantizationModifier"]
    return found


def matches(targets: list[str], module: str) -> bool:
    """As compressed-tensors matches names."""
    return any(re.match(t[3:], module) is not None if t.startswith("re:") else t == module for t in targets)


def type_for(recipe: str, tensor: str) -> str | None:
    """As llama-quantize reads it: words, split at the first =; the first expression that matches counts."""
    words = (word.partition("=") for word in recipe.split())
    return next((kind for pattern, _, kind in words if re.search(pattern, tensor)), None)


def test_llm_compressor_gets_each_module_in_one_group_or_in_none() -> None:
    chosen = mixture({r"layers\.1\..*weight$": "rtn 8 bit g32", r"layers\.[02-9]\.": "rtn 4 bit g32"})
    found = modifier(chosen)
    bits = {name: group["weights"]["num_bits"] for name, group in found["config_groups"].items()}
    for weight in (one for one in chosen.values() if len(one.shape) > 1):
        module = weight.name.removesuffix(".weight")
        groups = [bits[name] for name, group in found["config_groups"].items() if matches(group["targets"], module)]
        expected = {"rtn 4 bit g32": [4], "rtn 8 bit g32": [8], "bfloat16": []}[weight.format]
        assert groups == expected, module
        assert matches(found["ignore"], module) == (not expected and "embed" not in module)
    assert found["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert modifier(mixture({"embed": "Q6_K"}))["config_groups"] == {}


def test_llm_compressors_groups_are_what_compressed_tensors_understands() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig

    formats = (
        *("rtn 4 bit g32", "W4A16 asym g128", "W8A8", "FP8", "FP8 A16", "NVFP4", "MXFP4 A16", "GPTQ 4 bit g128"),
        "Q4_K",
    )
    found = modifier(mixture({rf"layers\.{layer}\.": kind for layer, kind in enumerate(formats)}, layers=9))
    config = QuantizationConfig.model_validate({"config_groups": found["config_groups"], "ignore": found["ignore"]})
    groups = list(config.config_groups.values())
    assert len(groups) == len(formats) - 1, "FP8 with and without activations is one: weights only"
    assert {g.weights.num_bits for g in groups} == {4, 8}
    assert not any(g.input_activations for g in groups)
    fours = [g.weights.group_size for g in groups if g.weights.symmetric and g.weights.num_bits == 4]
    assert sorted(fours) == [16, 32, 32, 128]


def test_llama_quantize_gets_a_line_for_each_matrix() -> None:
    chosen = mixture({r"layers\.1\.": "Q6_K", "lm_head": "Q6_K", r"0\.mlp": "rtn 4 bit g32", "down_proj": "Q4_K"})
    recipe = llama_quantize_recipe("llama", chosen)
    expected = {
        "blk.1.attn_q.weight": "q6_k",
        "blk.11.attn_q.weight": "bf16",
        "blk.0.ffn_down.weight": "q4_0",
        "blk.11.ffn_down.weight": "q4_k",
        "output.weight": "q6_k",
        "token_embd.weight": "bf16",
        "blk.0.attn_norm.weight": None,
        "blk.0.attn_output.weight": None,
    }
    assert {tensor: type_for(recipe.text, tensor) for tensor in expected} == expected
    assert len(recipe.text.splitlines()) == 12 * 3 + 2
    assert [one.tool for one in write_recipes("llama", chosen)] == ["llm-compressor", "ExLlamaV3", "llama-quantize"]
    assert [one.tool for one in write_recipes("mixtral", chosen)] == ["llm-compressor", "llama-quantize"]


def test_formats_that_ggufs_do_not_have_become_the_nearest_type() -> None:
    def near(bits: float, columns: int) -> str:
        return type_of(StoredWeight("w", (8, columns), bits, "other"))

    assert [near(bits, 512) for bits in (2.5, 3.5, 4.25, 5.5, 6.5, 8.1, 16)] == [
        *("Q2_K", "Q3_K", "Q4_0", "Q5_0", "Q6_K", "Q8_0", "F16")
    ]
    assert [near(bits, 576) for bits in (2.5, 6.5, 9)] == ["Q4_0", "Q5_0", "Q8_0"]  # 256 does not divide 576
    assert near(4.5, 7) == "F16"


def test_experts_are_named_one_by_one_and_routers_stay() -> None:
    layer = "model.layers.3.mlp"
    sizes = {f"{layer}.experts.gate_up_proj": (4, 64, 32), f"{layer}.experts.down_proj": (4, 32, 32)}
    chosen = {name: StoredWeight(name, shape, 4.5, "rtn 4 bit g32") for name, shape in sizes.items()}
    chosen[f"{layer}.gate.weight"] = StoredWeight(f"{layer}.gate.weight", (4, 32), 32, "float32")
    found = modifier(chosen)
    (group,) = found["config_groups"].values()
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        assert matches(group["targets"], f"{layer}.experts.17.{leaf}")
    assert not matches(group["targets"], f"{layer}.gate")
    assert matches(found["ignore"], f"{layer}.gate")
    text = llama_quantize_recipe("qwen3moe", chosen).text
    assert {type_for(text, f"blk.3.ffn_{x}_exps.weight") for x in ("gate", "up", "down")} == {"q4_0"}
    assert type_for(text, "blk.3.ffn_gate_inp.weight") is None


@pytest.mark.parametrize(
    ("name", "bits", "group"),
    [("GPTQ 3 bit", 3, None), ("AWQ 4 bit g128", 4, 128), ("W8A8", 8, None), ("IQ3_XXS", 3, 32)],
)
def test_names_of_formats_are_read(name: str, bits: int, group: int | None) -> None:
    found = arguments_of(StoredWeight("w", (4, 4), bits + 0.1, name))
    assert found is not None
    assert (found["num_bits"], found.get("group_size")) == (bits, group)
    assert found["symmetric"] == name.startswith(("GPTQ", "W8"))


def test_exllamav3_takes_tensors_from_conversions_of_other_bits() -> None:
    recipe = exllamav3_recipe(mixture({r"layers\.1\.": "rtn 8 bit g32", "layers": "rtn 4 bit g32", "lm_head": "Q6_K"}))
    found = yaml.safe_load(recipe.text)
    assert found["sources"] == [{"id": f"{bits}bpw", "model_dir": f"model-exl3-{bits}bpw"} for bits in (6, 8)]
    overrides = {entry["key"]: entry["source"] for entry in found["overrides"]}
    assert (overrides["model.layers.1.mlp.down_proj.*"], overrides["lm_head.*"], len(overrides)) == ("8bpw", "6bpw", 4)
    assert "-i model-exl3-4bpw" in recipe.command
    assert yaml.safe_load(exllamav3_recipe(mixture({})).text) == {"sources": [], "overrides": []}


@pytest.mark.parametrize(("kind", "bits"), [("W4A16 g32", 4), ("W8A8", 8), ("bfloat16", 8)])
def test_bits_of_a_conversion_are_not_less_than_those_of_a_format(kind: str, bits: int) -> None:
    assert f"-exl3-{bits}bpw" in exllamav3_recipe(mixture({"weight": kind})).command
