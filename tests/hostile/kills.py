"""``kill -9`` at random moments: a command is killed once or more, then repeated until it ends, and must end in the
numbers of a run that nobody disturbed.

A round of a job: killed 1 to 3 times, mostly while it scores, then left alone. Moments are drawn over what a run that
nobody disturbs writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests import forked
from tests.hostile.inputs import TEXT
from tests.makers import make_small_llama, make_tiny_model, make_tokenizer

PROGRAM = [sys.executable, "-c", "from scoremode.cli.main import entry; entry()"]
PATIENCE = 15.0  # seconds that a process may outlive the one that started it
LONGEST = 600.0
MOST_IN_A_ROW = 3
BEFORE_SCORING = 0.2  # share of the kills that come while a process still starts
NATS = 1e-4  # by which two runs of vLLM may differ in mean: it batches by what is in flight


@dataclass(frozen=True)
class Job:
    """A command that can be resumed: what is typed, and where its results lie."""

    name: str
    arguments: Callable[[Path], list[str]]  # for results at this path
    victims: tuple[str, ...] = ("main",)  # what is killed: the process itself, or one of its own of that name
    exact: bool = True  # equal to the bit, or within rerun noise


@dataclass
class Figures:
    """What happened to one job."""

    seconds: float = 0.0  # of the undisturbed run
    kills: int = 0
    while_scoring: int = 0  # kills that left something to resume
    ended_first: int = 0  # runs that were over before their moment came
    wrong_numbers: int = 0
    wrong_exits: int = 0
    tracebacks: int = 0
    orphans: int = 0
    victims: dict[str, int] = field(default_factory=dict)  # what was killed, how often
    complaints: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.wrong_numbers or self.wrong_exits or self.tracebacks or self.orphans)


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────
class Started:
    """A command in a process of its own, with all that it starts remembered."""

    def __init__(self, arguments: list[str], log: Path, cache: Path | None = None) -> None:
        self.log = log
        own = {} if cache is None else {"SCOREMODE_CACHE": str(cache)}
        with log.open("wb") as file:
            self.process = forked.Popen(
                [*PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **own},
            )
        self.family: dict[int, psutil.Process] = {}

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def watch(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the process ends, or ``until`` holds; False where neither happens in time."""
        deadline, next_look = time.monotonic() + seconds, 0.0
        while (now := time.monotonic()) < deadline:
            if self.ended or until():
                return True
            if now >= next_look:  # it reads about every process of the machine
                self._look()
                next_look = time.monotonic() + 0.2
            time.sleep(0.02)
        return False

    def _look(self) -> None:
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.family.setdefault(child.pid, child)
        except psutil.Error:
            return

    def kill(self, victims: Sequence[str], draw: random.Random) -> str:
        """``kill -9`` to the process ("main") or to one of its own, drawn from those that are there; the name."""
        self._look()
        found: dict[str, Any] = {"main": self.process} if "main" in victims else {}
        for child in self.family.values():
            with contextlib.suppress(psutil.Error):
                title = child.name() + " ".join(child.cmdline())
                found |= {victim: child for victim in victims if victim in title}
        chosen = draw.choice(sorted(found))
        with contextlib.suppress(psutil.NoSuchProcess):
            found[chosen].send_signal(signal.SIGKILL)
        return chosen

    def end(self) -> tuple[int, str, int]:
        """Exit code, what was said on standard error, and how many processes were left; those are ended here."""
        if not self.watch(LONGEST):
            self.process.kill()
        code = self.process.wait()
        family = list(self.family.values())
        _, left = psutil.wait_procs(family, timeout=PATIENCE)
        left = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=PATIENCE)
        return code, self.log.read_text(errors="replace"), len(left)


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def results_of(out: Path) -> dict[str, Any]:
    """Everything that was computed, by file: what two runs of one question must have in common."""
    import pyarrow.parquet as pq

    found: dict[str, Any] = {}
    for path in sorted([out] if out.is_file() else out.rglob("*")):
        name = path.name if out.is_file() else str(path.relative_to(out))
        if path.suffix == ".parquet":
            found[name] = _digest_of_table(pq.read_table(path))
        elif path.suffix in (".safetensors", ".jsonl") or path.name == "attribution.journal":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name == "manifest.json":
            found[name] = json.loads(path.read_bytes())["metrics"]
    return found


