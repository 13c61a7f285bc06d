"""Quantized K/V caches of the Transformers engine, by HQQ; and what is refused without it, or without --path decode."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.core.engine.registry import all_options, choose, known_engines, share_options
from scoremode.core.installation import pip_install
from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import measured
from scoremode.engines.transformers import choices
from scoremode.engines.transformers.caches import RESIDUAL, CacheKind, group_size
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.errors import ModelError, OptionError
from tests.engines.judging import random_windows, scored
from tests.makers import make_family

ROOT = Path(__file__).parents[3]
TEXT = "the cat sat on the mat, and 12 dogs ran away. " * 40
QUESTION: dict[str, Any] = {"text": TEXT, "context_length": 260, "max_windows": 3, "path": "decode", "sequences": 2}


def require_hqq() -> None:
    if importlib.util.find_spec("hqq") is None:
        pytest.skip("needs hqq")


# ── without the library ──────────────────────────────────────────────────────────────────────────────────────────────
def test_a_missing_library_is_one_line_before_anything_is_loaded(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "distributions", lambda name: [])
    with pytest.raises(OptionError, match="--kv-cache-dtype int4 needs the package 'hqq'") as refused:
        choose(str(tiny), None, {"kv_cache_dtype": "int4"}).settings()
    assert refused.value.fix == pip_install("hqq")
    choose(str(tiny), None, {"kv_cache_dtype": "auto"}).settings()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(one.startswith("hqq") for one in extras["hqq"])


def test_prefill_refuses_a_cache_that_it_does_not_read(tiny: Path) -> None:
    words = "--kv-cache-dtype has no effect on the prefill path; add --path decode, or leave --kv-cache-dtype out"
    question = {name: value for name, value in QUESTION.items() if name not in ("path", "sequences")}
    with pytest.raises(OptionError, match=words):
        sm.ppl(str(tiny), kv_cache_dtype="int4", **question)
    with pytest.raises(OptionError, match=words):
        sm.compare(str(tiny), str(tiny), kv_cache_dtype="int4", **question)
    with pytest.raises(OptionError, match=r"has no effect on the prefill path; leave --kv-cache-dtype out"):
        sm.prob(str(tiny), prompt="the cat", targets=[" sat"], kv_cache_dtype="int4")


def test_the_type_that_another_engine_knows_is_meant_for_that_engine() -> None:
    transformers, vllm = (known_engines()[name] for name in ("transformers", "vllm"))
    for given, expected in (({"kv_cache_dtype": "fp8"}, {}), ({"kv_cache_dtype": "auto"}, {"kv_cache_dtype": "auto"})):
        assert share_options(transformers, [transformers, vllm], given) == expected
        assert share_options(vllm, [transformers, vllm], given) == given
    assert share_options(transformers, [transformers], {"kv_cache_dtype": "fp8"}) == {"kv_cache_dtype": "fp8"}
    engines, option = all_options()["kv_cache_dtype"]
    assert engines == ["transformers", "mlx", "vllm"]
    assert option.details.choices is None
    assert "(auto, int8, int4, int2)" in option.details.help
    assert "such as fp8" in option.details.help


@pytest.mark.parametrize(
    ("heads", "width", "sizes"),
    [(8, 128, (64, 64, 64)), (3, 64, (64, 32, 16)), (2, 64, (64, 64, 32)), (1, 80, (16, 8, 4)), (1, 3, (1, 1, 1))],
)
def test_groups_lie_in_one_head_and_fill_whole_bytes(heads: int, width: int, sizes: tuple[int, ...]) -> None:
    config = SimpleNamespace(num_key_value_heads=heads, head_dim=width)
    config.get_text_config = lambda: config
    assert tuple(group_size(config, bits) for bits in (8, 4, 2)) == sizes


# ── with it ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_fewer_bits_do_more_damage(small_llama: Path) -> None:
    require_hqq()
    reference = sm.reference(str(small_llama), dtype="float32", **QUESTION)
    mean, runs = {}, {}
    for name in ("auto", "int8", "int4", "int2"):
        (found,) = sm.compare(str(reference.path), str(small_llama), dtype="float32", kv_cache_dtype=name)
        mean[name], runs[name] = float(measured(found.kl).mean()), found.candidate
    assert mean["auto"] == 0
    assert 0 < mean["int8"] < mean["int4"] < mean["int2"], mean
    assert mean["int2"] > 100 * mean["int8"]
    settings = runs["int4"].manifest["engine_settings"]
    assert settings["kv_cache_dtype"] == "int4"
    assert settings["kv_cache_residual"] == RESIDUAL
    assert "hqq" in settings
    assert "kv_cache_dtype" not in runs["auto"].manifest["engine_settings"]
    assert len({run.path for run in runs.values()}) == 4, "each type is a run of its own"


def test_the_newest_tokens_are_not_quantized(small_llama: Path) -> None:
    """What the docstring of caches.py draws: with 5 tokens prefilled, row 133 is the first that reads decoded ones."""
    require_hqq()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_llama, dtype=torch.float32)
    source, path = random_windows(200, 150, vocabulary=1000), DecodePath(2, 5)
    plain = scored(TransformersEngine(model, path=path), source)
    engine = TransformersEngine(model, options=TransformersOptions(kv_cache_dtype="int2"), path=path)
    found = scored(engine, source)
    for index in (0, 1):
        gap = np.abs(found[index].logprob - plain[index].logprob).ravel()
        assert (gap[:5] == 0).all(), "the prefill attends to what it computed"
        before, after = np.sqrt((gap[64 : 5 + RESIDUAL] ** 2).mean()), np.sqrt((gap[5 + RESIDUAL :] ** 2).mean())
        assert 0 < before < after / 2
    assert engine.account() == {}


def test_a_window_does_not_share_scales_with_those_beside_it(small_llama: Path) -> None:
    """HQQ ends its search by the error of the whole batch, so the windows beside it move a score by little."""
    require_hqq()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_llama, dtype=torch.float32)
    source, options = random_windows(180, 180, 140, vocabulary=1000), TransformersOptions(kv_cache_dtype="int4")
    alone, beside = (scored(TransformersEngine(model, options=options, path=DecodePath(n)), source) for n in (1, 3))
    plain = scored(TransformersEngine(model, path=DecodePath(3)), source)
    moved = max(np.abs(alone[i].logprob - beside[i].logprob).max() for i in range(3))
    damage = max(np.abs(plain[i].logprob - beside[i].logprob).max() for i in range(3))
    assert moved < damage / 2


def test_short_windows_say_that_they_hardly_measure_the_cache(tiny: Path) -> None:
    require_hqq()
    run = sm.ppl(str(tiny), kv_cache_dtype="int2", dtype="float32", **{**QUESTION, "context_length": 60})
    (note,) = [note for note in run.manifest["notes"] if "hardly measured" in note]
    assert "keeps up to 128 of the newest tokens unquantized" in note
    assert "only the first token was quantized" in note


def test_paths_compares_with_a_prefill_that_has_no_such_cache(small_llama: Path) -> None:
    require_hqq()
    question = {name: value for name, value in QUESTION.items() if name != "path"}
    found = sm.paths(str(small_llama), dtype="float32", kv_cache_dtype="int2", **question)[0]
    assert "kv_cache_dtype" not in found.baseline.manifest["engine_settings"]
    assert found.candidate.manifest["engine_settings"]["kv_cache_dtype"] == "int2"
    assert measured(found.kl).mean() > 1e-4


def test_a_cache_of_sliding_windows_is_refused() -> None:
    require_hqq()
    model = make_family("gemma2")
    with pytest.raises(ModelError, match=r"cannot quantize the K/V cache of this model .*leave --kv-cache-dtype out"):
        CacheKind.of(model.config, TransformersOptions(kv_cache_dtype="int4"))
    CacheKind.of(model.config, TransformersOptions(kv_cache_dtype="auto"))


@pytest.mark.parametrize(
    ("method", "package"), [("compressed-tensors", "compressed-tensors"), ("gptq", "gptqmodel"), ("awq", "gptqmodel")]
)
def test_the_extra_is_named(
    method: str, package: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    monkeypatch.setattr(choices, "distributions", lambda name: [])
    with pytest.raises(ModelError, match=package) as refused:
        choose(str(folder)).settings()
    assert pip_install("quantized") in refused.value.fix
    monkeypatch.setattr(choices, "distributions", lambda name: [name])
    choose(str(folder)).settings()


def test_the_extra_brings_what_is_asked_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {name for names in choices.LIBRARIES.values() for name in names}
    assert {name for name in asked if not any(one.startswith(name) for one in extras["quantized"])} == set()
