"""Ctrl-C, SIGTERM and SIGHUP: one line, the right exit code, what was scored is kept, at whatever moment they come."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.makers import OBEY_INTERRUPTS

RESUME = "what was scored is kept: run the same command again to resume"
ENTRY = "from scoremode.cli.main import entry; entry()"
# a table answers at once: a window takes a moment here, and says that it was scored
SLOW = """
import sys, time
from scoremode.engines.table.engine import TableEngine
score = TableEngine.score
def slow(self, source, done, *want):
    for item in score(self, source, done, *want):
        yield item
        print("scored", file=sys.stderr, flush=True)
        time.sleep(WINDOW_SECONDS)
TableEngine.score = slow
"""
ASKED = ["ppl", "table:uniform", "--text", "word " * 40, "--context-length", "20", "--stride", "10", "--json"]
LINES = {
    signal.SIGINT: f"scoremode: interrupted; {RESUME}\n",
    signal.SIGTERM: f"scoremode: terminated; {RESUME}\n",
    signal.SIGHUP: f"scoremode: the terminal was closed; {RESUME}\n",
}


def start(code: str, *arguments: object, process: Any = forked.Popen, **more: Any) -> subprocess.Popen[str]:
    """A command whose first lines are ``code``."""
    program = [sys.executable, "-c", f"{OBEY_INTERRUPTS}\n{code}\n{ENTRY}", *map(str, arguments)]
    pipe = subprocess.PIPE
    made: subprocess.Popen[str] = process(program, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **more)
    return made


def start_scoring(out: Path, more: str = "", seconds: float = 0.2) -> subprocess.Popen[str]:
    """A run that has scored one window."""
    process = start(SLOW.replace("WINDOW_SECONDS", str(seconds)) + more, *ASKED, "--out", out)
    assert process.stderr is not None
    assert process.stderr.readline() == "scored\n"
    return process


def complaint_of(process: subprocess.Popen[str]) -> str:
    """What was said besides "scored"."""
    _, said = process.communicate(timeout=60)
    return said.replace("scored\n", "")


@pytest.mark.parametrize("number", LINES, ids=lambda n: n.name)
def test_a_signal_while_scoring_is_one_line_and_the_run_resumes(tmp_path: Path, number: signal.Signals) -> None:
    process = start_scoring(tmp_path / "run")
    process.send_signal(number)
    assert complaint_of(process) == LINES[number]
    assert process.returncode == 128 + number
    assert [p.name for p in (tmp_path / "run").iterdir() if "manifest" in p.name] == []
    results = []
    for out in (tmp_path / "run", tmp_path / "whole"):
        done = forked.run([sys.executable, "-c", ENTRY, *ASKED, "--out", out], capture_output=True, check=True)
        results.append(json.loads(done.stdout)["perplexity"])
    assert results[0] == results[1]


def test_nothing_is_said_to_be_kept_before_anything_was_scored(tmp_path: Path) -> None:
    before = SLOW.replace("        yield item\n", "").replace("WINDOW_SECONDS", "20")
    process = start(before, *ASKED, "--out", tmp_path / "run")
    assert process.stderr is not None
    assert process.stderr.readline() == "scored\n"
    process.send_signal(signal.SIGTERM)
    assert complaint_of(process) == "scoremode: terminated; nothing new was kept yet\n"


def at_import(module: str, number: signal.Signals) -> str:
    """Sends a signal when a module is first looked for."""
    return f"""
import os, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {int(number)})
sys.meta_path.insert(0, Finder)
sys.modules.pop({module!r}, None)
"""


MODULES = ["scoremode.cli.commands", "scoremode.console.flags", "scoremode.core.verbs.model"]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_during_imports_is_one_line(tmp_path: Path, module: str, number: signal.Signals) -> None:
    """Of a module of the command line's own, or of a heavy one."""
    process = start(at_import(module, number), *ASKED, "--out", tmp_path / "run", process=subprocess.Popen)
    assert complaint_of(process) == LINES[number].replace(RESUME, "nothing new was kept yet")
    assert process.returncode == 128 + number


