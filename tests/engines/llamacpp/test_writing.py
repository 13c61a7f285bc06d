"""Texts that llama.cpp writes, against Transformers and the decode path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import scoremode as sm

PROMPTS = ["The quick brown fox", "A model", "dog", "In 1999 there were cats", "the lazy dog, and", "东"]
EXACT: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32"}


def test_texts_are_those_of_transformers(tiny: Path, tiny_gguf: Path) -> None:
    drawn: dict[str, Any] = {"temperature": 0.7, "top_k": 40, "samples": 2, "seed": 5}
    for how in ({}, drawn):
        here = sm.rollouts(str(tiny_gguf), PROMPTS, max_tokens=12, sequences=4, **EXACT, **how)
        there = sm.rollouts(str(tiny), PROMPTS, max_tokens=12, dtype="float32", **how)
        assert [ids.tolist() for ids in here.written] == [ids.tolist() for ids in there.written]
        for name in ("raw_logprob", "logprob"):
            far = [np.abs(a - b).max() for a, b in zip(getattr(here, name), getattr(there, name), strict=True)]
            assert max(far) < 1e-4
        assert here.manifest["sampling"]["ends"] == there.manifest["sampling"]["ends"]


def test_the_decode_path_gives_the_log_probabilities_of_the_texts(tiny: Path, tiny_gguf: Path) -> None:
    written = sm.rollouts(str(tiny_gguf), PROMPTS, max_tokens=16, temperature=1, samples=2, sequences=12, **EXACT)
    run = sm.ppl(str(tiny_gguf), corpus=written, path="decode", sequences=12, **EXACT)
    assert np.abs(run.scores.logprob - np.concatenate(written.raw_logprob)).max() < 2e-5
    other = sm.ppl(str(tiny), corpus=written, path="decode", dtype="float32")
    assert np.abs(other.scores.logprob - run.scores.logprob).max() < 1e-4


def test_equal_steps_differ_by_the_rounding_of_their_reduction_alone(tiny_gguf: Path) -> None:
    """Prompts of one token and texts of one length: writing and replay feed the same tokens in the same steps."""
    written = sm.rollouts(str(tiny_gguf), ["c", "d", "f"], max_tokens=7, temperature=1, sequences=3)
    assert {len(ids) for ids in written.prompt_ids} == {1}
    run = sm.ppl(str(tiny_gguf), corpus=written, path="decode", sequences=3)
    assert np.abs(run.scores.logprob - np.concatenate(written.raw_logprob)).max() < 1e-6
