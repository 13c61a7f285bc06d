"""Run folders with several processes and kills at every step: one writer, nothing lost, always usable again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.disk.locks import Lock
from scoremode.core.references.reader import Reference
from scoremode.core.store import runs
from scoremode.core.verbs.reference import reference
from scoremode.errors import RunError
from tests import forked

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
ASKED = ["--text", TEXT, "--context-length", "32", "--stride", "16", "--json"]
SLOWED = """
import sys, time
from scoremode.engines.table.engine import TableEngine
score, loaded = TableEngine.score, TableEngine.named
def slow(self, source, done, *want):
    for item in score(self, source, done, *want):
        time.sleep(0.1)
        yield item
def slowly(name):
    print("loading", file=sys.stderr, flush=True)
    sys.stdin.readline()  # until the test lets it continue
    return loaded(name)
TableEngine.score, TableEngine.named = slow, staticmethod(slowly)
from scoremode.cli.main import entry
entry()
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    return forked.Popen(
        [sys.executable, "-c", SLOWED, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def let_go(process: subprocess.Popen[str]) -> None:
    """Wait until the engine of a process is loaded."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def wait_until_loading(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    assert process.stderr.readline() == "loading\n"


# ── several processes ────────────────────────────────────────────────────────────────────────────────────────────────
def test_five_processes_with_one_question_score_it_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path))
    processes = [start("ppl", "table:uniform", *ASKED) for _ in range(5)]
    for process in processes:
        let_go(process)
    printed = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 5, [error for _, error in printed]
    found = [json.loads(out) for out, _ in printed]
    assert sorted(run["cached"] for run in found) == [False] + [True] * 4
    assert len({run["seconds"] for run in found}) == 1, "all of them read the one run"
    assert sum("loading" in error for _, error in printed) == 1, "no other engine was loaded"
    assert all(error.count(runs.WAITING) <= 1 for _, error in printed)


def test_who_waits_goes_on_when_the_first_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path))
    first = start("ppl", "table:uniform", *ASKED)
    wait_until_loading(first)
    second = start("ppl", "table:uniform", *ASKED)
    assert second.stderr is not None
    assert second.stderr.readline().strip() == runs.WAITING
    let_go(first)
    [journal] = _waited_for(lambda: list(tmp_path.glob("runs/*/partial.journal")))
    _waited_for(lambda: journal.stat().st_size > 2000)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    kept = journal.read_bytes()
    out, error = second.communicate("\n", timeout=120)
    assert second.returncode == 0, error
    assert json.loads(out)["perplexity"] == pytest.approx(256)
    assert json.loads(out)["seconds"] > 0.1 * (len(kept) // 1000), "the time of the first counts too"


def _waited_for(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def test_a_second_process_on_a_folder_is_refused_before_its_engine_loads(tmp_path: Path) -> None:
    first = start("ppl", "table:uniform", *ASKED, "--out", str(tmp_path / "run"))
    wait_until_loading(first)
    for flags in ([], ["--fresh"]):
        second = start("ppl", "table:uniform", *ASKED, "--out", str(tmp_path / "run"), *flags)
        _, error = second.communicate(timeout=60)
        assert second.returncode == 2
        assert "another process is scoring into" in error
        assert "loading" not in error
        assert first.poll() is None
    assert first.communicate("\n", timeout=60)[1] == ""
    assert first.returncode == 0
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["manifest.json", "scores.parquet"]


def test_a_reference_is_held_by_the_same_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path / runs.LOCK)
    assert lock.acquire()
    for fresh in (False, True):
        with pytest.raises(RunError, match="another process"):
            reference("table:uniform", tmp_path, text=TEXT, fresh=fresh)
    lock.release()
    assert reference("table:uniform", tmp_path, text=TEXT).path == str(tmp_path)


def test_a_run_that_another_process_finished_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finished after we inspected the folder and before we locked it."""
    folder, asked = tmp_path / "run", {"text": TEXT, "context_length": 32, "stride": 16}
    acquire = Lock.acquire

    def late(self: Lock, **more: object) -> bool:
        monkeypatch.setattr(Lock, "acquire", acquire)
        sm.ppl("table:uniform", out=folder, **asked)  # type: ignore[arg-type]
        return acquire(self, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Lock, "acquire", late)
    assert sm.ppl("table:uniform", out=folder, **asked).cached  # type: ignore[arg-type]


def test_a_finished_run_in_a_folder_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    sm.ppl("table:uniform", text=TEXT, out=tmp_path / "run")
    (tmp_path / "run").chmod(0o555)
    try:
        assert sm.ppl("table:uniform", text=TEXT, out=tmp_path / "run").cached
    finally:
        (tmp_path / "run").chmod(0o755)


# ── a kill after every step ──────────────────────────────────────────────────────────────────────────────────────────
KILLED = """
import os, shutil, sys
folder, template, *arguments = sys.argv[1:]
from scoremode.core.references import writer
from scoremode.core.disk import records
from scoremode.cli.main import main
import pyarrow.parquet

def at_every_step(left, target):
    # the process ends before the step that comes after \"left\" of them
    def step():
        nonlocal left
        if left == 0:
            os._exit(9)
        left -= 1
    def counted(name, true):
        def call(*given, **more):
            path = given[1] if name == "replace" else given[0]
            ours = isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(target)
            if ours and (name != "open" or given[1] & os.O_CREAT):
                step()
            return true(*given, **more)
        return call
    for name in ("unlink", "replace", "mkdir", "open"):
        setattr(os, name, counted(name, getattr(os, name)))
    for owner, name in ((records.RecordFile, "append"), (writer.StatesWriter, "write")):
        def called(*given, true=getattr(owner, name)):
            step()
            return true(*given)
        setattr(owner, name, called)

os.fsync = lambda file: None  # a kill is not a power failure
for steps in range(200):
    target = os.path.join(folder, f"{steps:03d}")
    if template:
        shutil.copytree(template, target)
    child = os.fork()
    if child == 0:
        at_every_step(steps, target)
        sys.stdout = open(os.devnull, "w")
        os._exit(main([*arguments, "--out", target]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        print(steps)
        break
    assert code == 9, code
"""


def states_of(folder: Path, arguments: list[str], template: Path | None) -> list[Path]:
    """The folder after a kill at step 0, 1, 2, … of what the command does in it."""
    folder.mkdir()
    command = [sys.executable, "-c", KILLED, str(folder), str(template or ""), *arguments]
    done = forked.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return [folder / f"{step:03d}" for step in range(int(done.stdout))]


def holds_another(folder: Path, run: sm.Run) -> bool:
    """Does the folder contain a complete run of another plan?"""
    return runs.is_run(folder) and sm.load(folder).plan_digest != run.plan_digest


SHORT = ["--text", "abcdefghijklmnop", "--context-length", "8", "--stride", "8", "--json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "before"), [("ppl", "nothing"), ("ppl", "a reference"), ("reference", "the same"), ("reference", "a run")]
)
def test_wherever_a_kill_falls_the_folder_is_accepted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, before: str
) -> None:
    """--fresh over another run, over the same run, and a first run: the same command succeeds with and without it."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    text, template = "abcdefghijklmnop", None
    if before != "nothing":
        template = tmp_path / "template"
        other = {"text": text if before == "the same" else "another text", "context_length": 8, "stride": 8}
        makes = {"a run": "ppl", "a reference": "reference"}.get(before, verb)
        (sm.ppl if makes == "ppl" else reference)("table:uniform", out=template, **other)  # type: ignore[arg-type]
    fresh = [] if before == "nothing" else ["--fresh"]
    states = states_of(tmp_path / "killed", [verb, "table:uniform", *SHORT, *fresh], template)
    assert len(states) > 5
    scores = sm.ppl if verb == "ppl" else reference
    asked = {"text": text, "context_length": 8, "stride": 8}
    expected = sm.ppl("table:uniform", **asked)  # type: ignore[arg-type]
    untouched = 0
    for state in states:
        state.mkdir(exist_ok=True)  # before the first step there is no folder
        copy = shutil.copytree(state, state.with_name(state.name + "-fresh"))
        assert not scores("table:uniform", out=copy, fresh=True, **asked).cached  # type: ignore[arg-type]
        if holds_another(state, expected) and not (state / "partial.journal").exists():
            # nothing has begun, and another run is not replaced without --fresh
            with pytest.raises(RunError, match="contains another run"):
                scores("table:uniform", out=state, **asked)  # type: ignore[arg-type]
            untouched += 1
            continue
        run = scores("table:uniform", out=state, **asked)  # type: ignore[arg-type]
        for folder in (state, copy):
            found = sm.load(folder)
            assert np.array_equal(found.scores.logprob, expected.scores.logprob)
            left = {p.name for p in folder.iterdir()}
            kept = {"head.safetensors", "reference.json", "states-00000.safetensors"} if verb == "reference" else set()
            if folder == state and run.cached:  # it was already complete, so nothing was written or removed
                left = {name for name in left if not name.startswith(".")} - {"partial.journal"}
            assert left == {"manifest.json", "scores.parquet"} | kept
            if verb == "reference":
                Reference.open(folder)
        assert run.perplexity == expected.perplexity
    assert untouched <= (4 if before in ("a run", "a reference") else 0)