def _digest_of_table(table: Any) -> str:
    """Of its columns, whatever the file around them says."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    plain = table.combine_chunks().replace_schema_metadata(None)
    with pa.ipc.new_stream(sink, plain.schema) as writer:
        writer.write_table(plain)
    return hashlib.sha256(sink.getvalue()).hexdigest()


def same_results(found: dict[str, Any], wanted: dict[str, Any], exact: bool) -> bool:
    if exact:
        return found == wanted
    ours, theirs = (float(run["manifest.json"]["mean_nll"]["value"]) for run in (found, wanted))
    return abs(ours - theirs) <= NATS


FINISHED = ("manifest.json", "rollouts.json", "attribution.json")


def something_to_resume(out: Path) -> bool:
    """Is a part of the results there, and not the whole?"""
    if not out.parent.exists() or out.is_file() or any((out / name).exists() for name in FINISHED):
        return False
    return bool(written(out))


def written(out: Path) -> dict[str, int]:
    """Files of results and beside them that are not empty, by name: their sizes."""
    sizes: dict[str, int] = {}
    for path in out.parent.rglob("*"):
        with contextlib.suppress(OSError):  # renamed or removed meanwhile
            if path.is_file() and path.stat().st_size:
                sizes[str(path)] = path.stat().st_size
    return sizes


# ── rounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Assault:
    """One job, killed again and again."""

    def __init__(self, job: Job, folder: Path, seed: int = 0) -> None:
        self.job, self.folder, self.random = job, folder, random.Random(f"{job.name} {seed}")
        self.figures, self._number, self.most = Figures(), 0, 0
        folder.mkdir(parents=True)
        out = self._place()
        started, begun = self._start(out), time.monotonic()
        started.watch(LONGEST, lambda: something_to_resume(out))
        self.first = time.monotonic() - begun  # seconds until there was something to lose
        started.watch(LONGEST, lambda: self._note_size(out))
        self._finish(started)
        self.figures.seconds = time.monotonic() - begun
        self.wanted = results_of(out)

    def _note_size(self, out: Path) -> bool:
        """Remember how large unfinished results become; not a reason to stop watching."""
        if something_to_resume(out):
            self.most = max(self.most, sum(written(out).values()))
        return False

    def run(self, kills: int, seconds: float = LONGEST) -> Figures:
        """Rounds until so many kills have hit, or the time is over."""
        deadline = time.monotonic() + seconds
        while self.figures.kills < kills and time.monotonic() < deadline:
            self._round(min(self.random.randint(1, MOST_IN_A_ROW), kills - self.figures.kills))
        return self.figures

    def _round(self, kills: int) -> None:
        out = self._place()
        for _ in range(kills):
            if not self._killed(out):
                break
        self._finish(self._start(out))
        found = results_of(out)
        if not same_results(found, self.wanted, self.job.exact):
            self.figures.wrong_numbers += 1
            self.figures.complaints.append(f"{out.parent.name}: other results than those of an undisturbed run")
        shutil.rmtree(out.parent)

    def _killed(self, out: Path) -> bool:
        """Start, wait for the moment, kill. False where the run was over first."""
        figures = self.figures
        started = self._start(out)
        self._wait_for_the_moment(started, out)
        if started.ended:
            figures.ended_first += 1
            self._finish(started)
            return False
        figures.while_scoring += something_to_resume(out)
        victim = started.kill(self.job.victims, self.random)
        figures.kills += 1
        figures.victims[victim] = figures.victims.get(victim, 0) + 1
        # a command whose engine was killed may end by itself: with one line, or well, if all was scored already. And
        # any command may end well just before the kill.
        self._judge(*started.end(), right=(-9, 0) if victim == "main" else (0, 2))
        return True

    def _wait_for_the_moment(self, started: Started, out: Path) -> None:
        """A time drawn from the start-up, or, more often, a size drawn between what is written and the most there is.

        Not a time of scoring: on a busy machine, most of those come after the end.
        """
        if self.random.random() < BEFORE_SCORING:
            started.watch(self.random.uniform(0.0, self.first))
            return
        before = sum(written(out).values())
        moment = before + self.random.random() * max(0, self.most - before)
        started.watch(LONGEST, lambda: sum(written(out).values()) > moment)

    def _finish(self, started: Started) -> None:
        self._judge(*started.end(), right=(0,))

    def _judge(self, code: int, said: str, left: int, *, right: Sequence[int]) -> None:
        figures = self.figures
        figures.orphans += left
        if code not in right:
            figures.wrong_exits += 1
            figures.complaints.append(f"exit code {code} instead of {right}: {said[-300:]}")
        if "Traceback" in said or "bug in scoremode" in said:
            figures.tracebacks += 1
            figures.complaints.append(f"exit code {code}: {said[-600:]}")
        if left:
            figures.complaints.append(f"{left} processes were left behind")

    def _place(self) -> Path:
        """Where the results of the next round go: a folder of its own."""
        self._number += 1
        place = self.folder / f"round{self._number}"
        place.mkdir()
        return place / ("results.jsonl" if self.job.name.startswith("prob") else "results")

    def _start(self, out: Path) -> Started:
        own_cache = out.parent / "cache" if self.job.name.startswith("prob") else None  # where prob keeps its journal
        return Started(self.job.arguments(out), self.folder / "stderr.txt", own_cache)


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
WINDOWS = ("--context-length", "64", "--stride", "32")


def table_jobs(folder: Path, size: int) -> list[Job]:
    """Every verb on a table: a process starts in a second. ``size``: bytes of text, and a twentieth of it pairs."""
    text = _text(folder, size)
    pairs = folder / "pairs.jsonl"
    rows = [{"prompt": f"{i} and", "target": f" {i + 1}"} for i in range(size // 20)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["--corpus", str(text), *WINDOWS]
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{i} and\n" for i in range(size // 1000)))
    drawn = ["--prompts", str(prompts), "--temperature", "1", "--samples", "2", "--max-tokens", "32"]
    return [
        Job("rollouts table", lambda out: ["rollouts", "table:uniform", *drawn, "--out", str(out)]),
        Job("ppl table", lambda out: ["ppl", "table:uniform", *asked, "--out", str(out)]),
        Job("prob table", lambda out: ["prob", "table:uniform", "--file", str(pairs), "--out", str(out)]),
        Job("reference table", lambda out: ["reference", "table:uniform", *asked, "--out", str(out)]),
        Job("compare table", lambda out: ["compare", "table:uniform", "table:successor", *asked, "--out", str(out)]),
    ]


def model_jobs(folder: Path, size: int) -> list[Job]:
    """Every verb on a small Llama in Transformers, a window at a time."""
    text = _text(folder, size)
    first = make_tiny_model(folder / "first", adds_bos=False)
    second = make_tiny_model(folder / "second", adds_bos=False, initializer_range=0.41)
    pairs = folder / "pairs.jsonl"
    rows = [{"prompt": f"{i} and", "target": f" {i + 1}"} for i in range(size // 8)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["--corpus", str(text), *WINDOWS, "--batch-tokens", "64"]
    return [
        Job("ppl", lambda out: ["ppl", str(first), *asked, "--out", str(out)]),
        Job("prob", lambda out: ["prob", str(first), "--file", str(pairs), "--batch-tokens", "64", "--out", str(out)]),
        Job("reference", lambda out: ["reference", str(first), *asked, "--out", str(out)]),
        Job("compare", lambda out: ["compare", str(first), str(second), *asked, "--out", str(out)]),
        Job(
            "attribute", lambda out: ["attribute", str(first), str(second), *asked, "--by", "matrix", "--out", str(out)]
        ),
    ]


def vllm_job(folder: Path, size: int) -> Job:
    """``ppl`` with vLLM: the process, its engine's process, or a worker is killed."""
    text, model = _text(folder, size), folder / "llama"
    make_tokenizer(model, adds_bos=False)
    make_small_llama(model)
    asked = ["--corpus", str(text), *WINDOWS, "--engine", "vllm", "--max-num-batched-tokens", "64"]
    return Job(
        "ppl vllm",
        lambda out: ["ppl", str(model), *asked, "--out", str(out)],
        victims=("main", "EngineCore", "Worker"),
        exact=False,
    )


def _text(folder: Path, size: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "text.txt"
    path.write_text((TEXT * (size // len(TEXT) + 1))[:size])
    return path
