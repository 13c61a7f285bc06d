"""Standard input, output and error that are closed or full: the right exit code, one line where it can be said."""

from __future__ import annotations

import functools
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.text import Text

from scoremode.console import streams
from scoremode.console.terminal import console
from tests import forked
from tests.command_line import Command

PROGRAM = f"{shlex.quote(sys.executable)} -c 'from scoremode.cli.main import entry; entry()'"
PPL = "ppl table:uniform --text one"
PRINTING = ["--help", f"{PPL} --json"]


@functools.cache
def run(arguments: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """Through a shell, which alone can close a stream. The same command is run once."""
    command = f"{PROGRAM} {arguments} {redirection}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(("redirection", "why"), [(">/dev/full", "the disk is full"), (">&-", "it is closed")])
@pytest.mark.parametrize("arguments", PRINTING)
def test_a_result_that_cannot_be_printed_is_one_line_and_exit_code_2(
    arguments: str, redirection: str, why: str
) -> None:
    done = run(arguments, redirection)
    assert (done.returncode, done.stdout) == (2, "")
    expected = f"standard output could not be written: {why}; send it to a file or a terminal that takes it"
    assert done.stderr == f"scoremode: {expected}\n"


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
@pytest.mark.parametrize("arguments", ["--version", f"{PPL} --json"])
def test_without_standard_error_results_are_printed_all_the_same(arguments: str, redirection: str) -> None:
    done = run(arguments, redirection)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run(arguments, "").stdout != ""


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
@pytest.mark.parametrize("arguments", ["ppl", "pll", "report nothing-is-here", ""])
def test_a_complaint_that_nobody_can_read_still_sets_the_exit_code(arguments: str, redirection: str) -> None:
    done = run(arguments, redirection)
    assert (done.returncode, done.stderr) == (2, "")
    assert "scoremode: " not in done.stdout, "complaints do not go to standard output instead"


@pytest.mark.parametrize("width", [60, 80])
def test_what_is_copied_from_a_line_is_in_one_piece(
    width: int, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is no terminal's is not broken at all; a terminal's breaks between words that nobody copies."""
    folder = tmp_path / ("a-folder-with-a-name-that-is-longer-than-any-terminal-" * 2)
    folder.mkdir()
    (latin := folder / "latin.txt").write_bytes(b"caf\xe9")
    typed: list[tuple[list[object], list[str]]] = [
        (["ppl", "table:uniform", "--quiet", "--corpus", latin], [f"iconv -f latin1 -t utf-8 {latin} > fixed.txt"]),
        (["ppl", "table:uniform", "--quiet", "--corpus", folder / "not-there.txt"], [f"'{folder / 'not-there.txt'}'"]),
        (["ppl", "table:uniform", "--quiet", "--text", "abc", "--out", latin], [str(latin)]),
        (["cache", "--older-than", "30d"], ["scoremode cache prune --older-than …"]),
        (["show", latin, "--json"], [f"scoremode report {latin} --json"]),
        ([], ["scoremode ppl MODEL --corpus wikitext2"]),
    ]
    monkeypatch.setenv("COLUMNS", str(width))
    for words, pieces in typed:
        said = dict[bool, str]()
        for is_terminal in (False, True):
            with monkeypatch.context() as patched:
                patched.setattr("sys.stderr.isatty", lambda is_terminal=is_terminal: is_terminal)
                said[is_terminal] = command(*words).err
        assert said[False].count("\n") == 1
        lines = said[True].splitlines()
        assert " ".join(lines) == said[False].removesuffix("\n")
        for piece in pieces:
            assert any(piece in line for line in lines), (piece, lines)
        for line in lines:
            assert len(line) <= width or " " not in line.strip() or any(piece in line for piece in pieces), line


def test_a_run_is_kept_whole_where_no_stream_is_open(tmp_path: Path) -> None:
    """A file that is opened while descriptor 1 is free would take its number, and whatever is printed to it."""
    out = tmp_path / "run"
    assert run(f"{PPL} --out {shlex.quote(str(out))}", ">&- 2>&- <&-").returncode == 2
    done = run(f"report {shlex.quote(str(out))} --json", "")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["targets"] == 2


def test_a_broken_pipe_that_is_not_standard_output_is_an_error() -> None:
    """As that to a process that was killed: no reader left, and nothing was printed."""
    code = (
        "from scoremode.engines.table.engine import TableEngine\n"
        "def broken(*_): raise BrokenPipeError(32, 'Broken pipe')\nTableEngine.score = broken\n"
        "from scoremode.cli.main import entry\nentry()"
    )
    arguments = ["ppl", "table:uniform", "--text", "a new text", "--fresh"]
    done = forked.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "scoremode: Broken pipe; check the path and its permissions\n"


# ── any encoding, and text from anybody ──────────────────────────────────────────────────────────────────────────────
def results() -> tuple[streams.StandardOutput, io.BytesIO]:
    raw = io.BytesIO()
    return streams.StandardOutput(raw, "utf-8", write_through=True), raw


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("a line\n", "a line\n"),
        ("tab\tand é 東京 😀 ±", "tab\tand é 東京 😀 ±"),
        ("\x1b[2J", "\\u001b[2J"),
        ("\x9b2J \x7f \u202e \u2028", "\\u009b2J \\u007f \\u202e \\u2028"),
        ("\ud800", "\\ud800"),
        ("\r", "\\u000d"),
    ],
)
def test_control_characters_are_escaped_as_in_json(text: str, printed: str) -> None:
    stream, raw = results()
    assert stream.write(text) == len(text)
    assert raw.getvalue().decode() == printed


def test_colours_of_a_table_pass_and_those_of_its_text_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, raw = results()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = console()
    out.print(Text("bold\x1b[31m and \x9b", "bold"))
    assert raw.getvalue().decode() == "\x1b[1mbold\\u001b[31m and \\u009b\x1b[0m\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin1:strict", "ascii:ignore"])
def test_json_in_any_encoding_has_the_same_content(encoding: str) -> None:
    asked = [*shlex.split(PROGRAM), *("prob", "table:uniform", "--prompt", "é ±", "--target", "😀\x9b", "--json")]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(asked, capture_output=True, check=False, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    (found,) = json.loads(done.stdout.decode(encoding.split(":", maxsplit=1)[0]))
    assert (found["prompt"], found["target"]) == ("é ±", "😀\x9b")
