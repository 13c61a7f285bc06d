"""The command line as a function: what it printed, what it complained, how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from scoremode.cli.main import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as one JSON value: fails where anything else was printed there."""
        return json.loads(self.out)


Command = Callable[..., Outcome]
Refused = Callable[..., str]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """``command("ppl", "table:uniform", …)``: the command line, in this process."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as ended:  # argparse ends this way
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def refused(command: Command) -> Refused:
    """The one line that a bad command line gives: exit code 2, nothing on standard output, what to type next."""

    def run(*arguments: object) -> str:
        outcome = command(*arguments)
        assert outcome.code == 2, f"exit code {outcome.code}: {outcome.err}"
        assert outcome.out == ""
        assert outcome.err.endswith("\n")
        line = outcome.err.removesuffix("\n")
        assert "\n" not in line, f"more than one line: {outcome.err!r}"
        assert line.startswith("scoremode")
        assert ";" in line, f"nothing says what to type next: {line}"
        return line

    return run
