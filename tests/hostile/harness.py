"""Runs a case of the table on the real command line, and says what was not right about the answer."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scoremode.cli.main import main
from tests.hostile.cases import VALUES, Case
from tests.hostile.inputs import Stock, make_input

PROGRAM = [sys.executable, "-c", "from scoremode.cli.main import entry; entry()"]
NAMED = re.compile(r"\{([^}]+)\}")
VALUE = re.compile(r"<([a-z-]+)>")
HANGS = 60.0  # seconds of wall time after which a command is ended
HUNG = 124  # the exit code of such a command, as timeout(1) gives it
PROGRESS = re.compile(r", for \d+ s$|tokens/s")  # lines of a command that takes longer than 30 s


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    seconds: float = 0.0  # of processor time


class HangError(BaseException):
    """A command did not end. The class is no Exception, so that the command cannot explain it."""


def problems(case: Case, folder: Path, stock: Stock) -> list[str]:
    """Make the inputs, run the command, look at the answer. Empty where all is as it must be."""
    folder.mkdir(parents=True)
    made: dict[str, Path] = {}
    words = arguments(case, folder, stock, made)
    before = snapshot(folder)
    alone = case.process or case.streams or "org-that-is-nowhere" in case.command
    found = run_process(case, words) if alone else run(case, words)
    resumed = case.same and found.code == 0  # and then the journal is gone, as it must be
    return [*_wrong_answer(case, found, stock, made), *([] if resumed else _lost(before, snapshot(folder)))]


def arguments(case: Case, folder: Path, stock: Stock, made: dict[str, Path]) -> list[str]:
    """The words of the command, inputs made and named by their paths."""

    def path_of(match: re.Match[str]) -> str:
        name = match[1]
        if name not in made:
            made[name] = make_input(name, folder, stock)
        return str(made[name])

    words: list[str] = []
    for word in shlex.split(case.command):
        value = VALUES.get(word[1:-1]) if VALUE.fullmatch(word) else None
        if isinstance(value, tuple):
            words += value
        else:
            words.append(VALUE.sub(lambda match: str(VALUES[match[1]]), NAMED.sub(path_of, word)))
    return words


# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def run(case: Case, words: list[str]) -> Outcome:
    """In this process, with both output streams caught at their descriptors: libraries write past Python's."""
    stdin, begun = sys.stdin, _processor_seconds()
    sys.stdin = io.TextIOWrapper(io.BytesIO(case.stdin))
    with tempfile.TemporaryDirectory() as name:
        out, err = Path(name) / "out", Path(name) / "err"
        try:
            with _into(1, out), _into(2, err), _ended_after(HANGS):
                code = main(words)
        except SystemExit as ended:  # argparse ends this way
            code = ended.code if isinstance(ended.code, int) else 1
        except HangError:
            code = HUNG
        finally:
            sys.stdin = stdin
        spent = _processor_seconds() - begun
        return Outcome(code, out.read_text(errors="replace"), err.read_text(errors="replace"), spent)


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """HangError in a command that takes longer. The timer of the test itself goes on afterwards."""

    def end(*_: object) -> None:
        raise HangError

    handler = signal.signal(signal.SIGALRM, end)
    before, begun = signal.setitimer(signal.ITIMER_REAL, seconds), time.monotonic()
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        left = max(before[0] - (time.monotonic() - begun), 0.001) if before[0] else 0.0
        signal.setitimer(signal.ITIMER_REAL, left, before[1])


def _processor_seconds() -> float:
    """Of this process and of the processes that it has started and that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@contextlib.contextmanager
def _into(number: int, path: Path) -> Iterator[None]:
    """Descriptor 1 or 2, and Python's stream on it, written to a file."""
    name = ("stdout", "stderr")[number - 1]
    stream, kept = getattr(sys, name), os.dup(number)
    stream.flush()
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        os.dup2(file.fileno(), number)
        setattr(sys, name, file)
        try:
            yield
        finally:
            setattr(sys, name, stream)
            os.dup2(kept, number)
            os.close(kept)


