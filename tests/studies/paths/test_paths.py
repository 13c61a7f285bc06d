"""``scoremode paths``: one model's other paths against its prefill path."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.cli.commands import run as run_command
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.plan.path import DecodePath
from scoremode.core.plan.question import Question
from scoremode.core.scores.answers import measured
from scoremode.core.verbs.model import LazyModel
from scoremode.engines.llamacpp import LlamaCppPlugin
from scoremode.errors import EngineError, OptionError
from scoremode.studies.paths import variation
from tests import rounding
from tests.gguf_files import gguf_of, require_llamacpp

TEXT = "the cat sat on the mat and the dog ran away " * 4
QUESTION: dict[str, Any] = {"text": TEXT, "context_length": 24}


def kl_from_logits(file: str, sequences: int) -> Any:
    """The divergence of each decoded row from the prefilled one in float64, from the logits of two open engines."""
    chosen = choose(file, None, {"threads": 1})
    plan = LazyModel.named(file, None, {"threads": 1}).ask(Question(**QUESTION)).plan
    whole, steps = (open_engine(chosen, Work(24, path=path)) for path in (None, DecodePath(sequences)))
    found = np.zeros(plan.targets)
    for batch in measured(steps.batches(plan)):
        windows = [plan.window(int(index)) for index in batch]
        prefilled = [torch.cat([x.clone() for _, x in whole.logits(window)]) for window in windows]
        for rows, logits in steps.steps(windows):
            for (place, row), line in zip(rows, logits, strict=True):
                p, q = (x.double().log_softmax(-1) for x in (prefilled[place][row], line))
                found[plan.target_offsets[batch[place]] + row] = float((p.exp() * (p - q)).sum())
    whole.close()
    steps.close()
    return found


def test_the_paths_of_a_model_are_compared_target_by_target(tiny: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {**QUESTION, "dtype": "float32", "out": tmp_path / "all", "sequences": [1, 3]}
    one, three = sm.paths(str(tiny), **asked)
    assert [one.name, three.name] == ["decode 1", "decode 3"]
    prefill, decode = (sm.load(tmp_path / "all" / name) for name in ("prefill", "decode-3"))
    assert "path" not in prefill.manifest["method_settings"]
    assert decode.manifest["method_settings"]["sequences"] == 3
    moved = decode.scores.logprob - prefill.scores.logprob
    assert np.abs(moved).max() < rounding.of_checkpoint(tiny)
    found = three.statistics()
    assert found["delta_logprob_rms"] == pytest.approx(float(np.sqrt(np.square(moved).mean())))
    assert found["delta_logprob_max"] == np.abs(moved).max()
    assert found["same_top"] == np.equal(measured(decode.scores.top), measured(prefill.scores.top)).mean() == 1
    assert np.abs(measured(three.kl)).max() < rounding.of_checkpoint(tiny)
    assert three.noise_kl is not None
    assert three.manifest["rerun"]["words"].endswith("windows, 1 side by side instead of 3")
    assert three.manifest["rerun"]["rms"] < rounding.of_checkpoint(tiny)
    assert one.manifest["rerun"]["words"].endswith("windows, one at a time")
    assert one.manifest["rerun"]["largest"] == 0  # the same computation again
    alone = sm.ppl(str(tiny), dtype="float32", path="decode", sequences=3, **QUESTION)
    assert np.array_equal(alone.scores.logprob, decode.scores.logprob)
    again = sm.paths(str(tiny), **asked)[1]
    assert again.candidate.cached
    assert again.manifest["rerun"] == three.manifest["rerun"]
    assert np.array_equal(measured(again.kl), measured(three.kl))


@pytest.fixture(scope="module")
def gguf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    require_llamacpp()
    return str(gguf_of(tiny, tmp_path_factory.mktemp("gguf") / "tiny.gguf"))


def test_an_engine_with_logits_alone_gives_kl_too(gguf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence runs beside the logits of a window, and three beside those of three windows."""
    found = sm.paths(gguf, vary=["decode", "chunked"], threads=1, sequences=[1, 3], chunk_tokens=5, **QUESTION)
    one, three, chunked = found
    assert [c.name for c in found] == ["decode 1", "decode 3", "chunked 5"]
    for c, sequences in ((one, 1), (three, 3)):
        expected = kl_from_logits(gguf, sequences)
        assert expected.max() > 0
        assert np.abs(measured(c.kl) - expected).max() < 1e-12 + 1e-3 * expected.max()
    assert chunked.candidate.manifest["engine_settings"]["n_ubatch"] == 5
    assert chunked.candidate.plan_digest == chunked.baseline.plan_digest
    monkeypatch.setattr(variation, "available", lambda: 1 << 10)
    (without,) = sm.paths(gguf, threads=1, sequences=3, **QUESTION)
    assert without.kl is None
    assert "more than half of the free memory: give --sequences 1" in without.manifest["kl_missing"]
    assert np.array_equal(without.candidate.scores.logprob, three.candidate.scores.logprob)


