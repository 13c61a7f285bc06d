"""scoremode prob: one result a pair, JSON lines in and out, and an interrupted call that goes on."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scoremode.core.verbs.prob.many_pairs import CHUNK
from scoremode.core.verbs.prob.sequence import SequenceProbability
from tests import forked
from tests.command_line import Command, Refused

PAIRS = [("ab", "cd"), ("ab", "c"), ("xyz", "é")]


def write_pairs(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(pairs: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"prompt": p, "target": t} for p, t in pairs]


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pairs each call of the model was given."""
    sizes: list[int] = []
    original = SequenceProbability.score

    def counted(self: Any, pairs: Any, progress: Any = None) -> Any:
        sizes.append(len(pairs))
        return original(self, pairs, progress)

    monkeypatch.setattr(SequenceProbability, "score", counted)
    return sizes


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_json_is_a_list_of_objects_with_the_promised_facts(command: Command, stories: Path) -> None:
    outcome = command("prob", stories, "--prompt", "Once upon a", "--target", " time", "--target", " cat", "--json")
    assert outcome.code == 0
    assert outcome.err == ""
    for found in outcome.json:
        assert found.keys() >= {"prompt", "target", "log_prob", "prob", "perplexity", "boundary", "tokens"}
        assert found["tokens"]
        assert all(token.keys() >= {"id", "text", "logprob", "rank"} for token in found["tokens"])


def test_the_numbers_fit_each_other(command: Command, stories: Path) -> None:
    [found] = command("prob", stories, "--prompt", "Once upon a", "--target", " time, there", "--json").json
    assert found["log_prob"] == pytest.approx(sum(t["logprob"] for t in found["tokens"]))
    assert found["prob"] == pytest.approx(math.exp(found["log_prob"]))
    assert found["perplexity"] == pytest.approx(math.exp(-found["log_prob"] / len(found["tokens"])))


def test_a_probability_of_zero_is_null_in_the_logarithm(command: Command) -> None:
    [found] = command("prob", "table:successor", "--prompt", "a", "--target", "c", "--json").json
    assert (found["log_prob"], found["prob"], found["perplexity"]) == (None, 0.0, None)


def test_a_leading_space_is_added_only_when_asked_and_then_said(command: Command) -> None:
    arguments = ["prob", "table:uniform", "--prompt", "is", "--target", "Paris", "--json"]
    as_given, added = command(*arguments).json[0], command(*arguments, "--leading-space", "add").json[0]
    assert (as_given["target"], as_given["leading_space"]) == ("Paris", "as-given")
    assert (added["target"], added["leading_space"]) == (" Paris", "add")


def test_a_token_that_spans_the_boundary_is_reported(command: Command, stories: Path) -> None:
    [found] = command("prob", stories, "--prompt", "Once upon a ti", "--target", "me", "--json").json
    assert (found["boundary"], found["condition"] != "") == ("spanning", True)


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_table_shows_targets_with_their_tokens(command: Command) -> None:
    out = command("prob", "table:uniform", "--prompt", "ab", "--target", "cd").out
    assert [word for word in ("'cd'", "log prob", "perplexity", "'c' -5.545 #100") if word not in out] == []


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_pairs_come_from_json_lines(command: Command, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "pairs.jsonl", [*rows_of(PAIRS[:1]), {"prompt": "p", "targets": ["q", "r"]}])
    found = command("prob", "table:uniform", "--file", path, "--json").json
    assert [(f["prompt"], f["target"]) for f in found] == [("ab", "cd"), ("p", "q"), ("p", "r")]


def test_results_go_to_json_lines(command: Command, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "pairs.jsonl", rows_of(PAIRS))
    outcome = command("prob", "table:uniform", "--file", path, "--out", tmp_path / "results.jsonl")
    assert (outcome.code, outcome.out.count("\n")) == (0, 1)
    assert [(f["prompt"], f["target"]) for f in results(tmp_path / "results.jsonl")] == PAIRS


def test_the_file_and_the_screen_say_the_same(command: Command, tmp_path: Path) -> None:
    arguments = ["prob", "table:uniform", "--prompt", "ab", "--target", "c", "--target", "é\u2028", "--json"]
    printed = command(*arguments, "--out", tmp_path / "results.jsonl").json
    assert results(tmp_path / "results.jsonl") == printed


def test_a_finished_file_leaves_no_partial_one(command: Command, tmp_path: Path) -> None:
    command("prob", "table:uniform", "--prompt", "a", "--target", "b", "--out", tmp_path / "results.jsonl")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["results.jsonl", "results.jsonl.manifest.json"]


def many_pairs(count: int = CHUNK + 10) -> list[tuple[str, str]]:
    return [(f"prompt {i}", f"target {i}") for i in range(count)]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    original = SequenceProbability.score
    made: list[int] = []

    def breaking(self: Any, pairs: Any, progress: Any = None) -> Any:
        if len(made) == calls:
            raise KeyboardInterrupt
        made.append(1)
        return original(self, pairs, progress)

    monkeypatch.setattr(SequenceProbability, "score", breaking)


