"""Recipes in the words of the tools: read back by YAML, by regular expressions and by the libraries that apply them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from scoremode.studies.attribution.tool_recipes import (
    Mixture,
    exllamav3_recipe,
    llama_quantize_recipe,
    llm_compressor_recipe,
    precision_of,
    type_of,
    write_recipes,
)
from scoremode.studies.attribution.weights import StoredWeight

MODULES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
BITS = {"rtn 4 bit g32": 4.5, "rtn 8 bit g32": 8.5, "bfloat16": 16.0, "float32": 32.0, "Q4_K": 4.5, "Q6_K": 6.5625}


def mixture(formats: dict[str, str], default: str = "bfloat16", model_type: str = "llama", layers: int = 12) -> Mixture:
    """A model whose parameters have these formats, by the ends of their names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (100, 512)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{module}.weight": (512, 512) for module in MODULES}
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (512,)
    shapes |= {"model.norm.weight": (512,), "lm_head.weight": (100, 512)}
    found = {}
    for name, shape in shapes.items():
        kind = next((kind for end, kind in formats.items() if re.search(end, name)), default)
        found[name] = StoredWeight(name, shape, BITS.get(kind, 4.5), kind)
    return Mixture(model_type, found)


# ── llm-compressor ───────────────────────────────────────────────────────────────────────────────────────────────────
def modifier(recipe: str) -> dict[str, Any]:
    (stage,) = yaml.safe_load(recipe).values()
    found: dict[str, Any] = stage["quant_modifiers"]["QuantizationModifier"]
    return found


def matches(targets: list[str], module: str) -> bool:
    """As compressed-tensors matches names."""
    return any(re.match(t[3:], module) is not None if t.startswith("re:") else t == module for t in targets)


def test_llm_compressor_gets_each_module_in_one_group_or_in_none() -> None:
    chosen = mixture({r"layers\.1\..*weight$": "rtn 8 bit g32", r"layers\.[02-9]\.": "rtn 4 bit g32"})
    found = modifier(llm_compressor_recipe(chosen).text)
    bits = {name: group["weights"]["num_bits"] for name, group in found["config_groups"].items()}
    for weight in chosen.matrices:
        module = weight.name.removesuffix(".weight")
        groups = [bits[name] for name, group in found["config_groups"].items() if matches(group["targets"], module)]
        expected = {"rtn 4 bit g32": [4], "rtn 8 bit g32": [8], "bfloat16": []}[weight.format]
        assert groups == expected, module
        assert matches(found["ignore"], module) == (not expected and "embed" not in module)
    assert found["config_groups"]["group_0"]["weights"]["group_size"] == 32


def test_llm_compressors_groups_are_what_compressed_tensors_understands() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig

    formats = (
        *("rtn 4 bit g32", "W4A16 asym g128", "W8A8", "FP8", "FP8 A16", "NVFP4", "MXFP4 A16", "GPTQ 4 bit g128"),
        *("Q4_K", "FP8 blocks 128×128"),
    )
    chosen = mixture({rf"layers\.{layer}\.": kind for layer, kind in enumerate(formats)}, layers=10)
    found = modifier(llm_compressor_recipe(chosen).text)
    config = QuantizationConfig.model_validate({"config_groups": found["config_groups"], "ignore": found["ignore"]})
    groups = list(config.config_groups.values())
    assert len(groups) == len(formats)
    assert {g.weights.num_bits for g in groups} == {4, 8}
    assert sorted(g.input_activations.num_bits for g in groups if g.input_activations) == [4, 8, 8, 8]
    fours = [g.weights.group_size for g in groups if g.weights.symmetric and g.weights.num_bits == 4]
    assert sorted(fours) == [16, 32, 32, 128]


def test_llm_compressor_is_told_what_it_cannot_do() -> None:
    recipe = llm_compressor_recipe(mixture({"embed": "Q6_K", r"layers\.3\.": "Q4_K"}))
    assert recipe.notes == (
        "3 matrices of GGUF types or EXL3 become the nearest integers in groups of 32",
        "the embedding is not a target of llm-compressor's recipe and stays as it is",
    )
    nothing = modifier(llm_compressor_recipe(mixture({})).text)
    assert nothing["config_groups"] == {}


