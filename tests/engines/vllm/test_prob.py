"""prob with vLLM: the engine is started for the given prompts, and stopped however the command ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.core.verbs.prob.many_pairs import CHUNK
from scoremode.core.verbs.prob.sequence import SequenceProbability
from scoremode.errors import ModelError
from tests import forked
from tests.engines.vllm.test_cli import ENTRY, assert_no_orphans

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


def test_an_interrupted_prob_leaves_no_process_and_keeps_what_is_done(small_llama: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"The dog {i} ", "target": "jumps over the lazy dog"} for i in range(60 * CHUNK)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["prob", str(small_llama), "--engine", "vllm", "--dtype", "float32", "--file", "pairs.jsonl"]
    process = forked.VllmPopen(
        [sys.executable, "-c", ENTRY, *command, "--out", "r.jsonl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=tmp_path,
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / "r.jsonl.partial").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing was scored"
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, complaint = process.communicate(timeout=120)
    assert process.returncode == 130, complaint
    assert "Traceback" not in complaint
    assert_no_orphans(process.pid)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pairs.jsonl", "r.jsonl.partial"]