@pytest.fixture
def interrupted(command: Command, tmp_path: Path) -> list[object]:
    """The command line of a call that stopped after its first chunk."""
    path = write_pairs(tmp_path / "pairs.jsonl", rows_of(many_pairs()))
    arguments: list[object] = ["prob", "table:uniform", "--file", path, "--out", tmp_path / "results.jsonl"]
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 1)
        assert command(*arguments).code == 130
    return arguments


def test_an_interrupted_call_goes_on_where_it_stopped(
    command: Command, interrupted: list[object], asked: list[int]
) -> None:
    assert (command(*interrupted).code, asked) == (0, [10])


@pytest.mark.parametrize(
    ("changes", "differs"),
    [(["--leading-space", "add"], "boundary"), (["--spanning", "refuse"], "boundary")],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_what_other_settings_left_is_refused_by_name(
    refused: Refused, interrupted: list[object], tmp_path: Path, changes: list[str], differs: str
) -> None:
    before = (tmp_path / "results.jsonl.partial").read_bytes()
    line = refused(*interrupted, *changes)
    assert f"results.jsonl contains results of another question (it differs in: {differs})" in line
    assert line.endswith("; give another --out, or --fresh")
    assert (tmp_path / "results.jsonl.partial").read_bytes() == before


def test_fresh_discards_what_another_question_left(
    command: Command, interrupted: list[object], tmp_path: Path, asked: list[int]
) -> None:
    assert command(*interrupted, "--leading-space", "add", "--fresh").code == 0
    assert asked == [CHUNK, 10]
    assert {f["leading_space"] for f in results(tmp_path / "results.jsonl")} == {"add"}
    assert not (tmp_path / "results.jsonl.partial").exists()


def test_unicode_line_separators_do_not_tear_the_lines_of_an_interrupted_call(
    command: Command, tmp_path: Path, asked: list[int]
) -> None:
    """JSON leaves U+2028 and U+0085 as they are, and str.splitlines cuts there."""
    pairs = [("a\u2028b\x85c", "d"), *many_pairs()]
    path = write_pairs(tmp_path / "pairs.jsonl", rows_of(pairs))
    arguments = ["prob", "table:uniform", "--file", path, "--out", tmp_path / "results.jsonl"]
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 1)
        assert command(*arguments).code == 130
    asked.clear()
    assert (command(*arguments).code, asked) == (0, [len(pairs) - CHUNK])


def test_a_disk_that_fills_up_leaves_no_results_and_the_command_goes_on(
    command: Command, refused: Refused, tmp_path: Path
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    arguments = ["prob", "table:uniform", "--prompt", "a", "--target", "b", "--out", tmp_path / "results.jsonl"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scoremode.core.disk.files.os.fsync", full)
        assert "the disk is full" in refused(*arguments)
    assert not (tmp_path / "results.jsonl").exists()
    assert (command(*arguments).code, len(results(tmp_path / "results.jsonl"))) == (0, 1)


# ── whose file it is ─────────────────────────────────────────────────────────────────────────────────────────────────
ONE = ("prob", "table:uniform", "--prompt", "a", "--target", "b", "--out")


def test_results_that_are_there_are_read_and_that_is_said(command: Command, tmp_path: Path, asked: list[int]) -> None:
    out = tmp_path / "results.jsonl"
    assert command(*ONE, out).out == f"1 results in {out}\n"
    assert command(*ONE, out).out == f"1 results read from {out}; --fresh scores again\n"
    assert asked == [1]
    assert command(*ONE, out, "--fresh").out == f"1 results in {out}\n"
    assert asked == [1, 1]


def test_results_that_are_there_are_printed_as_json(command: Command, tmp_path: Path) -> None:
    first, second = (command(*ONE, tmp_path / "results.jsonl", "--json") for _ in range(2))
    assert first.json == second.json == results(tmp_path / "results.jsonl")
    assert (first.err, second.err) == ("", "")


def test_fresh_without_out_is_refused(refused: Refused) -> None:
    assert "leave --fresh out" in refused("prob", "table:uniform", "--prompt", "a", "--target", "b", "--fresh")


def test_results_go_through_a_link(command: Command, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "results.jsonl", tmp_path / "there" / "target.jsonl"
    link.symlink_to(target)
    assert command(*ONE, link).out == f"1 results in {link} (a link to {target})\n"
    assert link.is_symlink()
    assert len(results(target)) == 1
    assert command(*ONE, link).out.startswith("1 results read from ")


def test_results_go_to_standard_output(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scoremode", *ONE, "/dev/stdout"]
    piped = forked.run(command, capture_output=True, text=True, check=True)
    with (tmp_path / "log").open("wb") as file:
        forked.run(command, stdout=file, check=True)
    assert piped.stderr == "1 results in /dev/stdout\n"
    assert [json.loads(line)["target"] for line in piped.stdout.splitlines()] == ["b"]
    assert (tmp_path / "log").read_text() == piped.stdout


@pytest.mark.parametrize("flag", ["--json", "--fresh"])
def test_a_device_keeps_nothing_that_could_be_read_back(refused: Refused, flag: str) -> None:
    assert f"leave {flag} out" in refused(*ONE, "/dev/null", flag)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pair_longer_than_the_models_context_is_refused(refused: Refused, stories: Path) -> None:
    line = refused("prob", stories, "--prompt", "Once upon a time " * 300, "--target", " there")
    assert "512" in line
    assert "--context-length" not in line, "prob has no such flag"
