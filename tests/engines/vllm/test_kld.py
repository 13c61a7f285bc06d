"""Files of base logits with vLLM: written from its states, and compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import scoremode as sm
from scoremode.studies.kld.file import KldFile, log_probabilities

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 20
ASKED: dict[str, Any] = {"text": TEXT, "context_length": 64}


def test_vllm_writes_and_reads_the_files_of_transformers(small_llama: Path, tmp_path: Path) -> None:
    sm.reference(str(small_llama), kld=tmp_path / "transformers.kld", dtype="float32", **ASKED)
    with sm.open(str(small_llama), engine="vllm", dtype="float32") as model:
        model.reference(kld=tmp_path / "vllm.kld", method="llamacpp", **ASKED)
        found = model.compare(tmp_path / "transformers.kld")
    one, other = (KldFile(tmp_path / f"{name}.kld") for name in ("transformers", "vllm"))
    assert np.array_equal(one.tokens, other.tokens)
    for chunk in range(one.layout.chunks):
        a, b = (log_probabilities(f.records(chunk), f.layout.vocabulary) for f in (one, other))
        assert abs(a - b).max() < 1e-3
    (itself,) = sm.compare(str(tmp_path / "transformers.kld"), str(small_llama), dtype="float32")
    assert found.kl is not None
    assert itself.kl is not None
    assert len(found.kl) == len(itself.kl) > 100
    assert abs(found.kl - itself.kl).max() < 1e-4
