"""Drift between settings: its arithmetic, its table, what it refuses, and that it computes instead of remembering."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.engine import registry
from scoremode.studies.paths import noise as verb
from scoremode.studies.paths.noise import drift, parse_vary
from tests.command_line import Command, Refused
from tests.makers import ask

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 6


def plan_of(text: str, **question: Any) -> Any:
    return ask("table:uniform", text=text, **{"method": "gptq", "context_length": 5, **question}).plan


# ── arithmetic ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_drift_is_the_formula() -> None:
    plan = plan_of("abcdefghijklmno")  # 3 windows of 4 targets
    rng = np.random.default_rng(0)
    reference, d = -rng.random(12), rng.normal(size=12)
    found = drift(plan, reference + d, reference)
    sums = d.reshape(3, 4).sum(1)
    assert found.mean == pytest.approx(d.mean())
    assert found.mean_abs == pytest.approx(np.abs(d).mean())
    assert found.rms == pytest.approx(math.sqrt((d**2).mean()))
    assert found.max == found.p999 == pytest.approx(np.abs(d).max())
    assert found.sequence_rms == pytest.approx(math.sqrt((sums**2).mean()))
    assert found.sequence_max == pytest.approx(np.abs(sums).max())


def test_the_quantile_leaves_one_target_in_a_thousand_out() -> None:
    plan = plan_of("x" * 2001, context_length=2001)
    d = np.zeros(2000)
    d[[3, 5, 7]] = 3.0, -2.0, 1.0
    found = drift(plan, d, np.zeros(2000))
    assert (found.max, found.p999) == (3.0, 1.0)


def test_documents_are_the_sequences_where_there_are_several(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abcd"}\n{"text": "efgh"}\n')
    question: dict[str, Any] = {"corpus": str(tmp_path / "a.jsonl"), "context_length": 3, "stride": 3}
    plan = ask("table:uniform", **question).plan
    found = drift(plan, np.ones(plan.targets), np.zeros(plan.targets))
    assert found.sequence_max == np.bincount(plan.target_document).max()
    assert found.sequence_max > plan.target_counts.max()
    noise = sm.noise("table:uniform", **question)
    assert noise.sequences == "documents"
    assert repr(noise).endswith("passes: 2; largest drift 0 nats")


def test_the_same_probability_of_zero_is_no_drift() -> None:
    plan = plan_of("abcde")
    zero = np.array([-np.inf, -1.0, -2.0, -3.0])
    assert drift(plan, zero, zero).max == 0.0
    other = drift(plan, np.array([-5.0, -1.0, -2.0, -3.0]), zero)
    assert other.max == other.p999 == math.inf


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("tensor-parallel-size=1,2", {"tensor_parallel_size": [1, 2]}),
        ("--dtype=float32,bfloat16", {"dtype": ["float32", "bfloat16"]}),
        ("gpu_memory_utilization=0.5", {"gpu_memory_utilization": [0.5]}),
        ("enforce-eager=true,false", {"enforce_eager": [True, False]}),
        ("engine=transformers,vllm", {"engine": ["transformers", "vllm"]}),
    ],
)
def test_values_have_the_type_of_their_flag(text: str, wanted: dict[str, list[Any]]) -> None:
    assert parse_vary([text]) == wanted


@pytest.mark.parametrize(
    ("vary", "says"),
    [
        (["dtyp=float32"], "did you mean 'dtype'"),
        (["dtype"], "give --vary dtype=A,B"),
        (["dtype=float32,float32"], "lacks a value, or has one twice"),
        (["batch-tokens=32,"], "give --vary batch-tokens=A,B"),
        (["batch-tokens=32,many"], "batch_tokens is 'many', which is not a whole number"),
        (["head=exact,approximate"], "--head approximate is not known; give exact or as-served"),
        (["dtype=float32,float31"], "--dtype float31 is not known"),
        (["tensor-parallel-size=1,2"], "--tensor-parallel-size does not apply to the transformers engine"),
        (["engine-arg=max_num_seqs"], "engine-arg is not a setting to compare"),
        (["engine=transformers,vlm"], "there is no engine 'vlm'"),
        (["batch-tokens=32,64", "--batch-tokens", 32], "leave --batch-tokens out"),
        (["dtype=float32", "--repeat", 1], "there is nothing to compare"),
    ],
)
def test_everything_is_refused_before_an_engine_starts(
    refused: Refused, tiny: Path, monkeypatch: pytest.MonkeyPatch, vary: list[Any], says: str
) -> None:
    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(registry, "open_engine", opened)
    flags = [part for text in vary for part in (("--vary", text) if "=" in str(text) or text == "dtype" else (text,))]
    assert says in refused("paths", tiny, "--text", TEXT, *flags)


# ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_reference_has_no_drift_and_the_rest_is_what_two_runs_give(tiny: Path) -> None:
    question: dict[str, Any] = {"text": TEXT, "method": "gptq", "context_length": 32}
    found = sm.noise(str(tiny), vary={"dtype": ["float32", "bfloat16"]}, **question)
    first, second = found.settings
    assert first.drift.max == 0.0
    assert first.perplexity_ratio == 1.0
    runs = [sm.ppl(str(tiny), dtype=dtype, **question) for dtype in ("float32", "bfloat16")]
    d = runs[1].scores.logprob - runs[0].scores.logprob
    assert second.drift.max == pytest.approx(np.abs(d).max(), rel=1e-6)
    assert second.drift.mean == pytest.approx(d.mean(), rel=1e-6)
    assert second.perplexity == pytest.approx(runs[1].perplexity.value, rel=1e-9)
    assert second.perplexity_ratio == pytest.approx(math.exp(-second.drift.mean), rel=1e-9)
    assert (first.facts.dtype, second.facts.dtype) == ("float32", "bfloat16")
    assert 0 < second.drift.max < 1


def test_an_engine_that_wavers_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from scoremode.engines.table.engine import TableEngine

    engine = TableEngine(np.zeros((1, 256)))
    calls = []

    def wavering(*_: Any, **__: Any) -> TableEngine:
        return engine

    score = TableEngine.score

    def off(self: TableEngine, *arguments: Any) -> Any:
        calls.append(1)
        self.logprobs = np.full((1, 256), -math.log(256) - 0.25 * (len(calls) - 1))
        return score(self, *arguments)

    monkeypatch.setattr(registry, "open_engine", wavering)
    monkeypatch.setattr(TableEngine, "score", off)
    (found,) = sm.noise("table:uniform", text="abcde", repeat=3).settings
    assert found.repeats is not None
    assert found.repeats.max == pytest.approx(0.5)
    assert found.repeats.mean == pytest.approx(-0.375)
    assert found.repeats.sequence_max == pytest.approx(2.0)


def test_json_is_plain_data() -> None:
    (found,) = sm.noise("table:successor", text="cba", repeat=2).as_json()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["perplexity"] is None  # probability zero


def test_a_promise_of_equal_bits_is_judged(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scoremode.engines.transformers import TransformersPlugin

    able = replace(TransformersPlugin.capabilities, same_bits="EVERY_BIT=1")
    monkeypatch.setattr(TransformersPlugin, "capabilities", able)
    asked: dict[str, Any] = {"vary": {"dtype": ["float32", "bfloat16"]}, "text": TEXT, "context_length": 32}
    found = sm.noise(str(tiny), **asked)
    kept = f"EVERY_BIT=1 kept its promise: a later pass has the same bits on all {found.plan.targets} targets"
    assert [s.promise for s in found.settings] == [kept, kept]  # a dtype may move scores
    assert found.as_json()[1]["promise"] == kept
    monkeypatch.setattr(verb, "SAME_BITS", {"dtype"})  # as if it might not
    one, other = sm.noise(str(tiny), repeat=1, **asked).settings
    words = "finding: EVERY_BIT=1 promises the same bits in every batch, but dtype bfloat16 instead of float32 moved"
    assert (one.promise, other.promise.startswith(words)) == ("", True)


def test_the_decode_path_is_repeated_too(tiny: Path) -> None:
    asked: dict[str, Any] = {"text": TEXT, "context_length": 32, "path": "decode", "sequences": 3}
    with sm.open(str(tiny), dtype="float32") as model:
        (found,) = sm.noise(model, **asked).settings
        with pytest.raises(sm.ScoremodeError, match="an open model has one setting"):
            sm.noise(model, vary={"dtype": ["float32", "bfloat16"]}, **asked)
    assert found.repeats is not None
    assert found.repeats.max == 0
    assert found.perplexity == sm.ppl(str(tiny), dtype="float32", **asked).perplexity.value


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────
PROMISED = {
    *("settings", "drift_mean", "drift_mean_abs", "drift_rms", "drift_p999", "drift_max", "perplexity"),
    *("perplexity_ratio", "sequence_drift_rms", "sequence_drift_max", "repeat_drift_max"),
    *("sequence_repeat_drift_max", "head"),
}


def test_json_has_the_promised_facts(command: Command, tiny: Path) -> None:
    arguments = ["--vary", "dtype=float32,bfloat16", "--vary", "batch-tokens=32,256"]
    outcome = command("paths", tiny, "--text", TEXT, "--context-length", 32, *arguments, "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json
    assert [o["settings"] for o in found] == [
        {"dtype": dtype, "batch-tokens": tokens} for dtype in ("float32", "bfloat16") for tokens in (32, 256)
    ]
    assert all(o.keys() >= PROMISED for o in found)
    assert [o["reference"] for o in found] == [True, False, False, False]
    assert found[0]["drift_max"] == 0
    assert found[1]["drift_max"] < 1e-4 < found[2]["drift_max"]
    assert found[0]["drift_rms"] <= found[0]["drift_max"]


def test_the_table_is_for_people_and_nothing_is_kept(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    out = command("paths", "table:uniform", "--text", "one two", "--vary", "noise").out
    words = ("nats per target", "mean |d|", "99.9%", "max", "perplexity", "seq. max", "repeat max", "closed-form")
    assert [word for word in words if word not in out] == []
    assert max(map(len, out.splitlines())) <= 100
    assert not (tmp_path / "cache").exists()
