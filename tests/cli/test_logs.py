"""The log: lines on standard error for the command line, standard logging for Python."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest

from scoremode.cli.commands import COMMANDS, build_parser, verb_of
from scoremode.cli.parser import Parser
from scoremode.console import streams
from scoremode.errors import print_line
from tests.command_line import Command
from tests.house import HOUSE

NOTE = "import logging, scoremode.core.store.runs; logging.getLogger('scoremode.core.store').warning('a note')"


@pytest.fixture(autouse=True)
def _default_level() -> Iterator[None]:
    yield
    streams.show_log()


@pytest.mark.parametrize("verb", [name for name in COMMANDS if not verb_of(name).passes_all_on])
def test_every_verb_has_the_flags(verb: str) -> None:
    parser = build_parser()
    assert isinstance(parser, Parser)
    assert {"--verbose", "--quiet"} <= parser.verbs()[verb].flags()


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        ({}, ["an info", "a warning", "an error"]),
        ({"quiet": True}, ["an error"]),
        ({"verbose": True}, ["a debug", "an info", "a warning", "an error"]),
    ],
)
def test_how_much_is_shown(flags: dict[str, bool], levels: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    streams.show_log(**flags)
    logger = logging.getLogger("scoremode.any.room")
    logger.debug("a debug")
    logger.info("an info")
    logger.warning("a warning")
    logger.error("an error")
    assert capsys.readouterr().err.splitlines() == [f"scoremode: {level}" for level in levels]


def test_a_line_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("scoremode.any").warning("two\nlines \x1b[2J")
    assert capsys.readouterr().err == "scoremode: two lines �[2J\n"


def test_a_line_without_the_name_stays_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("cache: removed 3 runs")
    print_line("scoremode: taking over")
    assert capsys.readouterr().err == "cache: removed 3 runs\nscoremode: taking over\n"


def test_flags_change_the_level_of_one_command(command: Command) -> None:
    assert command("info", "engines", "--quiet").code == 0
    assert streams.is_quiet()
    assert command("info", "engines").code == 0
    assert not streams.is_quiet()
    outcome = command("info", "engines", "--quiet", "--verbose")
    assert (outcome.code, "exclude each other" in outcome.err) == (2, True)


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        ("", ""),  # a library says nothing by itself, not even through Python's handler of last resort
        ("import logging; logging.basicConfig(format='%(name)s %(message)s')\n", "scoremode.core.store a note\n"),
        ("import logging; logging.getLogger('scoremode').setLevel('ERROR')\n", ""),
    ],
)
def test_python_users_configure_the_log_as_they_like(configured: str, expected: str) -> None:
    done = subprocess.run([sys.executable, "-c", configured + NOTE], capture_output=True, text=True, check=True)
    assert done.stderr == expected


def test_nothing_outside_the_command_line_writes_to_standard_error() -> None:
    """The rest of the house logs; only libraries that print by themselves have their output redirected."""
    writes = re.compile(r"file=sys\.stderr|sys\.stderr\.write|print_exc|warnings\.warn\(")
    found = [
        path
        for path in HOUSE.rglob("*.py")
        if not {"cli", "console"} & set(path.parts) and writes.search(path.read_text())
    ]
    assert found == []


def test_a_librarys_warning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        streams.show_log()
        warnings.warn("a kernel is missing\nframe #0: c10::Error (0x1 in libc10.so)\nframe #1", stacklevel=1)
    assert capsys.readouterr().err == "scoremode: a library warns: a kernel is missing\n"
