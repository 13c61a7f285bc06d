"""Two replicas behind one address, by vLLM's own ``--data-parallel-size``, with the routes of older versions."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import scoremode as sm
from tests.remote.service.conftest import ServedModel

TEXT = "the cat sat on the mat and the dog ran to the park with the cat " * 60


def test_both_replicas_answer(small_llama: Path, tmp_path: Path) -> None:
    """The middleware is what vLLM 0.24 and 0.25 get, which have no endpoint plugins."""
    served = ServedModel(small_llama, tmp_path, "--data-parallel-size", "2", SCOREMODE_SERVICE_MIDDLEWARE="1")
    try:
        served.start()
        ours = sm.ppl("llama", engine=served.address, tokenizer=str(small_llama), text=TEXT, context_length=100)
        _, metrics = served.ask("/metrics")
        status, told = served.ask("/v1/scoremode/prob", b'{"prompt": "the cat", "targets": " sat"}')
        assert served.interrupt() in (0, 130)
    finally:
        served.kill()
    assert "ScoreMiddleware" in served.said()
    assert status == 200, told
    counted = re.findall(
        r'^vllm:request_success_total\{engine="(\d)",finished_reason="stop".* (\S+)$', metrics.decode(), re.M
    )
    assert {engine for engine, count in counted if float(count) > 1} == {"0", "1"}
    local = sm.ppl(str(small_llama), engine="transformers", dtype="float32", text=TEXT, context_length=100)
    np.testing.assert_allclose(ours.scores.logprob, local.scores.logprob, rtol=0, atol=2e-4)
    assert ours.manifest["engine_settings"]["data_parallel_size"] == 2
    with pytest.raises(sm.ScoremodeError, match=r"nothing answers|has just ended"):
        sm.ppl("llama", engine=served.address, text=TEXT)
