"""``scoremode paths``: one model's decode path against its prefill path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.cli.commands import run as run_command
from scoremode.errors import OptionError
from scoremode.plan.windows import measured
from tests.gguf_files import gguf_of, require_llamacpp

TEXT = "the cat sat on the mat and the dog ran away " * 4
QUESTION: dict[str, Any] = {"text": TEXT, "context_length": 24, "sequences": 3}


def test_the_paths_of_a_model_are_compared_target_by_target(tiny: Path, tmp_path: Path) -> None:
    found = sm.paths(str(tiny), dtype="float32", out=tmp_path / "both", **QUESTION)
    prefill, decode = (sm.load(tmp_path / "both" / name) for name in ("prefill", "decode"))
    assert "path" not in prefill.manifest["method_settings"]
    assert decode.manifest["method_settings"]["sequences"] == 3
    moved = decode.scores.logprob - prefill.scores.logprob
    assert np.abs(moved).max() < 2e-5
    drift = found.drift()
    assert drift.rms == pytest.approx(float(np.sqrt(np.square(moved).mean())))
    assert drift.largest == np.abs(moved).max()
    assert drift.flips == int((decode.scores.top != prefill.scores.top).sum()) == 0
    assert np.abs(measured(found.kl)).max() < 2e-5
    assert found.noise_kl is not None
    alone = sm.ppl(str(tiny), dtype="float32", path="decode", **QUESTION)
    assert np.array_equal(alone.scores.logprob, decode.scores.logprob)
    again = sm.paths(str(tiny), dtype="float32", out=tmp_path / "both", **QUESTION)
    assert again.candidate.cached
    assert np.array_equal(measured(again.kl), measured(found.kl))


def test_an_engine_without_hidden_states_gives_everything_but_kl(tiny: Path, tmp_path: Path) -> None:
    require_llamacpp()
    file = gguf_of(tiny, tmp_path / "tiny.gguf")
    found = sm.paths(str(file), threads=1, **QUESTION)
    assert found.kl is None
    assert "needs hidden states" in found.manifest["kl_missing"]
    assert found.drift().largest < 0.1


def test_the_command_prints_the_drift_and_draws_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    asked = ["paths", "table:uniform", "--text", "abcdefgh abc", "--context-length", "6", "--sequences", "2"]
    assert run_command([*asked, "--report", str(page)]) in (0, None)
    said = capsys.readouterr().out
    assert "mean +0, rms 0, largest 0 nats; 0 first choices changed" in said
    assert "decode: 2 sequences, 1 token prefilled" in said
    assert "decode" in page.read_text()
    assert run_command([*asked, "--json"]) in (0, None)
    facts = json.loads(capsys.readouterr().out)
    assert facts["drift"] == {"rms": 0.0, "largest": 0.0, "flips": 0}
    assert facts["candidates"][0]["name"] == "decode"


def test_paths_takes_no_path() -> None:
    with pytest.raises(OptionError, match="paths measures both paths; leave --path out"):
        sm.paths("table:uniform", text=TEXT, path="decode")
