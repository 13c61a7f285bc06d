"""prob with vLLM: the engine is started for the given prompts, and stopped however the command ends."""

from __future__ import annotations

from pathlib import Path

import pytest

import scoremode as sm
from scoremode.core.verbs.prob.sequence import SequenceProbability
from scoremode.errors import ModelError

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
