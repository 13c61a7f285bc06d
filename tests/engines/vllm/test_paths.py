"""The paths that a server mixes, on a real vLLM: decode, chunked prefill and cache hits against whole prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.scores.answers import measured
from scoremode.engines.vllm import engine as of_prefill
from scoremode.engines.vllm.support import LaunchArguments

TEXT = "Nobody minds the lazy dog at all, and the quick brown fox jumps over it again. " * 8


def test_every_way_to_feed_a_window_gives_its_scores(small_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and cache hits share an engine; chunked prefill and each number of sequences need their own."""
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
        vary=["decode", "chunked", "cache-hit"],
        sequences=2,
        chunk_tokens=128,
        engine_args={"block_size": 32},
        **asked,
    )
    assert [c.name for c in found] == ["decode 2", "chunked 128", "cache hit 128"]
    assert [(o.prefix_caching, o.max_num_batched_tokens, o.path is not None) for o in starts] == [
        (True, None, False),
        (False, None, True),
        (False, 128, False),
    ]
    judge = sm.ppl(str(small_llama), engine="transformers", **asked)
    for c in found:
        assert np.abs(c.baseline.scores.logprob - judge.scores.logprob).max() < 4e-5
        assert np.abs(c.candidate.scores.logprob - judge.scores.logprob).max() < 4e-5
        assert np.abs(measured(c.kl)).max() < 1e-6
        assert c.manifest["rerun"]["rms"] < 2e-5
        assert c.noise_kl is not None
    # only the first turn of the first window has nothing before it: later windows begin with 119 tokens of context
    targets = judge.manifest["targets"]
    said = f"turns of 128 tokens: {targets - 128:,} of {targets:,} targets were computed after a cached prefix"
    assert said in found[2].candidate.manifest["notes"]