def test_matrices_that_servers_fuse_with_several_precisions_are_said() -> None:
    chosen = mixture({"layers.*q_proj": "rtn 4 bit g32", "layers": "rtn 8 bit g32"}, layers=3)
    (note,) = llm_compressor_recipe(chosen).notes
    assert note.startswith("model.layers.0.self_attn.q_proj|k_proj|v_proj and 2 more have several precisions")
    assert llm_compressor_recipe(mixture({"layers": "rtn 4 bit g32"})).notes == ()


# ── llama-quantize ───────────────────────────────────────────────────────────────────────────────────────────────────
def type_for(recipe: str, tensor: str) -> str | None:
    """As llama-quantize reads it: words, split at the first =; the first expression that matches counts."""
    for word in recipe.split():
        pattern, _, kind = word.partition("=")
        if re.search(pattern, tensor):
            return kind
    return None


def test_llama_quantize_gets_a_line_for_each_matrix() -> None:
    recipe = llama_quantize_recipe(mixture({r"layers\.1\.": "Q6_K", "lm_head": "Q6_K", "down_proj": "Q4_K"}))
    assert recipe is not None
    expected = {
        "blk.1.attn_q.weight": "q6_k",
        "blk.11.attn_q.weight": "bf16",
        "blk.11.ffn_down.weight": "q4_k",
        "output.weight": "q6_k",
        "token_embd.weight": "bf16",
        "blk.0.attn_norm.weight": None,
        "blk.0.attn_output.weight": None,
    }
    assert {tensor: type_for(recipe.text, tensor) for tensor in expected} == expected
    assert len(recipe.text.splitlines()) == 12 * 3 + 2
    assert recipe.command.endswith("model-mixed.gguf Q4_K_M")
    assert recipe.notes == ()


def test_formats_that_ggufs_do_not_have_become_the_nearest_type() -> None:
    recipe = llama_quantize_recipe(mixture({"layers": "rtn 4 bit g32"}))
    assert recipe is not None
    assert type_for(recipe.text, "blk.0.attn_k.weight") == "q4_0"
    assert recipe.notes[0] == "36 matrices get the nearest type of GGUF files, which rounds in its own way"

    def near(bits: float, columns: int) -> str:
        return type_of(StoredWeight("w", (8, columns), bits, "other"))

    assert [near(bits, 512) for bits in (2.5, 3.5, 4.25, 5.5, 6.5, 8.1, 16)] == [
        *("Q2_K", "Q3_K", "Q4_0", "Q5_0", "Q6_K", "Q8_0", "F16")
    ]
    assert [near(bits, 576) for bits in (2.5, 6.5, 9)] == ["Q4_0", "Q5_0", "Q8_0"]  # 256 does not divide 576
    assert near(4.5, 7) == "F16"


def test_an_architecture_that_ggufs_lay_out_differently_has_no_recipe_for_it() -> None:
    unknown = mixture({"layers": "rtn 4 bit g32"}, model_type="mamba")
    assert llama_quantize_recipe(unknown) is None
    assert [recipe.tool for recipe in write_recipes(unknown)] == ["llm-compressor", "ExLlamaV3"]
    assert len(write_recipes(mixture({}))) == 3


# ── ExLlamaV3 ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_exllamav3_takes_tensors_from_conversions_of_other_bits() -> None:
    recipe = exllamav3_recipe(mixture({r"layers\.1\.": "rtn 8 bit g32", "layers": "rtn 4 bit g32", "lm_head": "Q6_K"}))
    assert recipe is not None
    found = yaml.safe_load(recipe.text)
    assert found["sources"] == [
        {"id": "6bpw", "model_dir": "model-exl3-6bpw"},
        {"id": "8bpw", "model_dir": "model-exl3-8bpw"},
    ]
    overrides = {entry["key"]: entry["source"] for entry in found["overrides"]}
    assert overrides["model.layers.1.mlp.down_proj.*"] == "8bpw"
    assert overrides["lm_head.*"] == "6bpw"
    assert len(overrides) == 4
    assert {entry["source"] for entry in found["overrides"]} <= {source["id"] for source in found["sources"]}
    assert "-i model-exl3-4bpw" in recipe.command


def test_one_precision_needs_no_overrides_and_kept_matrices_are_said() -> None:
    recipe = exllamav3_recipe(mixture({}))
    assert recipe is not None
    assert yaml.safe_load(recipe.text) == {"sources": [], "overrides": []}
    assert "37 matrices that the mixture keeps as they are get 8 bits" in recipe.notes[1]


