"""Heads that are more than a matrix: what a model does to its logits is done by its own code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engines.vllm.conftest import Judge, engine_of, own, score
from tests.makers import VOCABULARY, make_family


@pytest.mark.parametrize("kind", ["gemma2", "phi"])
def test_a_soft_cap_and_a_bias_are_honoured(kind: str, tmp_path: Path) -> None:
    make_family(kind, hidden=128).save_pretrained(tmp_path)
    window = own(np.random.default_rng(0).integers(2, VOCABULARY, 60))
    with engine_of(tmp_path, max_model_len=64) as engine:
        assert engine.facts.head == "exact-fp32"
        (answers,) = score(engine, [window])
    Judge(tmp_path).check(window, answers, 5e-4)
