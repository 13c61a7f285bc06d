"""Progress without a terminal: a line every 30 seconds, a bar in a notebook, and words for what is waited for."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import scoremode as sm
from scoremode.console.output import ProgressLines, progress_bar
from scoremode.console.streams import lasting_stderr
from scoremode.core.verbs.progress import ProgressState
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


class Shell:
    """Stands in for IPython where it is not installed: a kernel that remembers what was displayed."""

    def __init__(self) -> None:
        self.kernel = object()
        self.shown: list[str] = []

    def display(self, content: dict[str, str], **_: Any) -> Shell:
        self.shown.append(content["text/html"])
        return self

    def update(self, content: dict[str, str], **_: Any) -> None:
        self.shown.append(content["text/html"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Shell:
    shell = Shell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=shell.display))
    return shell


def test_a_notebook_has_a_bar_that_goes_away(notebook: Shell) -> None:
    sm.ppl("table:uniform", text="any text", fresh=True)
    assert notebook.shown[0].startswith("<div><progress ")
    assert "0/?" not in notebook.shown[0]
    assert notebook.shown[-1] == ""


def test_a_progress_of_ones_own_takes_the_place_of_the_bar(notebook: Shell) -> None:
    seen: list[int] = []
    with sm.open("table:uniform") as model:
        model.ppl(text="any text", fresh=True, progress=lambda done, total: seen.append(done))
    assert seen
    assert notebook.shown == []


def test_names_in_the_bar_are_escaped(notebook: Shell) -> None:
    from scoremode.core.verbs.progress import NotebookBar

    with NotebookBar(every=0.01) as bar:
        bar.phase("loading <script>alert(1)</script>")
        bar(1, 2)
        bar.label("<img src=x>")
        wait_until(lambda: any("&lt;img" in html for html in notebook.shown))
    assert not any("<script" in html or "<img" in html for html in notebook.shown)


def test_a_real_notebook_shows_the_bar_and_then_one_table() -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    from nbformat.v4 import new_code_cell, new_notebook

    shown: list[str] = []

    class Watching(nbclient.NotebookClient):  # type: ignore[misc,name-defined]
        def process_message(self, message: Any, cell: Any, index: int) -> Any:
            shown.append(message["content"].get("data", {}).get("text/html", ""))
            return super().process_message(message, cell, index)

    code = 'import scoremode as sm\nsm.compare("table:uniform", "table:successor", text="any text", fresh=True)'
    notebook = new_notebook(cells=[new_code_cell(code)])
    Watching(notebook, timeout=120, kernel_name="python3").execute()
    assert any("<progress " in html for html in shown)
    *bars, result = notebook.cells[0].outputs
    assert [bar["data"]["text/html"] for bar in bars] == [""], "the bar is removed at the end"
    assert result["data"]["text/html"].count("<table") == 1
    assert len(result["data"]["text/plain"].splitlines()) <= 5
