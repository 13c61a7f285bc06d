"""References made by vLLM, and candidates that vLLM scores against them: with and without tensor parallelism.

A window is fed in several steps: nothing is requested of the first (an overlap) or of the last, which would be only its
last token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.core.references.reader import Reference
from scoremode.core.scores.answers import measured
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.verbs.compare import compare
from scoremode.core.verbs.reference import reference
from scoremode.engines.vllm import engine as of_prefill
from scoremode.engines.vllm.support import LaunchArguments
from tests import rounding
from tests.makers import with_changed_tensors

ASKED: dict[str, Any] = {
    "text": "The quick brown fox jumps over the lazy dog, and nobody minds at all. " * 5,
    "context_length": 65,
    "stride": 24,
    "dtype": "float32",
}
STEPS: dict[str, Any] = {"max_num_batched_tokens": 32, "engine_args": (("max_num_seqs", 1),)}


@pytest.fixture(scope="module")
def moved(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with slightly changed weights."""
    random = torch.Generator().manual_seed(1)

    def move(_: str, weight: torch.Tensor) -> torch.Tensor:
        return weight * (1 + 0.1 * torch.randn(weight.shape, generator=random))

    return with_changed_tensors(small_llama, tmp_path_factory.mktemp("moved") / "moved", move)


@pytest.fixture(scope="module")
def by_transformers(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("references") / "transformers"
    reference(str(small_llama), folder, **ASKED)
    return folder


def kl_of(found: Comparison) -> Any:
    assert found.kl is not None
    return found.kl


def test_a_reference_kept_by_vllm_is_that_of_transformers(
    small_llama: Path, by_transformers: Path, tmp_path: Path
) -> None:
    """Two ranks: states come from one of them, each row of the head from the rank that has it."""
    run = reference(str(small_llama), tmp_path / "ref", engine="vllm", tensor_parallel_size=2, **STEPS, **ASKED)
    ours, theirs = Reference.open(tmp_path / "ref"), Reference.open(by_transformers)
    rows = theirs.vocabulary
    assert np.array_equal(ours.head_weight()[:rows], theirs.head_weight()[:rows]), "the head, bit for bit"
    apart = np.abs(ours.rows(0, ours.targets) - theirs.rows(0, theirs.targets)).max()
    assert apart < 1e-4 * np.abs(theirs.rows(0, theirs.targets)).max()
    assert max(run.manifest["noise_kl"]) < 1e-8
    assert run.manifest["noise_perturbed"] == "windows one by one, cut after half of their targets"
    assert 0 < len(run.manifest["noise_kl"]) < ours.targets


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"head": "as-served"}])
def test_divergence_by_vllm_is_that_of_transformers(
    small_llama: Path, moved: Path, by_transformers: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Each rank has a slice of both heads; an as-served head gives its logits."""
    asked: dict[str, Any] = {"dtype": "float32", "divergence": "all"}
    (expected,) = compare(str(by_transformers), str(moved), out=tmp_path / "transformers", **asked)
    (found,) = compare(
        str(by_transformers), str(moved), engine="vllm", out=tmp_path / "vllm", **asked, **STEPS, **options
    )
    assert kl_of(expected).mean() > 1e-3, "the models differ"
    assert kl_of(found) == pytest.approx(kl_of(expected), rel=1e-3, abs=1e-7)
    assert found.candidate.scores.logprob == pytest.approx(expected.candidate.scores.logprob, abs=1e-4)
    ours, theirs = found.divergences, expected.divergences
    assert ours.kl_reverse == pytest.approx(theirs.kl_reverse, rel=1e-3, abs=1e-7)
    assert ours.total_variation == pytest.approx(theirs.total_variation, rel=1e-3, abs=1e-5)
    assert np.array_equal(np.array(ours.same_first), np.array(theirs.same_first))


TEXT = "Nobody minds the lazy dog at all, and the quick brown fox jumps over it again. " * 8


def test_every_way_to_feed_a_window_gives_its_scores(small_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and chunked prefill have an engine of their own, and all numbers of sequences have one."""
    starts: list[LaunchArguments] = []
    begin = of_prefill.VllmEngine._begin

    def counted(self: Any) -> None:
        starts.append(self.options)
        begin(self)

    monkeypatch.setattr(of_prefill.VllmEngine, "_begin", counted)
    asked: dict[str, Any] = {"text": TEXT, "context_length": 320, "stride": 200, "dtype": "float32"}
    found = sm.paths(
        str(small_llama),
        engine="vllm",
        vary=["decode", "chunked"],
        sequences=[1, 2],
        chunk_tokens=128,
        engine_args={"block_size": 32},
        **asked,
    )
    assert [c.name for c in found] == ["decode 1", "decode 2", "chunked 128"]
    assert [(o.prefix_caching, o.max_num_batched_tokens, o.path is not None) for o in starts] == [
        (False, None, False),
        (False, None, True),
        (False, 128, False),
    ]
    judge = sm.ppl(str(small_llama), engine="transformers", **asked)
    for c in found:
        assert np.abs(c.baseline.scores.logprob - judge.scores.logprob).max() < rounding.of_checkpoint(small_llama)
        assert np.abs(c.candidate.scores.logprob - judge.scores.logprob).max() < rounding.of_checkpoint(small_llama)
        assert np.abs(measured(c.kl)).max() < 1e-6
        assert c.manifest["rerun"]["rms"] < rounding.of_checkpoint(small_llama)
        assert c.noise_kl is not None
