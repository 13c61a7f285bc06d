"""prob, base logits and heads that are more than a matrix, with vLLM: against Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.verbs.prob.sequence import SequenceProbability
from scoremode.errors import ModelError
from scoremode.studies.kld.file import KldFile
from tests.engines.vllm.conftest import Judge, engine_of, own, score
from tests.makers import VOCABULARY, make_family
from tests.studies.kld.kld_files import log_probabilities

LONG = "The quick brown fox jumps over the lazy dog. " * 4


def test_a_longer_prompt_than_vllm_was_started_for_starts_it_again(
    small_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scoremode.core.verbs.model.USUAL_LENGTH", 32)
    with SequenceProbability(str(small_llama), engine="vllm", dtype="float32") as lm:
        (short,) = lm.get_log_prob("The dog", " jumps")
        assert lm.engine.longest == 32
        (longer,) = lm.get_log_prob(LONG, " jumps")
        room = lm.engine.longest
        assert room is not None
        assert 64 < room <= 1024
        assert f"scoremode: vllm starts again, for windows of up to {room} tokens" in capsys.readouterr().err
        (again,) = lm.get_log_prob("The dog", " jumps")
        assert lm.engine.longest == room
        with pytest.raises(ModelError, match="more than the model's context of 1024; shorten the prompt"):
            lm.get_log_prob(LONG * 40, " jumps")
    expected = sm.prob(str(small_llama), prompt=["The dog", LONG], targets=[" jumps", " jumps"])
    assert [short.log_prob, longer.log_prob] == pytest.approx([r.log_prob for r in expected], abs=2e-3)
    assert again.log_prob == pytest.approx(short.log_prob, abs=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "phi"])
def test_a_soft_cap_and_a_bias_are_honoured(kind: str, tmp_path: Path) -> None:
    make_family(kind, hidden=128).save_pretrained(tmp_path)
    window = own(np.random.default_rng(0).integers(2, VOCABULARY, 60))
    with engine_of(tmp_path, max_model_len=64) as engine:
        assert engine.facts.head == "exact-fp32"
        (answers,) = score(engine, [window])
    Judge(tmp_path).check(window, answers, 5e-4)


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
        a, b = (log_probabilities(f, chunk) for f in (one, other))
        assert abs(a - b).max() < 1e-3
    (itself,) = sm.compare(str(tmp_path / "transformers.kld"), str(small_llama), dtype="float32")
    assert found.kl is not None
    assert itself.kl is not None
    assert len(found.kl) == len(itself.kl) > 100
    assert abs(found.kl - itself.kl).max() < 1e-4
