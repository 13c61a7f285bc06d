"""Hidden states between layers as vLLM computes them, cut apart from batches and chunks, and a broken layer named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_for
from scoremode.engines.vllm import support
from scoremode.engines.vllm.support import LaunchArguments
from scoremode.errors import OptionError
from scoremode.studies.attribution.engines.vllm_layers import VllmLayers
from tests.engines.vllm.conftest import own
from tests.makers import SENTENCES, make_deep_model, with_changed_tensors

TEXT: dict[str, Any] = {"text": " ".join(SENTENCES), "context_length": 48, "stride": 48}
CHUNKS = {"max_num_batched_tokens": 32, "engine_args": {"max_num_seqs": 4}}  # windows span steps, and share them
BROKEN = "model.layers.3.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_deep_model(tmp_path_factory.mktemp("deep"), **sizes)


def layers_of(model: Path, engine: str, **options: Any) -> Any:
    chosen = choose(str(model), engine, {"dtype": "float32", **options})
    return open_for(chosen, "layer_states", Work(longest=64))


def test_states_are_those_of_transformers_in_batches_and_chunks(deep: Path) -> None:
    random = np.random.default_rng(1)
    windows = [own(random.integers(2, 300, length)) for length in (60, 2, 17, 41)]
    expected = list(layers_of(deep, "transformers").states(windows))
    with layers_of(deep, "vllm", **CHUNKS) as served:
        assert (served.layers, served.width) == (6, 128)
        assert any("without compilation" in note for note in served.facts.notes)
        for _ in range(2):  # the second time, nothing is left of the first
            for ours, theirs in zip(served.states(windows), expected, strict=True):
                assert ours.shape == theirs.shape
                for a, b in zip(ours, theirs, strict=True):
                    assert np.linalg.norm(a - b) <= 2e-5 * np.linalg.norm(b)


def test_a_broken_layer_of_a_served_model_is_named_and_a_healthy_model_names_none(deep: Path, tmp_path: Path) -> None:
    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1.25 if name == BROKEN else tensor

    broken = with_changed_tensors(deep, tmp_path / "broken", change)
    dtype = "bfloat16" if support.has_bfloat16_instructions() else "float16"
    how: dict[str, Any] = {"engine": "vllm", "dtype": dtype, "baseline_options": {"dtype": "float32"}, **TEXT}
    found = sm.layer_profile(str(deep), str(broken), **how)
    assert [place.name for place in found.out_of_line] == ["layer 3"]
    assert found.engines[1].startswith(f"vllm, {dtype}")
    healthy = sm.layer_profile(str(deep), str(deep), **how)
    assert healthy.out_of_line == ()


def test_what_this_cpu_cannot_compute_is_refused_before_it_starts(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "has_bfloat16_instructions", lambda: False)
    with pytest.raises(OptionError, match=r"this CPU does not have.*--dtype float32"):
        sm.layer_profile(str(deep), str(deep), engine="vllm", dtype="bfloat16", **TEXT)


def test_pipeline_stages_are_refused(deep: Path) -> None:
    with pytest.raises(OptionError, match="a stage knows the states of its own layers only"):
        VllmLayers(str(deep), LaunchArguments(pipeline_parallel_size=2))