def test_a_second_signal_ends_a_clean_up_at_once(tmp_path: Path) -> None:
    slow_close = "TableEngine.close = lambda self: (print('closing', file=sys.stderr, flush=True), time.sleep(60))"
    process = start_scoring(tmp_path / "run", slow_close)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    said = []
    while (line := process.stderr.readline()) != "closing\n":
        said.append(line)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert LINES[signal.SIGTERM] in said
    assert process.returncode == -signal.SIGINT
    assert time.monotonic() - began < 5


def test_what_was_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under ``nohup``."""
    ignoring = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)"
    process = start_scoring(tmp_path / "run", ignoring, 0.1)
    process.send_signal(signal.SIGHUP)
    assert complaint_of(process) == ""
    assert process.returncode == 0


def test_a_forked_process_has_the_usual_handlers() -> None:
    code = (
        "import os, signal\nfrom scoremode.console import signals\n"
        "signals.install()\npid = os.fork()\n"
        "if pid == 0:\n    os.kill(os.getpid(), signal.SIGTERM)\n    os._exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == (f"{-signal.SIGTERM}\n", "", 0)


def test_a_signal_after_the_work_is_done_changes_nothing(tmp_path: Path) -> None:
    late = "import atexit, os, signal\natexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))"
    process = start(late, *ASKED, "--out", tmp_path / "run")
    printed, said = process.communicate(timeout=60)
    assert (process.returncode, said, "perplexity" in printed) == (0, "", True)


def test_an_interruption_inside_a_destructor_is_not_lost(tmp_path: Path) -> None:
    """Python only prints what is raised there, and goes on."""
    destructor = (
        "class Last:\n    def __del__(self):\n"
        "        print('destroyed', file=sys.stderr, flush=True)\n        time.sleep(60)\n"
        "TableEngine.close = lambda self: Last()"
    )
    process = start_scoring(tmp_path / "run", destructor, seconds=0.0)
    assert process.stderr is not None
    while process.stderr.readline() != "destroyed\n":
        pass
    process.send_signal(signal.SIGINT)
    assert complaint_of(process) == LINES[signal.SIGINT]
    assert process.returncode == 130


EVERYWHERE = """
import collections, os, select, signal, sys
counts, this, modules = collections.Counter(), os.getpid(), 0
class Forking:
    @staticmethod
    def find_spec(name, path=None, target=None):
        global modules
        signals = sys.modules.get("scoremode.console.signals")
        if os.getpid() != this or not hasattr(signals, "_forget") or not signals._replaced:
            return
        modules += 1
        if modules % 8 and name not in ("datetime", "_datetime"):
            return
        reader, writer = os.pipe()
        if not os.fork():
            for number in signals._replaced:  # as in the process that was forked
                signal.signal(number, signals._stop)
            os.dup2(writer, signals._terminal[0])
            os.kill(os.getpid(), signal.SIGTERM)
            return
        os.close(writer)
        lines = os.read(reader, 1000).count(b"\\n") if select.select([reader], [], [], 20)[0] else "hangs"
        counts[os.waitstatus_to_exitcode(os.wait()[1]), lines] += 1
sys.meta_path.insert(0, Forking)
import atexit
atexit.register(lambda: os.getpid() == this and print(dict(counts), file=sys.stderr))
"""


def test_a_signal_at_any_import_is_one_line_and_the_right_exit_code() -> None:
    """A library in C whose import fails while it is loaded itself may crash: pyarrow did, at datetime."""
    process = start(EVERYWHERE, *ASKED, process=subprocess.Popen)
    _, said = process.communicate(timeout=120)
    counts = literal_eval(said.splitlines()[-1])
    assert list(counts) == [(143, 1)]
    assert counts[143, 1] > 20


@pytest.mark.parametrize("module", ["scoremode.console.signals", "scoremode.console.streams"])
@pytest.mark.parametrize("number", LINES, ids=lambda n: n.name)
def test_a_signal_before_any_work_is_one_line(module: str, number: signal.Signals) -> None:
    process = start(at_import(module, number), "info", "methods", process=subprocess.Popen)
    printed, said = process.communicate(timeout=60)
    assert (process.returncode, printed) == (128 + number, "")
    assert said == f"scoremode: {'interrupted' if number == signal.SIGINT else 'terminated'}; nothing was begun yet\n"