def experts(model_type: str) -> Mixture:
    layer = "model.layers.3.mlp"
    sizes = {f"{layer}.experts.gate_up_proj": (4, 64, 32), f"{layer}.experts.down_proj": (4, 32, 32)}
    found = {name: StoredWeight(name, shape, 4.5, "rtn 4 bit g32") for name, shape in sizes.items()}
    router = f"{layer}.gate.weight"
    return Mixture(model_type, {**found, router: StoredWeight(router, (4, 32), 32, "float32")})


def test_experts_are_named_one_by_one_and_routers_stay() -> None:
    compressor = modifier(llm_compressor_recipe(experts("qwen3_moe")).text)
    (group,) = compressor["config_groups"].values()
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        assert matches(group["targets"], f"model.layers.3.mlp.experts.17.{leaf}")
    assert not matches(group["targets"], "model.layers.3.mlp.gate")
    assert matches(compressor["ignore"], "model.layers.3.mlp.gate")
    exl3, mixtral = (exllamav3_recipe(experts(kind)) for kind in ("qwen3_moe", "mixtral"))
    assert exl3 is not None
    assert mixtral is not None
    assert yaml.safe_load(exl3.text) == yaml.safe_load(mixtral.text) == {"sources": [], "overrides": []}
    text = llama_quantize_recipe(experts("qwen3_moe"))
    assert text is not None
    assert {type_for(text.text, f"blk.3.ffn_{x}_exps.weight") for x in ("gate", "up", "down")} == {"q4_0"}
    assert type_for(text.text, "blk.3.ffn_gate_inp.weight") is None


@pytest.mark.parametrize(
    ("model_type", "name", "expected"),
    [
        ("qwen3_moe", "down_proj", {"model.layers.3.mlp.experts.*.down_proj.*"}),
        ("mixtral", "down_proj", {"model.layers.3.block_sparse_moe.experts.*.w2.*"}),
    ],
)
def test_keys_of_experts_for_exllamav3(model_type: str, name: str, expected: set[str]) -> None:
    chosen = experts(model_type)
    other = {
        n: replace(w, bits=8.5, format="rtn 8 bit g32") if n.endswith(name) else w for n, w in chosen.parameters.items()
    }
    recipe = exllamav3_recipe(Mixture(model_type, other))
    assert recipe is not None
    assert {entry["key"] for entry in yaml.safe_load(recipe.text)["overrides"]} == expected


@pytest.mark.parametrize(
    ("name", "bits", "group", "is_exact"),
    [
        ("GPTQ 3 bit", 3, None, True),
        ("AWQ 4 bit g128", 4, 128, True),
        ("W8A8", 8, None, True),
        ("IQ3_XXS", 3, 32, False),
        ("Q4_1", 4, 32, False),
        ("TQ1_0", 4, 32, False),
        ("Q4_K + Q6_K", 4, 32, False),
    ],
)
def test_names_of_formats_are_read(name: str, bits: int, group: int | None, is_exact: bool) -> None:
    found, exact = precision_of(StoredWeight("w", (4, 4), 4.5, name))
    assert (found.bits, found.group, exact) == (bits, group, is_exact)
    assert found.is_symmetric == (not name.startswith(("AWQ", "I", "Q", "T")))


def test_exl3_gets_the_bits_that_it_was_measured_with() -> None:
    """Padding makes stored bits more than those of a conversion; half numbers are rounded up, and noted."""
    formats = {"q_proj": ("EXL3 4 bit", 8.6), "k_proj": ("EXL3 1 bit", 1.1), "v_proj": ("EXL3 2.5 bit", 2.6)}
    weights = {
        f"model.layers.0.self_attn.{name}.weight": StoredWeight(
            f"model.layers.0.self_attn.{name}.weight", (64, 256), bits, kind
        )
        for name, (kind, bits) in formats.items()
    }
    recipe = exllamav3_recipe(Mixture("llama", weights))
    assert recipe is not None
    chosen = {line.split(".")[4]: line.split('source: "')[1][0] for line in recipe.text.splitlines() if "key:" in line}
    assert "model-exl3-4bpw" in recipe.command
    assert chosen == {"k_proj": "1", "v_proj": "3"}
    assert any(note.startswith("1 matrix get as many bits") for note in recipe.notes)
