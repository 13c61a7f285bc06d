"""The size of keys and values, against what Transformers allocates, and what is said before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import scoremode as sm
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import ChosenEngine, choose, known_engines
from scoremode.core.models.sizes import cache_bytes, values_per_token
from scoremode.core.plan.path import DecodePath
from scoremode.core.verbs import model, reference
from tests.gguf_files import gguf_of, require_llamacpp
from tests.house import needs_wing
from tests.makers import make_tiny_model

CONFIG: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 256}


def kv_cache(chosen: ChosenEngine, tokens: int) -> int | None:
    work = Work(tokens, path=DecodePath(sequences=1))
    return chosen.plugin.memory_need(chosen.subject, chosen.options, work).cache


@pytest.mark.parametrize(
    ("more", "values"),
    [
        ({}, 2 * 4 * 8 * 32),
        ({"num_key_value_heads": 2}, 2 * 4 * 2 * 32),
        ({"num_key_value_heads": 2, "head_dim": 128}, 2 * 4 * 2 * 128),
        ({"layer_types": ["full_attention", "linear_attention", "sliding_attention", "mamba"]}, 2 * 2 * 8 * 32),
        ({"kv_lora_rank": 512}, None),
        ({"num_hidden_layers": "4"}, None),
        ({"num_hidden_layers": True}, None),
        ({"num_attention_heads": 0}, None),
        ({"num_hidden_layers": -4}, None),
    ],
)
def test_a_config_says_how_much_a_token_takes(more: dict[str, Any], values: int | None) -> None:
    assert values_per_token({**CONFIG, **more}) == values
    assert values_per_token({"text_config": {**CONFIG, **more}}) == values
    assert cache_bytes({**CONFIG, **more}, "float16", 10) == (None if values is None else 20 * values)
    assert cache_bytes({**CONFIG, **more}, "turboquant_4", 10) is None


def test_it_is_what_transformers_allocates(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    chosen = choose(str(tiny), "transformers", {"dtype": "float32", "device": "cpu"})
    loaded = AutoModelForCausalLM.from_pretrained(tiny)
    cache = loaded(torch.arange(12)[None], use_cache=True).past_key_values
    taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert kv_cache(chosen, 12) == taken


@needs_wing("engines/llamacpp")
def test_llamacpp_counts_the_blocks_of_its_types(tmp_path: Path) -> None:
    require_llamacpp()
    wider = make_tiny_model(tmp_path / "wider", adds_bos=False, hidden_size=128, intermediate_size=96)
    file = gguf_of(wider, tmp_path / "wider.gguf")
    sizes = {}
    for kind in ("f32", "f16", "q8_0", "q4_0"):
        chosen = choose(str(file), None, {"cache_type_k": kind, "cache_type_v": kind, "flash_attn": "on", "threads": 1})
        sizes[kind] = kv_cache(chosen, 1024)
    half = 1024 * 2 * (2 * 2 * 2) * 32  # bytes: heads of 32 numbers for keys and for values, two of each in two layers
    assert sizes == {"f32": 2 * half, "f16": half, "q8_0": half * 34 // 64, "q4_0": half * 18 // 64}


@needs_wing("engines/vllm")
def test_vllm_has_the_type_of_its_option(tiny: Path) -> None:
    from scoremode.core.models.subject import checkpoint_subject

    plugin = known_engines()["vllm"]
    subject = checkpoint_subject(str(tiny), plugin.options(), None)

    def size(**options: Any) -> int | None:
        return kv_cache(ChosenEngine(plugin, plugin.options.of(options), subject), 100)

    whole, half = size(dtype="bfloat16"), size(dtype="bfloat16", kv_cache_dtype="fp8")
    assert whole is not None
    assert whole == 2 * (half or 0)
    assert size(kv_cache_dtype="turboquant_k8v4") is None


def test_a_large_cache_and_a_large_reference_are_told_before_the_work(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    question: Any = {"text": "the cat sat on the mat " * 20, "context_length": 16, "dtype": "float32", "device": "cpu"}
    planned = sm.plan(str(tiny), path="decode", sequences=3, **question)["memory"]["kv_cache"]
    assert "kv_cache" not in sm.plan(str(tiny), **question)["memory"]
    monkeypatch.setattr(reference, "TOLD_FROM", 1)
    monkeypatch.setattr(model, "TOLD_FROM", planned)
    sm.reference(str(tiny), tmp_path / "ref", path="decode", sequences=3, **question)
    said = capsys.readouterr().err
    assert "(3 sequences of 16 tokens)" in said
    assert "hidden states take about " in said
