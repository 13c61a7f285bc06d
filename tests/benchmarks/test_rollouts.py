"""Both ways of the benchmark of rollouts share vLLM's real sampler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.benchmarks.conftest import load


def test_our_wrapper_is_taken_away_and_comes_back() -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    from vllm.v1.sample.sampler import Sampler

    from scoremode.studies.rollouts.engines.vllm_written_tokens import WritingWorker

    worker: Any = WritingWorker()
    worker.model_runner = SimpleNamespace(sampler=Sampler("processed_logprobs"))
    worker.scoremode_write(False)
    own, filters = vars(worker.model_runner.sampler), worker.model_runner.sampler.topk_topp_sampler
    ours = own["forward"], own["sample"], filters.logprobs_mode
    for _ in range(2):
        load("rollouts").use_stock_sampler(worker, True)
        assert (own.keys() & {"forward", "sample"}, filters.logprobs_mode) == (set(), "raw_logprobs")
        load("rollouts").use_stock_sampler(worker, False)
        assert (own["forward"], own["sample"], filters.logprobs_mode) == ours