LARGE = 1 << 28  # a file that is not read to see whether it has changed
STREAMS = {  # how a shell sets them
    "": "{command}",
    "in ascii": "PYTHONIOENCODING=ascii {command}",
    "in the C locale": "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {command}",
    "with -OO": "PYTHONOPTIMIZE=2 {command}",
    "without a home": "HOME=/dev/null/home XDG_CACHE_HOME= SCOREMODE_CACHE= {command}",
    "with no number of threads": "OMP_NUM_THREADS=x {command}",
    "in 6 GB of memory": "ulimit -v 6000000; {command}",
    "with endless input": "ulimit -v 6000000; {command} < /dev/zero",
    "with Ollama's models at nobody's": "OLLAMA_MODELS=~nouser/x {command}",
    "with the cache at nobody's": "SCOREMODE_CACHE=~nouser/x {command}",
    "with the cache at a URI": "SCOREMODE_CACHE=s3://bucket/cache {command}",
}


def run_process(case: Case, words: list[str]) -> Outcome:
    """In a process of its own, where streams are set as a shell would."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = STREAMS[case.streams].format(command=shlex.join([*PROGRAM, *words]))
    begun = _processor_seconds()
    with subprocess.Popen(
        ["/bin/sh", "-c", line],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(case.stdin, timeout=HANGS)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            code = HUNG
    return Outcome(code, out.decode(errors="replace"), err.decode(errors="replace"), _processor_seconds() - begun)


# ── judging ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _wrong_answer(case: Case, found: Outcome, stock: Stock, made: dict[str, Path]) -> Iterator[str]:
    said = found.out + found.err
    if found.code == HUNG:
        yield f"did not end within {HANGS:.0f} s"
        return
    if found.seconds > case.seconds:
        yield f"took {found.seconds:.0f} s of processor time, and may take {case.seconds:.0f} s"
    if found.code not in case.codes:
        yield f"exit code {found.code}, wanted {' or '.join(map(str, case.codes))}"
    if "Traceback" in said or "bug in scoremode" in said:
        yield "a traceback, or a bug of ours"
    if found.code == 0 and case.same:
        perplexity = json.loads(found.out)["perplexity"]
        if perplexity != stock.perplexity:
            yield f"another number: {perplexity!r} instead of {stock.perplexity!r}"
    if found.code == 0:
        yield from (f"does not say '{words}'" for words in case.says if not _says(said, words, made))
    if found.code in (0, 70) or "stderr" in case.streams or case.streams == "all closed":
        return
    lines = [line for line in found.err.splitlines() if not PROGRESS.search(line)]
    if len(lines) != 1:
        yield f"{len(lines)} lines on standard error"
    line = lines[-1] if lines else ""
    if not line.startswith("scoremode:") and not re.match(r"scoremode \w+: ", line):
        yield "no line that begins with 'scoremode:'"
    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in line):
        yield "control characters in the line"
    yield from (f"does not say '{words}'" for words in case.says if not _says(line, words, made))


def _says(text: str, words: str, made: dict[str, Path]) -> bool:
    """Does the text hold one of these words? The path of an input says nothing, but where its name is asked for."""
    for path in made.values():
        if words != path.name:
            text = text.replace(str(path), "…")
    return any(choice.lower() in text.lower() for choice in words.split("|"))


def snapshot(folder: Path) -> dict[str, str]:
    """What lies in a folder: name -> kind, link or hash."""
    return {str(path.relative_to(folder)): _state(path) for path in sorted(folder.rglob("*"))}


def _state(path: Path) -> str:
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.is_dir():
        return "folder"
    if path.is_file() and path.stat().st_size > LARGE:
        return f"{path.stat().st_size} bytes"
    if not path.is_file():
        return "device"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _lost(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    for name, state in before.items():
        if after.get(name) != state:
            yield f"{name} was {'changed' if name in after else 'removed'}"
