"""Tensor and pipeline parallel, any batching: the same numbers as one rank with everything in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoremode.core.scores.answers import Answers, Window
from tests.engines.vllm.conftest import Judge, assert_same, engine_of, own, score


@pytest.fixture(scope="module")
def windows() -> list[Window]:
    """Lengths around every likely chunk size, rows with gaps, several targets, the last row."""
    rng = np.random.default_rng(11)
    found = [own(rng.integers(0, 1003, n)) for n in (2, 3, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 300, 512)]
    for n in (40, 200, 500):
        ids = rng.integers(0, 1003, n).astype(np.int32)
        rows = np.unique(np.append(rng.integers(0, n, n // 3), n - 1)).astype(np.int32)
        found.append(Window(ids, rows, rng.integers(0, 1003, (len(rows), 3)).astype(np.int32)))
    return found


@pytest.fixture(scope="module")
def alone(small_llama: Path, windows: list[Window]) -> list[Answers]:
    with engine_of(small_llama) as engine:
        assert engine.facts.vocabulary == 1003, "padding is not part of the vocabulary"
        return score(engine, windows)


def test_one_rank_against_transformers(alone: list[Answers], windows: list[Window], llama_judge: Judge) -> None:
    for window, answers in zip(windows, alone, strict=True):
        llama_judge.check(window, answers)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "max_num_batched_tokens": 96},
        {"tensor_parallel_size": 4, "head": "as-served", "head_bytes": 4 * 251 * 29 + 1},
        {"pipeline_parallel_size": 2, "max_num_batched_tokens": 200},
    ],
    ids=["tp2-chunked", "tp4-as-served-small-blocks", "pp2"],
)
def test_ranks_agree(
    small_llama: Path, windows: list[Window], alone: list[Answers], llama_judge: Judge, options: dict[str, Any]
) -> None:
    with engine_of(small_llama, **options) as engine:
        assert not engine.facts.settings["gathered_logits"]
        assert engine.facts.head == ("as-served" if options.get("head") else "exact-fp32")
        some = slice(None, None, 8 if "pipeline_parallel_size" in options else 1)  # stages take turns: seconds a step
        assert_same(score(engine, windows[some]), alone[some], llama_judge.nats)


def test_a_cache_so_small_that_requests_are_preempted(
    small_llama: Path, windows: list[Window], alone: list[Answers], llama_judge: Judge
) -> None:
    extra = {
        "num_gpu_blocks_override": 20,
        "block_size": 32,
        "long_prefill_token_threshold": 32,
        "scheduler_reserve_full_isl": False,
        "disable_log_stats": False,
    }
    with engine_of(small_llama, max_num_batched_tokens=256, engine_args=tuple(extra.items())) as engine:
        found = score(engine, windows * 2)
        preempted = sum(m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert preempted > 0, "the test does not test what it says"
    assert_same(found, alone * 2, llama_judge.nats)
