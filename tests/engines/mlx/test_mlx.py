"""The MLX engine against Transformers with the same weights, and against mlx-lm itself."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

if find_spec("mlx_lm") is None:
    pytest.skip("needs mlx-lm", allow_module_level=True)

import mlx.core as mx

import scoremode as sm
from scoremode.cli.info import self_tests
from scoremode.core.engine.registry import choose
from scoremode.core.models.facts import inspect
from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import Window, WindowList, measured
from scoremode.engines.mlx import MlxPlugin
from scoremode.errors import EngineError, ModelError, OptionError
from tests.engines.judging import all_scored, random_windows
from tests.engines.mlx.makers import changed_config, far, judged, loaded, opened, plain_of
from tests.makers import VOCABULARY, make_family, make_tiny_model, make_tokenizer

Make = Callable[..., Path]
NATS = 1e-4
FORMATS: dict[str, dict[str, Any]] = {
    **{f"{bits} bits": {"q_bits": bits, "q_group_size": 64} for bits in (2, 3, 4, 5, 6, 8)},
    "groups of 32": {"q_bits": 4, "q_group_size": 32},
    "groups of 128": {"q_bits": 4, "q_group_size": 128},
    **{mode: {"q_mode": mode} for mode in ("mxfp4", "nvfp4", "mxfp8")},
    "mixed": {"q_bits": 4, "q_group_size": 64, "quant_predicate": "mixed_3_6"},
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose matrices groups of 128 divide."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "initializer_range": 0.15, "num_attention_heads": 2}
    return make_tiny_model(tmp_path_factory.mktemp("wide"), adds_bos=False, **sizes)


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_three_thousand_targets_are_those_of_transformers(stories: Path, mlx_of: Make, tmp_path: Path) -> None:
    """Every column, plain and in 4 bits, with both heads. Rows of 172 numbers stay unquantized."""
    text = random_windows(*[376] * 8, vocabulary=512)
    assert sum(len(window.rows) for window in text.items) == 3000
    plain = all_scored(opened(stories), text)
    assert far(plain, judged(stories, text)) < NATS
    quantized = mlx_of(stories, q_bits=4, q_group_size=64)
    truth = judged(plain_of(quantized, stories, tmp_path / "plain"), text)
    for head in ("exact", "as-served"):
        assert far(all_scored(opened(quantized, head=head), text), truth) < NATS
    assert far(plain, truth) > 0.1


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_that_of_transformers_with_its_weights(
    wide: Path, mlx_of: Make, tmp_path: Path, name: str
) -> None:
    folder, text = mlx_of(wide, **FORMATS[name]), random_windows(60, 31)
    truth = judged(plain_of(folder, wide, tmp_path / "plain"), text)
    for head in ("exact", "as-served"):
        engine = opened(folder, head=head)
        assert far(all_scored(engine, text), truth) < NATS
        assert engine.facts.head == {"exact": "exact-fp32", "as-served": "as-served"}[head]
    assert not any("not quantized" in note for note in engine.facts.notes)
    assert engine.facts.device == str(mx.default_device().type).removeprefix("DeviceType.")


@pytest.mark.parametrize("head", ["exact", "as-served"])
@pytest.mark.parametrize("kind", ["gemma2", "cohere", "granite"])
def test_scaled_and_capped_logits(kind: str, head: str, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    make_tokenizer(folder, adds_bos=False)
    make_family(kind).save_pretrained(folder)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    more: dict[str, Any] = {"rope_theta": rope["rope_theta"], "head_dim": 16}
    if kind == "gemma2":
        more |= {"attn_logit_softcapping": 50.0, "sliding_window": 64}
    model, text = changed_config(folder, tmp_path / "model", **more), random_windows(40)
    engine = opened(model, head=head)
    assert far(all_scored(engine, text), judged(model, text)) < NATS
    assert engine.facts.notes == ()
    shape = {"gemma2": (1.0, 3.0), "cohere": (0.25, None), "granite": (0.25, None)}[kind]
    assert engine.head is None or (engine.head.scale, engine.head.softcap) == shape


SMALL: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3},
    **{"bos_token_id": 0, "eos_token_id": 1},
}


def small(folder: Path, kind: str, **changes: Any) -> Path:
    """A small checkpoint of a class of Transformers."""
    make_tokenizer(folder, adds_bos=False)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")
    model(model.config_class(**{**SMALL, **changes})).save_pretrained(folder)
    return folder


def test_gemma3_with_nested_rope_parameters_and_a_nested_language_model(tmp_path: Path) -> None:
    """Transformers 5 nests ``rope_parameters`` by kinds of layers; mlx-lm reads two flat names, and takes defaults."""
    rope = {"full_attention": {"rope_theta": 50000.0}, "sliding_attention": {"rope_theta": 700.0}}
    ropes = {kind: {"rope_type": "default", **one} for kind, one in rope.items()}
    layers = {"sliding_window": 16, "query_pre_attn_scalar": 16, "layer_types": [*reversed(rope)]}
    folder, text = small(tmp_path / "made", "Gemma3", rope_parameters=ropes, **layers), random_windows(60, 31)
    odd = opened(changed_config(folder, tmp_path / "odd", sliding_window_pattern=2))
    words = "rope_theta 1e+06 instead of 50000 and rope_local_base_freq 10000 instead of 700"
    assert odd.facts.notes == (f"mlx-lm does not read rope_parameters: it computes with {words}",)
    flat = {"rope_theta": 50000.0, "rope_local_base_freq": 700.0, "sliding_window_pattern": 2}
    config, weights = json.loads((folder / "config.json").read_text()) | flat, load_file(folder / "model.safetensors")
    assert far(all_scored(odd, text), truth := judged(folder, text)) > 0.1
    whole = {"model_type": "gemma3", "text_config": config, "vocab_size": VOCABULARY}
    nested = changed_config(folder, tmp_path / "nested", **whole)
    save_file({f"language_model.{name}": x for name, x in weights.items()}, nested / "model.safetensors")
    for head in ("exact", "as-served"):
        engine = opened(nested, head=head)
        assert engine.facts.notes == ()
        assert far(all_scored(engine, text), truth) < NATS


def test_falcon_h1_has_a_scaled_head_and_no_key_multiplier(tmp_path: Path) -> None:
    sizes = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
    factors = {"lm_head_multiplier": 0.5, "embedding_multiplier": 2.0, "key_multiplier": 0.75}
    folder = small(tmp_path / "made", "FalconH1", tie_word_embeddings=True, **sizes, **factors)
    engine, text = opened(folder), random_windows(20)
    assert engine.head is not None
    assert engine.head.scale == 0.25
    assert "mlx-lm does not use key_multiplier: it computes without the factor 0.75" in engine.facts.notes
    assert far(all_scored(engine, text), all_scored(opened(folder, head="as-served"), text)) < NATS


def test_a_tied_head_is_found_where_other_matrices_have_its_rows(tmp_path: Path) -> None:
    odd = {"intermediate_size": VOCABULARY, "tie_word_embeddings": True, "rope_theta": 10000.0}
    folder, text = small(tmp_path / "made", "Llama", **odd), random_windows(30)
    assert far(all_scored(opened(folder), text), judged(folder, text)) < NATS


def test_the_served_head_gives_the_models_own_bits(wide: Path, mlx_of: Make) -> None:
    """In bfloat16, where it rounds logits, and the exact head does not."""
    folder, text = mlx_of(wide, q_bits=4, q_group_size=64, dtype="bfloat16"), random_windows(50)
    engine, (window,) = opened(folder, head="as-served"), text.items
    expected = loaded(folder)(mx.array(window.ids[None, :-1]))[0].astype(mx.float32)
    hidden = engine._states(window.ids[None, :-1])[0]
    assert torch.equal(engine._served_logits(hidden), torch.from_numpy(np.array(expected)))
    assert engine.facts.dtype == "bfloat16"
    (served,), (exact,) = all_scored(engine, text), all_scored(opened(folder), text)
    assert 1e-4 < np.abs(served.logprob - exact.logprob).max() < 0.2


def test_its_own_perplexity(stories: Path, mlx_of: Make) -> None:
    from mlx_lm.perplexity import eval_ppl

    folder, text = mlx_of(stories, q_bits=8, q_group_size=32), random_windows(*[128] * 6, vocabulary=512)
    theirs, _ = eval_ppl(loaded(folder), mx.array(np.stack([window.ids for window in text.items])), 3)
    ours = np.concatenate([answers.logprob for answers in all_scored(opened(folder, head="as-served"), text)])
    assert np.exp(-ours.mean()) == pytest.approx(theirs, rel=1e-5)


def test_a_comparison_and_a_reference(wide: Path, mlx_of: Make, tmp_path: Path) -> None:
    folder, question = mlx_of(wide, q_bits=3, q_group_size=64), dict[str, Any](text="a dog " * 60, context_length=40)
    found = sm.compare(str(wide), str(folder), dtype="float32", **question)[0]
    plain = plain_of(folder, wide, tmp_path / "plain")
    truth = sm.compare(str(wide), str(plain), dtype="float32", **question)[0]
    assert found.candidate.manifest["engine"] == "mlx"
    assert np.abs(measured(found.kl) - measured(truth.kl)).max() < NATS
    assert measured(found.kl).mean() > 0.01
    sm.reference(str(folder), tmp_path / "kept", **question)
    again = sm.compare(str(tmp_path / "kept"), str(plain), dtype="float32")[0]
    assert np.abs(measured(again.kl)).max() < 1e-6


def test_no_logits_of_a_whole_window_are_in_memory(tmp_path: Path) -> None:
    big = make_tiny_model(tmp_path, adds_bos=False, vocab_size=40_000, max_position_embeddings=1024, hidden_size=32)
    (window,) = random_windows(1001, vocabulary=40_000).items  # 160 MB of logits
    for head in ("exact", "as-served"):
        engine = opened(big, head=head)
        mx.reset_peak_memory()
        all_scored(engine, WindowList((window,)))
        assert mx.get_peak_memory() - mx.get_active_memory() < 100e6


# ── the decode path ──────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def eight_bits(small_llama: Path, mlx_of: Make) -> Path:
    """A model with heads of 64, which the groups of a quantized cache divide."""
    return mlx_of(small_llama, q_bits=8, q_group_size=64)


@pytest.mark.parametrize(("cache", "start"), [(None, None), ("int8", 0), ("int4", 0), ("int8", 20)])
def test_steps_are_those_of_a_loop_over_its_own_cache(eight_bits: Path, cache: str | None, start: int | None) -> None:
    from mlx_lm.generate import maybe_quantize_kv_cache
    from mlx_lm.models.cache import make_prompt_cache

    text, path, options = (
        random_windows(30, 12, 25, vocabulary=1003),
        DecodePath(2, 3),
        dict[str, Any](head="as-served"),
    )
    if cache is not None:
        options |= {"kv_cache_dtype": cache, "kv_group_size": 32, "quantized_kv_start": start}
    found, model = all_scored(opened(eight_bits, path, **options), text), loaded(eight_bits)
    for window, answers in zip(text.items, found, strict=True):
        states, parts = make_prompt_cache(model), []
        for begin, end in [(0, 3), *((at, at + 1) for at in range(3, len(window.ids) - 1))]:
            parts.append(np.array(model(mx.array(window.ids[None, begin:end]), cache=states)[0].astype(mx.float32)))
            maybe_quantize_kv_cache(states, start or 0, 32, {"int8": 8, "int4": 4}.get(cache or ""))
        logits = torch.from_numpy(np.concatenate(parts)).double().log_softmax(-1)
        truth = logits.gather(1, torch.from_numpy(window.targets.astype(np.int64))).numpy()
        assert np.abs(answers.logprob - truth).max() < 1e-5
    prefilled = all_scored(opened(eight_bits, head="as-served"), text)
    moved = max(np.abs(a.logprob - b.logprob).max() for a, b in zip(found, prefilled, strict=True))
    assert moved < 1e-5 if cache is None else moved > 1e-4


def test_types_of_the_cache_are_candidates(eight_bits: Path) -> None:
    question: Any = {"text": "the lazy dog ran " * 20, "context_length": 48, "path": "decode", "sequences": 3}
    found = sm.compare(str(eight_bits), kv_cache_dtype=["auto", "int8", "int4"], **question)
    assert [one.name for one in found] == ["kv int8", "kv int4"]
    assert 1e-8 < measured(found[0].kl).mean() < measured(found[1].kl).mean()
    assert found[1].candidate.manifest["engine_settings"]["kv_group_size"] == 64


def test_chunks_are_fed_to_one_cache(stories: Path) -> None:
    text = random_windows(100, 7, vocabulary=512)
    assert far(all_scored(opened(stories, prefill_step_size=16), text), all_scored(opened(stories), text)) < 1e-5


def test_a_cache_that_cannot_be_quantized_is_refused(stories: Path, eight_bits: Path) -> None:
    with pytest.raises(ModelError, match=r"mlx-lm cannot score .* with an int8 cache in groups of 64 \("):
        opened(stories, DecodePath(), kv_cache_dtype="int8")  # its heads have 8 numbers
    late = sm.ppl(
        str(eight_bits), text="a dog " * 9, path="decode", kv_cache_dtype="int4", quantized_kv_start=900, fresh=True
    )
    assert any(note.startswith("no window read a quantized token: ") for note in late.manifest["notes"])


# ── what is said and refused ─────────────────────────────────────────────────────────────────────────────────────────
def test_sizes_and_formats(wide: Path, mlx_of: Make) -> None:
    weights = inspect(str(wide)).sizes.weights  # type: ignore[union-attr]
    for name, how in FORMATS.items():
        folder = mlx_of(wide, **how)
        facts, chosen = inspect(str(folder)), choose(str(folder))
        assert facts.sizes is not None, name
        assert facts.sizes.weights == weights
        assert facts.bits_per_weight == pytest.approx(8 * facts.weight_bytes / weights)
        assert chosen.plugin.name == "mlx"
        assert str(chosen.subject.format).startswith("MLX ")
    assert choose(str(wide)).plugin.name == "transformers"
    assert MlxPlugin().claims("mlx-community/Qwen3-4B-4bit")
    assert not MlxPlugin().claims("org/model")


def test_a_size_that_does_not_fit_its_scales_is_not_told(wide: Path, mlx_of: Make, tmp_path: Path) -> None:
    wrong = {"group_size": 64, "bits": 8, "mode": "affine"}
    folder = changed_config(mlx_of(wide, q_bits=4, q_group_size=64), tmp_path / "wrong", quantization_config=wrong)
    assert inspect(str(folder)).bits_per_weight is None


def test_other_bits_than_declared_are_said(wide: Path, mlx_of: Make, tmp_path: Path) -> None:
    odd = {"group_size": 64, "bits": 8, "mode": "affine"}
    folder = mlx_of(wide, q_bits=4, q_group_size=64)
    wrong = changed_config(folder, tmp_path / "wrong", quantization=odd, quantization_config=odd)
    (note,) = opened(wrong).facts.notes
    assert re.match(r"(\d+) of \1 layers are quantized otherwise, though the config declares 8 bits: lm_head, ", note)
    assert choose(str(wrong)).subject.format == "MLX"
    assert opened(mlx_of(wide, **FORMATS["mixed"])).facts.notes == ()


@pytest.mark.parametrize("size", [0, -64, "64", None])
def test_sizes_that_end_the_process_are_refused(wide: Path, mlx_of: Make, tmp_path: Path, size: Any) -> None:
    odd = {"group_size": 64, "bits": 4, "lm_head": {"group_size": size, "bits": 4}}
    folder = changed_config(mlx_of(wide, q_bits=4, q_group_size=64), tmp_path / "odd", quantization=odd)
    with pytest.raises(ModelError, match=f"declares {size} as bits or group_size"):
        opened(folder)


def test_what_mlx_lm_does_not_compute_is_said(stories: Path, mlx_of: Make, tmp_path: Path) -> None:
    rope = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0}
    odd = changed_config(stories, tmp_path / "rope", rope_parameters=rope, sliding_window=16)
    assert opened(odd).facts.notes == (
        "mlx-lm does not read rope_parameters: it computes with rope_theta 10000 instead of 500000 "
        "and no llama3 scaling",
        "mlx-lm does not use sliding_window: it computes without the window of 16 tokens",
    )
    assert all_scored(opened(odd), random_windows(30, vocabulary=512))[0].logprob.sum() == pytest.approx(
        all_scored(opened(stories), random_windows(30, vocabulary=512))[0].logprob.sum()
    )
    engine = opened(mlx_of(stories, q_bits=4, q_group_size=128))
    assert engine.facts.settings["types"] == {"float32": 36}
    assert engine.facts.notes[0].startswith("36 of 36 layers are not quantized, though the config declares 4 bits: ")


def test_refusals(wide: Path, stories: Path, tmp_path: Path) -> None:
    bad = Window(np.array([5, 700], np.int32), np.zeros(1, np.int32), np.array([[5]], np.int32))
    whole = Window(np.array([5, 700], np.int32), np.arange(2, dtype=np.int32), np.array([[5], [5]], np.int32))
    all_scored(opened(stories), WindowList((bad,)))  # only the first token is fed
    with pytest.raises(EngineError, match=r"the text has the id 700, and .* has the ids 0 to 511; use the model's own"):
        all_scored(opened(stories), WindowList((whole,)))
    for options, words in {
        ("dtype", "float64"): "MLX does not compute models in float64; give --dtype float32",
        ("device", "cuda"): "--device cuda is not known to MLX; give cpu or gpu",
        ("kv_group_size", 16): "--kv-group-size 16 is not known to MLX; give 32, 64 or 128",
        ("quantized_kv_start", 9): "--quantized-kv-start belongs to a quantized K/V cache; add --kv-cache-dtype int8",
    }.items():
        with pytest.raises(OptionError, match=words):
            choose(str(wide), "mlx", dict([options])).settings()
    with pytest.raises(OptionError, match="--prefill-step-size does not belong to --path decode; leave one of the two"):
        opened(wide, DecodePath(), prefill_step_size=8)
    unknown = changed_config(wide, tmp_path / "unknown", model_type="no_such_model")
    with pytest.raises(ModelError, match=r"mlx-lm cannot run .*: Model type no_such_model not supported"):
        opened(unknown)


def test_without_mlx_lm_one_line_says_what_to_install(
    stories: Path, mlx_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mlx_of(stories, q_bits=4, q_group_size=64)
    monkeypatch.setattr(MlxPlugin, "packages", ("no-such-package",))
    with pytest.raises(EngineError, match=r"mlx-lm is not installed; .*\[mlx\]"):
        choose(str(folder)).settings()


def test_the_self_test_and_the_limits_of_the_process() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    checks = [check for check in self_tests(["mlx"]) if check["name"] == "engine mlx"]
    assert [check["good"] for check in checks] == [True], checks
    assert re.search(r"cpu|gpu; mlx [\d.]+, mlx-lm [\d.]+; please send it: https://", checks[0]["detail"])
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_other_configs_are_not_claimed(tiny: Path, tmp_path: Path) -> None:
    for name, declared in {
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
        "list": [4],
        "legacy": {"bits": 4, "group_size": 64},  # mlx-lm stops at it
        "words": {"bits": "4", "group_size": 64},
    }.items():
        assert not MlxPlugin().claims(str(changed_config(tiny, tmp_path / name, quantization_config=declared)))
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_text(json.dumps({"quantization": {}})[:-1])
    assert not MlxPlugin().claims(str(tmp_path / "cut"))
