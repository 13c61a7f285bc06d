"""The edge of the command line: exit codes, one line for each refusal, nothing heavy, nothing raw on the terminal."""

from __future__ import annotations

import errno
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import scoremode
from scoremode import __version__
from scoremode.cli import commands as edge
from tests import forked
from tests.command_line import Command, Refused

# output is buffered for users, and some faults show only when the buffer is emptied at the end
BUFFERED = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
PROGRAM = [sys.executable, "-c", "from scoremode.cli.main import entry; entry()"]


def run(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    return forked.run(
        PROGRAM + [str(a) for a in arguments], capture_output=True, text=True, check=False, timeout=120, **more
    )


def test_the_version_is_printed(command: Command) -> None:
    assert command("--version").out == f"scoremode {__version__}\n"


def test_without_a_command_help_is_shown_and_one_line_says_what_is_missing(command: Command) -> None:
    outcome = command()
    assert (outcome.code, "examples:" in outcome.out) == (2, True)
    assert (
        outcome.err
        == "scoremode: no command was given; type scoremode VERB, as in scoremode ppl MODEL --corpus wikitext2\n"
    )


class PanicException(BaseException):
    """What a library in Rust raises; its real class cannot be imported."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PanicException("regex"), "check the model's tokenizer.json"),
        (OSError(errno.ENOSPC, "No space left"), "the disk is full; free some space"),
        (OSError(errno.EDQUOT, "Quota exceeded"), "the disk is full; free some space"),
        (MemoryError(), "--context-length"),
    ],
)
def test_a_cause_outside_of_us_is_named(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("scoremode.core.verbs.model.LazyModel.score", fails)
    assert words in refused("ppl", "table:uniform", "--text", "one two")


def test_a_bug_of_ours_is_one_line_with_an_exit_code_of_its_own(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("scoremode.core.verbs.model.LazyModel.score", broken)
    outcome = command("ppl", "table:uniform", "--text", "one two")
    assert (outcome.code, outcome.err.count("\n"), "SCOREMODE_DEBUG=1" in outcome.err) == (70, 1, True)


def test_control_characters_of_a_file_do_not_reach_the_terminal_through_a_refusal(
    refused: Refused, tmp_path: Path
) -> None:
    """The names of a row's fields are quoted in the line, and a file may hold anything."""
    (tmp_path / "a.jsonl").write_text('{"\\u001b[2J\\u009b31m": "x"}\n')
    line = refused("ppl", "table:uniform", "--corpus", tmp_path / "a.jsonl")
    assert [c for c in line if c in "\x1b\x9b"] == []


# ── a true process ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_nothing_is_on_standard_error_where_nobody_watches_and_nothing_is_wrong(tmp_path: Path) -> None:
    done = run("ppl", "table:uniform", "--text", "one two", "--json", "--out", tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")


def test_text_from_a_pipe_is_scored(tmp_path: Path) -> None:
    done = run("plan", "table:uniform", "--corpus", "-", "--json", input="from a pipe")
    assert (done.returncode, '"targets": 10' in done.stdout) == (0, True)


@pytest.mark.parametrize(
    "arguments", [["info", "methods"], ["info", "methods", "--json"], ["info", "engines", "--json"]], ids=" ".join
)
def test_a_reader_that_leaves_early_is_no_error(arguments: list[str]) -> None:
    """As in ``scoremode info methods | head -1``."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = forked.run(
            [*PROGRAM, *arguments], stdout=write, stderr=subprocess.PIPE, check=False, timeout=120, env=BUFFERED
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_file_that_may_not_grow_leaves_no_manifest(tmp_path: Path) -> None:
    """A limit on file sizes stands for a disk that fills up while a run is written."""
    code = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "from scoremode.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    arguments = ["ppl", "table:uniform", "--text", "word " * 400, "--out", str(tmp_path / "run"), "--json"]
    done = forked.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert not (tmp_path / "run" / "manifest.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_terminal_sees_progress() -> None:
    main_end, other_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [*PROGRAM, "ppl", "table:uniform", "--text", "one two", "--json", "--fresh"],
        stdout=subprocess.DEVNULL,
        stderr=other_end,
        env=environment,
    )
    os.close(other_end)
    seen = b""
    try:
        while piece := os.read(main_end, 4096):
            seen += piece
    except OSError:  # a terminal ends so on Linux
        pass
    finally:
        os.close(main_end)
        process.wait(60)
    assert b"scoring" in seen
    assert process.returncode == 0


# ── verbs ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_there_are_few_verbs_and_each_is_a_function_of_the_same_name() -> None:
    assert len(edge.COMMANDS) <= 16
    assert [verb for verb in edge.COMMANDS if not callable(getattr(scoremode, verb.replace("-", "_"), None))] == []


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("show runs/base --json", "report runs/base --json"),
        ("noise m --repeat 3", "paths m --repeat 3 --vary noise"),
        ("noise", "paths MODEL --vary noise"),
        ("mismatch written m --clip-low 0.5", "compare rollouts:written m --clip-low 0.5"),
        ("methods", "info methods"),
        ("methods gptq", "info methods gptq"),
        ("engines --json", "info engines --json"),
        ("doctor --engine table", "info --test --engine table"),
        (f"show {'x' * 900}", "report RUN"),
    ],
)
def test_a_command_that_became_part_of_another_is_answered_with_that(refused: Refused, old: str, now: str) -> None:
    assert refused(*old.split()).rstrip().endswith(f"type scoremode {now}")
    if "x" * 900 not in old:
        edge.build_parser().parse_args(now.split())