def test_the_command_prints_a_row_for_each_number_of_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    asked = ["paths", "table:uniform", "--text", "abcdefgh abc", "--context-length", "6", "--sequences", "1,2"]
    assert run_command([*asked, "--report", str(page)]) in (0, None)
    said = capsys.readouterr().out
    for name in ("decode 1", "decode 2"):
        assert f"{name}: no difference found: the same bits as prefill on every target. Figures measured on" in said
    assert "decode 2" in page.read_text()
    assert run_command([*asked, "--json"]) in (0, None)
    first, second = json.loads(capsys.readouterr().out)["candidates"]
    assert (first["name"], second["name"], second["verdict"]) == ("decode 1", "decode 2", "no difference found")
    assert second["delta_logprob_rms"] == second["delta_logprob_max"] == second["kl_mean"] == 0
    assert second["rerun"] == {
        "rms": 0.0,
        "largest": 0.0,
        "targets": 10,
        "words": "2 windows, 1 side by side instead of 2",
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"path": "decode"}, "paths measures both paths; leave --path out"),
        ({"vary": "decoded"}, "there is no way 'decoded' to feed a model; did you mean 'decode'"),
        ({"vary": []}, "nothing to compare with prefill"),
        ({"sequences": [2, 0]}, "--sequences 0 is less than 1"),
        ({"sequences": [2, 5000]}, "--sequences 5000 is too many"),
        ({"chunk_tokens": 4}, "--chunk-tokens belongs to chunked; add chunked to --vary"),
        ({"vary": "chunked", "sequences": 4}, "--sequences belongs to decode; add decode to --vary"),
    ],
)
def test_what_cannot_be_compared_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        sm.paths("table:uniform", text=TEXT, **given)


def test_a_way_that_an_engine_lacks_is_refused_before_it_is_loaded(gguf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="no chunked path; leave chunked out of --vary, or use --engine"):
        sm.paths("table:uniform", vary="chunked", text=TEXT)

    def opened(*_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(LlamaCppPlugin, "open", opened)
    with pytest.raises(OptionError, match="a window of 24 tokens is not cut into chunks of 256; give --chunk-tokens 6"):
        sm.paths(gguf, vary="chunked", **QUESTION)


def test_a_promise_of_equal_bits_is_checked_and_stored(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from scoremode.engines.table import TablePlugin
    from scoremode.engines.transformers import TransformersPlugin

    for plugin in (TablePlugin, TransformersPlugin):
        monkeypatch.setattr(plugin, "capabilities", replace(plugin.capabilities, same_bits="EVERY_BIT=1"))
    (kept,) = sm.paths("table:successor", out=tmp_path / "kept", **QUESTION)
    words = "decode against prefill has the same bits on all 175 targets"
    assert kept.manifest["promise"] == f"EVERY_BIT=1 kept its promise: {words}"
    asked = ["paths", str(tiny), "--text", TEXT, "--context-length", "24", "--out", str(tmp_path / "broken")]
    assert run_command(asked) in (0, None)
    assert "decode 16: finding: EVERY_BIT=1 promises the same bits" in " ".join(capsys.readouterr().out.split())
    assert sm.load(tmp_path / "broken" / "decode-16").manifest["promise"].startswith("finding: EVERY_BIT=1")
