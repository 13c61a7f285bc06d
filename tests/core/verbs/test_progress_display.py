"""Progress without a terminal: a line every 30 seconds, a bar in a notebook, and words for what is waited for."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import scoremode as sm
from scoremode.console.output import ProgressLines, progress_bar
from scoremode.console.streams import lasting_stderr
from scoremode.core.verbs import progress
from scoremode.core.verbs.progress import ProgressState
from tests.house import needs_wing
from tests.s3 import wait_until


def test_a_line_has_what_is_done_the_speed_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    state = ProgressState()
    assert state.line() == "starting, for 0 s"
    state.phase("loading org/model with transformers")
    clock.now += 40
    assert state.line() == "loading org/model with transformers, for 40 s"
    state(90_000, 100_000)  # of a resumed run: done before
    assert state.line() == "scoring, 90,000 of 100,000 tokens"
    clock.now += 10
    state(91_000, 100_000)
    assert state.line() == "scoring, 91,000 of 100,000 tokens, 100 tokens/s, about 2 min left"
    assert (state.speed, state.seconds_left) == (100.0, 90.0)
    state.label("1 of 2 candidates scored")
    assert state.line().startswith("1 of 2 candidates scored, 91,000 of")


def test_a_library_is_named_while_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_library.py").write_text("import threading, gate\ngate.begun.set()\ngate.goes_on.wait(20)\n")
    gate: Any = SimpleNamespace(begun=threading.Event(), goes_on=threading.Event())
    monkeypatch.setitem(sys.modules, "gate", gate)
    monkeypatch.syspath_prepend(tmp_path)
    state = ProgressState()
    thread = threading.Thread(target=lambda: __import__("slow_library"))
    thread.start()
    try:
        assert gate.begun.wait(20)
        assert state.words == "importing slow_library"
        assert ProgressState().words == "starting", "what began before the work is not what the work waits for"
    finally:
        gate.goes_on.set()
        thread.join()
        sys.modules.pop("slow_library", None)
    assert state.words == "starting"


def test_lines_come_now_and_then_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def lines() -> int:
        said.append(capsys.readouterr().err)
        return "".join(said).count("scoremode: loading a model")

    with ProgressLines("scoring", "tokens", 0.01, sys.stderr) as progress:
        progress.phase("loading a\x1b[2J model\n")
        progress.phase("loading a model")
        wait_until(lambda: lines() >= 2)
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
    assert "\x1b" not in "".join(said)


def test_a_pipe_that_nobody_reads_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    with os.fdopen(writer, "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with lasting_stderr() as stream, ProgressLines("scoring", "tokens", 0.01, stream):
            time.sleep(0.1)
        monkeypatch.undo()
        os.close(reader)  # the thread goes on, and ends


LATE = """
import logging
from scoremode.console.output import progress_bar

with progress_bar("scoring") as progress:
    handler = logging.StreamHandler()  # it keeps the stream of now, as those of libraries do
logging.getLogger("library").addHandler(handler)
logging.getLogger("library").warning("a late line")
"""


def test_a_library_may_log_to_the_terminal_when_the_line_is_gone() -> None:
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", LATE], stderr=theirs, stdout=theirs, check=True, timeout=60)
    os.close(theirs)
    assert b"a late line" in (said := os.read(ours, 1 << 16))
    assert b"Traceback" not in said
    os.close(ours)


def test_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("scoremode"), "level", logging.ERROR)
    logging.getLogger("scoremode").manager._clear_cache()  # type: ignore[attr-defined]
    try:
        with progress_bar("scoring") as progress:
            assert progress is None
    finally:
        monkeypatch.undo()
        logging.getLogger("scoremode").manager._clear_cache()  # type: ignore[attr-defined]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A kernel of Jupyter whose bars are lines of a console; returns the phases that were shown."""
    shown: list[str] = []

    class Bar(progress.ProgressBar):
        def __init__(self) -> None:
            super().__init__(console=Console(file=io.StringIO()))

        def phase(self, words: str) -> None:
            shown.append(words)
            super().phase(words)

    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(progress, "ProgressBar", Bar)
    return shown


def test_a_notebook_has_a_bar(notebook: list[str]) -> None:
    sm.ppl("table:uniform", text="any text", fresh=True)
    assert notebook[0] == "starting"
    assert "scoring" in notebook


def test_a_progress_of_ones_own_takes_the_place_of_the_bar(notebook: list[str]) -> None:
    seen: list[int] = []
    with sm.open("table:uniform") as model:
        model.ppl(text="any text", fresh=True, progress=lambda done, total: seen.append(done))
    assert seen
    assert notebook == []


@needs_wing("reports/html")
def test_a_real_notebook_shows_one_table_and_nothing_else() -> None:
    """Without ipywidgets, with which rich shows bars there."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    from nbformat.v4 import new_code_cell, new_notebook

    code = 'import scoremode as sm\nsm.compare("table:uniform", "table:successor", text="any text", fresh=True)'
    notebook = new_notebook(cells=[new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    result = notebook.cells[0].outputs[-1]
    assert find_spec("ipywidgets") or len(notebook.cells[0].outputs) == 1
    assert result["data"]["text/html"].count("<table") == 1
    assert len(result["data"]["text/plain"].splitlines()) <= 5
