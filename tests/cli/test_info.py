"""scoremode info: what it says, and that it fails when a number is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoremode.core.engine.registry import known_engines
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.errors import EngineError, ModelError
from tests import forked
from tests.command_line import Command, Refused
from tests.gguf_files import require_llamacpp


@pytest.fixture(autouse=True)
def without_vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start takes half a minute; one test below is for it."""

    def missing() -> str:
        raise ModelError("needs vLLM", fix="pip install '.[vllm]'")

    if "slow" not in request.keywords:
        monkeypatch.setattr("scoremode.engines.vllm.support.installed_version", missing)


def test_json_has_the_facts(command: Command) -> None:
    outcome = command("info", "--test", "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json
    assert found["versions"].keys() >= {"scoremode", "python", "torch", "transformers"}
    assert found["devices"][0]["device"] == "cpu"
    assert found["devices"][0]["threads"] >= 1
    assert found["head_kernels"]["cpu float32"] == "blocked"
    assert found["cache"]["writable"] is True
    assert "needs vLLM" in {one["name"]: one for one in found["engines"]}["vllm"]["problem"]
    assert found["good"] is True
    names = [check["name"] for check in found["self_tests"]]
    assert {"engine table", "engine transformers"} <= set(names)
    tested = {name.removeprefix("engine ") for name in names}
    assert tested.isdisjoint(found["not_tested"])
    assert {engine["name"] for engine in found["engines"]} <= tested | found["not_tested"].keys()
    assert "needs vLLM" in found["not_tested"]["vllm"]
    assert "scoremode ppl" in found["not_tested"]["server"]
    assert all(check["error"] <= check["allowed"] for check in found["self_tests"])


def test_the_table_is_for_people(command: Command) -> None:
    outcome = command("info", "--test", "--engine", "table")
    words = ("torch", "cpu", "cache folder", "vllm", "smollm2-135m", "self-test: engine table")
    assert [word for word in words if word not in outcome.out] == []
    assert "self-test: engine transformers" not in outcome.out


def test_nothing_is_left_behind(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    command("info", "--test", "--engine", "transformers")
    assert list(tmp_path.iterdir()) == []


def _wrong(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    score = TransformersEngine.score

    def changed(self: TransformersEngine, *arguments: Any) -> Any:
        return ((index, change(answers)) for index, answers in score(self, *arguments))

    monkeypatch.setattr(TransformersEngine, "score", changed)


def test_scores_shifted_by_one_are_found_out(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    _wrong(lambda answers: replace(answers, logprob=np.roll(answers.logprob, 1, axis=0)), monkeypatch)
    outcome = command("info", "--test", "--engine", "transformers")
    assert outcome.code == 2
    assert "FAILED" in outcome.out
    assert outcome.err.startswith("scoremode: the self-test of engine transformers failed: ")
    assert outcome.err.count("\n") == 1
    assert ";" in outcome.err


def test_nan_is_found_out_and_is_not_json(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    _wrong(lambda answers: replace(answers, entropy=answers.entropy * np.nan), monkeypatch)
    outcome = command("info", "--test", "--engine", "transformers", "--json")
    assert outcome.code == 2
    assert outcome.json["good"] is False
    assert outcome.json["self_tests"][-1]["error"] is None


def test_an_engine_that_cannot_start_fails_its_self_test(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: Any, **__: Any) -> None:
        raise EngineError("it died", fix="try again")

    monkeypatch.setattr("scoremode.cli.info.open_engine", dies)
    outcome = command("info", "--test", "--engine", "transformers")
    assert outcome.code == 2
    assert "it died" in outcome.err


def test_a_vllm_that_is_not_there_is_refused(refused: Refused) -> None:
    assert "needs vLLM" in refused("info", "--test", "--engine", "vllm")


def test_llamacpp_is_tested_with_a_small_gguf(command: Command) -> None:
    require_llamacpp()
    outcome = command("info", "--test", "--engine", "llamacpp", "--json")
    assert outcome.code == 0, outcome.err
    check = outcome.json["self_tests"][-1]
    assert (check["name"], check["good"]) == ("engine llamacpp", True)
    assert 0 < check["error"] < 2e-4


def test_an_engine_that_cannot_be_tested_is_refused_or_listed(
    command: Command, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    for plugin in known_engines().values():
        monkeypatch.setattr(type(plugin), "self_test", lambda *_: None)
    assert "there is no self-test of the transformers engine" in refused("info", "--test", "--engine", "transformers")
    outcome = command("info", "--test")
    assert "not tested" in outcome.out
    assert "self-test: engine transformers" in outcome.out


@pytest.mark.slow
def test_vllm_passes(command: Command) -> None:
    pytest.importorskip("vllm")
    with forked.vllm_engines():
        outcome = command("info", "--test", "--engine", "vllm", "--json")
    assert outcome.code == 0, outcome.err
    (about,) = {one["name"]: one for one in outcome.json["engines"]}["vllm"]["about"]
    assert (about["label"], about["good"]) == ("vLLM plugin", True)
    assert outcome.json["self_tests"][-1]["name"] == "engine vllm"
