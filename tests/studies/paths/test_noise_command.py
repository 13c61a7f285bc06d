"""scoremode noise: the table, the JSON, the refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import Command, Refused

TEXT = "Once upon a time there was a little girl named Lily. " * 4
PROMISED = {
    *("settings", "drift_mean", "drift_mean_abs", "drift_rms", "drift_p999", "drift_max", "perplexity"),
    *("perplexity_ratio", "sequence_drift_rms", "sequence_drift_max", "repeat_drift_max"),
    *("sequence_repeat_drift_max", "head"),
}


def test_json_has_the_promised_facts(command: Command, tiny: Path) -> None:
    arguments = ["--vary", "dtype=float32,bfloat16", "--vary", "batch-tokens=32,256"]
    outcome = command("noise", tiny, "--text", TEXT, "--context-length", 32, *arguments, "--json")
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


def test_the_table_is_for_people(command: Command, tiny: Path) -> None:
    out = command("noise", tiny, "--text", TEXT, "--vary", "head=exact,as-served", "--dtype", "bfloat16").out
    words = ("nats per target", "mean |d|", "99.9%", "max", "perplexity", "seq. max", "repeat max", "exact-fp32")
    assert [word for word in words if word not in out] == []
    assert max(map(len, out.splitlines())) <= 100


def test_a_table_repeats_exactly(command: Command) -> None:
    (found,) = command("noise", "table:uniform", "--text", TEXT, "--repeat", 3, "--json").json
    assert (found["repeat_drift_max"], found["repeat"], found["settings"]) == (0, 3, {})
    assert found["perplexity"] == pytest.approx(256)


def test_one_pass_has_no_repeat_drift(command: Command, tiny: Path) -> None:
    arguments = ["--vary", "dtype=float32,float64", "--repeat", 1]
    found = command("noise", tiny, "--text", TEXT, *arguments, "--json").json
    assert "repeat_drift_max" not in found[0]
    assert command("noise", tiny, "--text", TEXT, *arguments).out.count("–") >= 2


def test_nothing_is_kept(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    command("noise", "table:uniform", "--text", "one two")
    assert not (tmp_path / "cache").exists()


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("vary", "says"),
    [
        (["dtyp=float32"], "did you mean 'dtype'"),
        (["dtype"], "give --vary dtype=A,B"),
        (["dtype="], "give --vary dtype=A,B"),
        (["batch-tokens=32,"], "give --vary batch-tokens=1,2"),
        (["batch-tokens=many"], "not a whole number"),
        (["=1"], "--vary does not know ''"),
        (["dtype=float32", "dtype=bfloat16"], "one --vary dtype=A,B"),
        (["head=exact,approximate"], "--vary head=approximate"),
        (["tensor-parallel-size=1,2"], "--tensor-parallel-size does not apply to the transformers engine"),
        (["engine-arg=max_num_seqs"], "give --engine-arg once"),
        (["enforce-eager=perhaps"], "true or false"),
        (["engine=transformers,table"], "--engine transformers"),
    ],
)
def test_a_bad_vary_is_refused(refused: Refused, tiny: Path, vary: list[str], says: str) -> None:
    flags = [part for text in vary for part in ("--vary", text)]
    assert says in refused("noise", tiny, "--text", TEXT, *flags)


def test_a_flag_that_is_given_and_varied_is_refused(refused: Refused, tiny: Path) -> None:
    line = refused("noise", tiny, "--text", TEXT, "--dtype", "float32", "--vary", "dtype=float32,bfloat16")
    assert "leave --dtype out" in line


def test_nothing_to_compare_is_refused(refused: Refused) -> None:
    assert "--repeat 2" in refused("noise", "table:uniform", "--text", TEXT, "--repeat", 1)
