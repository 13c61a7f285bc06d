"""Profiles by layer of real models: a planted fault is named, a healthy model has none, the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_for
from scoremode.core.scores.answers import Window
from scoremode.errors import ScoremodeError
from scoremode.studies.attribution.layer_profile import fed_tokens
from tests.gguf_files import gguf_of, require_llamacpp
from tests.makers import (
    SENTENCES,
    checkpoint_maker,
    make_deep_model,
    make_mixture,
    make_tiny_model,
    with_changed_tensors,
)

TEXTS = "".join(
    f'{{"text": "{sentence} {number}"}}\n' for number in range(4) for sentence in ("A fox runs.", "It is 12.")
)
QUESTION: dict[str, Any] = {"text": " ".join(SENTENCES), "context_length": 48, "stride": 48}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_deep_model(tmp_path_factory.mktemp("deep"))


def layers_of(model: Path, engine: str, **options: Any) -> Any:
    chosen = choose(str(model), engine, options)
    return open_for(chosen, "layer_states", Work(longest=64))


def windows_of(*lengths: int) -> list[Window]:
    random = np.random.default_rng(5)
    found = []
    for length in lengths:
        ids = random.integers(2, 300, length).astype(np.int32)
        found.append(Window(ids, np.arange(length - 1, dtype=np.int32), ids[1:, None]))
    return found


def rounded_to(bits: int) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Rounds matrices of layers to the nearest of 2**bits steps, in groups of 32."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "proj" not in name:
            return tensor
        groups = tensor.reshape(len(tensor), -1, 32)
        scale = groups.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        found: torch.Tensor = (torch.round(groups / scale) * scale).reshape(tensor.shape)
        return found

    return change


# ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_states_of_transformers_are_its_own_hidden_states(deep: Path) -> None:
    """Transformers itself returns the states between layers, and the last one after the norm."""
    layers, windows = layers_of(deep, "transformers", dtype="float32"), windows_of(40, 2, 17)
    for window, states in zip(windows, layers.states(windows), strict=True):
        ids = torch.from_numpy(window.ids[: fed_tokens(window)].astype(np.int64))[None]
        with torch.no_grad():
            found = layers.engine.model(ids, output_hidden_states=True).hidden_states
        assert states.shape == (7, len(window.ids) - 1, 128)
        for place in range(6):
            np.testing.assert_allclose(states[place], found[place][0].numpy(), rtol=1e-4, atol=1e-5)
        normed = layers.engine.model.model.norm(torch.from_numpy(states[6]))
        np.testing.assert_allclose(normed.detach().numpy(), found[6][0].numpy(), rtol=1e-4, atol=1e-5)
    layers.close()


def test_replay_of_own_states_gives_them_back_bit_for_bit(deep: Path) -> None:
    layers, (window,) = layers_of(deep, "transformers", dtype="float32"), windows_of(33)
    (states,) = layers.states([window])
    assert np.array_equal(layers.replayed(window, states), states[1:])
    assert np.array_equal(next(layers.states([window])), states), "the replay leaves nothing behind"
    doubled = layers.replayed(window, 2 * states)
    assert not np.allclose(doubled, states[1:])
    layers.close()


@pytest.mark.parametrize(
    "options", [{}, {"n_ubatch": 16}, {"n_batch": 24, "n_ubatch": 8}, {"flash_attn": "on"}], ids=str
)
def test_states_of_llamacpp_are_those_of_transformers(deep: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    require_llamacpp()
    file, windows = gguf_of(deep, tmp_path / "deep.gguf"), windows_of(64, 2, 31)
    expected = list(layers_of(deep, "transformers", dtype="float32").states(windows))
    served = layers_of(file, "llamacpp", cache_type_k="f32", cache_type_v="f32", **options)
    assert (served.layers, served.width) == (6, 128)
    reach = 3e-3 if options.get("flash_attn") == "on" else 2e-5  # flash attention rounds to float16
    for ours, theirs in zip(served.states(windows), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert np.linalg.norm(a - b) <= reach * np.linalg.norm(b)
    served.close()


# ── healthy models and planted faults ────────────────────────────────────────────────────────────────────────────────
def test_a_model_against_itself_has_no_error(deep: Path) -> None:
    found = sm.layer_profile(str(deep), str(deep), dtype="float32", **QUESTION)
    assert {value for place in found.places for value in (place.error.value, place.own_error.value)} == {0.0}
    assert found.verdict == "no layer is out of line"
    assert [place.name for place in found.places] == ["embedding", *(f"layer {i}" for i in range(6))]


@pytest.mark.parametrize(
    ("bits", "broken"), [(8, ""), (4, ""), (8, "0.self_attn.q_proj"), (8, "3.mlp.down_proj"), (8, "5.self_attn.o_proj")]
)
def test_a_rounded_model_is_healthy_and_a_planted_fault_is_named(
    deep: Path, tmp_path: Path, bits: int, broken: str
) -> None:
    quantize = rounded_to(bits)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return quantize(name, tensor) * (1.5 if name == f"model.layers.{broken}.weight" else 1)

    candidate = with_changed_tensors(deep, tmp_path / "candidate", change)
    found = sm.layer_profile(str(deep), str(candidate), dtype="float32", **QUESTION)
    assert [place.name for place in found.out_of_line] == ([f"layer {broken[0]}"] if broken else [])
    assert ("out of line: its own error is " in found.verdict) == bool(broken)
    assert found.places[0].error.value == 0.0, "the embedding is as it was"
    assert found.places[1].error.value > 0


def test_a_scale_of_a_compressed_checkpoint(deep: Path, tmp_path: Path) -> None:
    """Weights in int8 with a scale per row, as compressed-tensors stores them: the scales of one matrix are doubled."""
    healthy = checkpoint_maker()(str(deep), tmp_path / "healthy", "w8a16")

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2 if name == "model.layers.2.mlp.up_proj.weight_scale" else tensor

    broken = with_changed_tensors(healthy, tmp_path / "broken", change)
    assert sm.layer_profile(str(deep), str(healthy), dtype="float32", **QUESTION).out_of_line == ()
    found = sm.layer_profile(str(deep), str(broken), dtype="float32", **QUESTION)
    assert [place.name for place in found.out_of_line] == ["layer 2"]


@pytest.mark.parametrize(
    ("kind", "factor", "broken"), [("Q8_0", 1, ""), ("Q8_0", 2, "layer 4"), (None, 1e30, "layer 4")]
)
def test_a_scale_of_a_gguf(deep: Path, tmp_path: Path, kind: str | None, factor: float, broken: str) -> None:
    require_llamacpp()
    file = gguf_of(
        deep,
        tmp_path / "x.gguf",
        *([kind] if kind else []),
        weights=lambda name, x: x * (factor if name == "blk.4.ffn_down.weight" else 1),
    )
    found = sm.layer_profile(str(deep), str(file), **QUESTION)
    assert [place.name for place in found.out_of_line][:1] == ([broken] if broken else [])
    assert found.engines[1].startswith("llamacpp, ")


def test_errors_are_over_documents_and_tokens_are_bounded(deep: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(TEXTS)
    candidate = with_changed_tensors(deep, tmp_path / "candidate", rounded_to(4))
    question: dict[str, Any] = {"corpus": str(file), "method": "mean-of-texts"}
    found = sm.layer_profile(str(deep), str(candidate), dtype="float32", **question)
    assert found.windows == 8
    assert found.groups == "documents"
    assert all(place.error.stderr is not None for place in found.places[1:])
    few = sm.layer_profile(str(deep), str(candidate), dtype="float32", tokens=20, **question)
    assert few.windows < 8
    assert few.tokens <= 20
    assert any("windows are compared" in note for note in few.notes)
    stored = found.as_json()
    assert stored["compared"] == "hidden states after each decoder layer, before the final norm"
    assert len(stored["places"]) == 7


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_what_cannot_be_profiled_is_refused(deep: Path, tiny_gguf_of_deep: Path, tmp_path: Path) -> None:
    other = make_deep_model(tmp_path, num_hidden_layers=5, hidden_size=64)
    sizes = "the baseline has 6 decoder layers of 128 numbers, and the candidate 5 decoder layers of 64 numbers"
    cases: list[tuple[Path, Any, dict[str, Any], str]] = [
        (deep, other, {"dtype": "float32"}, sizes),
        (deep, "table:uniform", {}, "table engine cannot give hidden states between layers"),
        (tiny_gguf_of_deep, deep, {}, "has no layers that can be compared"),
        (deep, deep, {"path": "decode"}, "computed by prefill"),
        (deep, deep, {"tokens": 0}, "tokens=0 leaves nothing"),
    ]
    for baseline, candidate, more, words in cases:
        with pytest.raises(ScoremodeError, match=words):
            sm.layer_profile(str(baseline), str(candidate), **more, **QUESTION)


@pytest.fixture(scope="module")
def tiny_gguf_of_deep(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_llamacpp()
    return gguf_of(deep, tmp_path_factory.mktemp("gguf") / "deep.gguf")


# ── routes of experts ────────────────────────────────────────────────────────────────────────────────────────────────
def test_routes_of_a_mixture(tmp_path: Path) -> None:
    baseline = make_mixture(tmp_path / "baseline")
    random = torch.Generator().manual_seed(0)

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=random) * tensor.std() if tensor.ndim > 1 else 0
        return tensor + 0.03 * noise

    candidate = with_changed_tensors(baseline, tmp_path / "candidate", change)
    found = sm.routing(str(baseline), str(candidate), dtype="float32", **QUESTION)
    assert [name for name, _ in found.changed] == ["layer 0", "layer 1", "layer 2"]
    assert (found.experts, found.of_experts) == (2, 4)
    assert 0 < found.any_changed.value < 1
    assert max(share.value for _, share in found.changed) <= found.any_changed.value
    assert found.kl_changed.n + found.kl_same.n == found.kl.n
    assert found.kl_changed.value > found.kl_same.value, "another expert moves a prediction further"
    same = sm.routing(str(baseline), str(baseline), dtype="float32", **QUESTION)
    assert (same.any_changed.value, same.kl.value) == (0.0, 0.0)


def test_routes_are_those_of_router_logits(tmp_path: Path) -> None:
    """Transformers' own router logits, and the two largest of each row."""
    from scoremode.studies.attribution.engines.transformers_layers import RouterHooks

    model = make_mixture(tmp_path)
    chosen = choose(str(model), "transformers", {"dtype": "float32"})
    engine: Any = chosen.plugin.open(chosen.subject, chosen.options, Work())
    (window,) = windows_of(30)
    routes = RouterHooks(engine).routes(window)
    ids = torch.from_numpy(window.ids[:-1].astype(np.int64))[None]
    with torch.no_grad():
        logits = engine.model(ids, output_router_logits=True).router_logits
    for layer, own in enumerate(logits):
        assert np.array_equal(routes[layer], np.sort(own.topk(2).indices.numpy(), axis=1))


def test_routes_of_a_dense_model_are_refused(tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path, adds_bos=False)
    with pytest.raises(ScoremodeError, match="it is not a mixture of experts"):
        sm.routing(str(dense), str(dense), **QUESTION)
    with pytest.raises(ScoremodeError, match="read in Transformers"):
        sm.routing(str(dense), str(dense), engine="vllm", **QUESTION)
