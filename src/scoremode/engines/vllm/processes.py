"""Finds and ends the processes that vLLM starts for an engine, makes this one safe to fork, and redirects output.

The output goes to a log file: a user sees one line, and can still read everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

from scoremode.core.disk.folders import cache_folder
from scoremode.engines.vllm.plugin import is_tracker
from scoremode.errors import ScoremodeError

NAMES = ("EngineCore", "VllmWorker")  # names that vLLM gives to its child processes
SHUTDOWN_SECONDS = 20.0
OMP_PAUSE_HARD = 2  # of OpenMP 5.0: releases all that it can
ERROR_LINE = re.compile(r"\b([A-Za-z_.]*(?:Error|Exception|Interrupt)): (.+)")
WORKER_DIED = re.compile(r"Worker proc \S+ died unexpectedly(?: \(exit code: (-\d+)\))?")
SAYS_NOTHING = (
    "Engine core initialization failed",
    "EngineCore encountered",
    "EngineDeadError",
    "WorkerProc init",
    "RuntimeError: cancelled",
)
OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "out of memory",
    "Cannot allocate memory",
    "No available memory for the cache blocks",
)


def end_openmp_threads() -> None:
    """Ends the idle threads of OpenMP in this process; the next parallel work starts new ones.

    A forked process has none of them, and GNU's library would wait for them forever: vLLM forks on a GPU, and another
    engine may have computed here before.
    """
    lines = [line.split(maxsplit=5) for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()]
    for library in {line[5] for line in lines if len(line) == 6 and Path(line[5]).name.startswith("libgomp")}:
        with contextlib.suppress(OSError, AttributeError):  # it was replaced on the disk, or is older than OpenMP 5.0
            ctypes.CDLL(library).omp_pause_resource_all(OMP_PAUSE_HARD)


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # the process may have been started without this stream
            with contextlib.suppress(OSError, ValueError):  # the stream is full or closed: not reported here
                stream.flush()


def _unbuffered(descriptor: int) -> TextIO:
    """A text stream to a descriptor. It is never closed: libraries that are imported meanwhile keep it for logs."""
    return io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), errors="backslashreplace", write_through=True)


def _copy(descriptor: int) -> int | None:
    """Returns a new descriptor for the same file, never 0, 1 or 2, or None if the given descriptor is closed."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        return None


def _innermost(error: BaseException) -> str:
    """Returns the innermost cause of an error in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "…"


class VllmLog:
    """The log file of one engine. With ``SCOREMODE_VLLM_LOG=-``, all output stays on standard error instead."""

    def __init__(self) -> None:
        wanted = os.environ.get("SCOREMODE_VLLM_LOG")
        # one file per engine, so that an old error never explains a new failure
        name = f"vllm-{os.getpid()}-{uuid.uuid4().hex[:8]}.log"
        self.path = None if wanted == "-" else Path(wanted) if wanted else cache_folder() / "logs" / name

    @contextlib.contextmanager
    def taking_output(self) -> Iterator[None]:
        """Sends standard output and error of this process and its children to the file; restores ours afterwards.

        Processes started inside this block keep writing to the file. Descriptors belong to the whole process: text that
        another thread prints in the meantime goes to the file too.
        """
        if self.path is None:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _flush()
        saved = {descriptor: _copy(descriptor) for descriptor in (1, 2)}
        with self.path.open("ab") as file:
            log = _copy(file.fileno())
        assert log is not None, "it was just opened"
        try:
            for descriptor in saved:
                os.dup2(log, descriptor)
            with contextlib.redirect_stdout(_unbuffered(1)), contextlib.redirect_stderr(_unbuffered(2)):
                yield
        finally:
            _flush()
            for descriptor, mine in saved.items():
                if mine is None:
                    os.close(descriptor)
                else:
                    os.dup2(mine, descriptor)
                    os.close(mine)
            os.close(log)

    def text(self) -> str:
        if self.path is None or not self.path.exists():
            return ""
        return self.path.read_text(encoding="utf-8", errors="replace")

    def cause(self) -> str | None:
        """Returns the last informative error in the log, in one line."""
        for line in reversed(self.text().splitlines()):
            match = ERROR_LINE.search(line)
            if match and not any(phrase in line for phrase in SAYS_NOTHING):
                return f"{match[1].split('.')[-1]}: {match[2].strip()}"[:300]
        died = WORKER_DIED.search(self.text())
        if died is None:
            return None
        return "a worker process died" + (f" of {signal.Signals(-int(died[1])).name}" if died[1] else "")

    def ran_out_of_memory(self) -> bool:
        return any(phrase in self.text() for phrase in OUT_OF_MEMORY)

    @contextlib.contextmanager
    def explaining(self, message: str, kind: type[ScoremodeError], fix: str = "") -> Iterator[None]:
        """Turns any exception of vLLM into one line: the cause in the log, or else the innermost exception."""
        try:
            yield
        except ScoremodeError:
            raise
        except Exception as error:
            why, where = self.cause() or _innermost(error), f"its log is {self.path or 'above'}"
            raise kind(f"{message} ({why})", fix=f"{fix}; {where}" if fix else where) from None

    def discard(self) -> None:
        """Deletes the log of an engine that ended without an error."""
        if self.path is not None and not os.environ.get("SCOREMODE_VLLM_LOG"):
            self.path.unlink(missing_ok=True)


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Interruption(BaseException):
    """Carries a KeyboardInterrupt through code that would swallow it."""

    def __init__(self, error: KeyboardInterrupt) -> None:
        super().__init__()
        self.error = error


class Processes:
    """The child processes that vLLM started, and their descendants, but no other children of this process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._others = {child.pid for child in multiprocessing.active_children()}
        self._children: list[BaseProcess] | None = None  # None while vLLM is starting
        self._known: dict[int, Any] = {}

    def started(self, llm: Any) -> None:
        """Called once vLLM has started: an engine that starts later has processes of its own.

        From now on, the death of an engine process is an error in the waiting client. vLLM's own client waits forever
        for a process that was killed with SIGKILL and could not report its end.
        """
        self._children = self._named()
        self.all()
        queue: Any = getattr(llm.llm_engine.engine_core, "outputs_queue", None)
        sentinels = [child.sentinel for child in self._children if child.name.startswith("EngineCore")]

        def wait() -> None:
            connection.wait(sentinels)
            with contextlib.suppress(Exception):
                queue.put_nowait(RuntimeError("its engine process ended without a message: killed, or out of memory"))

        if queue is not None and sentinels:
            threading.Thread(target=wait, name="scoremode-watch", daemon=True).start()

    def children(self) -> list[BaseProcess]:
        """Returns the processes of vLLM that are direct children of this process."""
        return self._named() if self._children is None else self._children

    def _named(self) -> list[BaseProcess]:
        alive = multiprocessing.active_children()
        return [child for child in alive if child.pid not in self._others and child.name.startswith(NAMES)]

    def all(self) -> list[Any]:
        """Returns the running children and their descendants, as psutil processes.

        A worker whose engine process was killed is no longer a descendant, but is remembered from an earlier call.
        """
        import psutil  # a dependency of vLLM, so it is installed

        for child in self.children():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(child.pid)
                for descendant in (process, *process.children(recursive=True)):
                    if not is_tracker(descendant):
                        self._known.setdefault(descendant.pid, descendant)
        return [process for process in self._known.values() if _lives(process)]

    def kill(self) -> None:
        if os.getpid() != self._pid:  # a forked process does not have these children
            return
        import psutil

        for process in self.all():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def wait(self, seconds: float) -> list[Any]:
        """Waits for these processes to end. Returns those that are still running."""
        deadline = time.monotonic() + seconds
        for child in self.children():
            with contextlib.suppress(ValueError):  # vLLM has closed it
                child.join(timeout=seconds)  # or multiprocessing would count dead processes as alive
        while (alive := self.all()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return alive

    @contextlib.contextmanager
    def killed_by_signals(self) -> Iterator[None]:
        """Makes a signal that ends this process kill vLLM's processes first, while vLLM starts.

        During the start, vLLM's processes do not react to signals, and vLLM's own clean-up would wait for them. After
        the kill, the previous handlers decide what happens to this process. vLLM swallows a KeyboardInterrupt while it
        waits for its processes, and keeps waiting. So the exception passes through vLLM wrapped in a different one.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        taken = {n: handler for n, handler in before.items() if callable(handler)}

        def handle(number: int, frame: Any) -> None:
            self.kill()
            try:
                taken[signal.Signals(number)](number, frame)
            except KeyboardInterrupt as error:
                raise Interruption(error) from None

        for number in taken:
            signal.signal(number, handle)
        try:
            yield
        except Interruption as passed:
            raise passed.error from None
        finally:
            for number, handler in taken.items():  # replaces handlers that vLLM and its libraries have installed
                signal.signal(number, handler)


def _lives(process: Any) -> bool:
    """Is a process running? A zombie counts as ended: its parent, another process, may take long to reap it."""
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def end(llm: Any, processes: Processes, log: VllmLog) -> None:
    """Shuts vLLM down, at once after an interruption. Deletes its log unless an error occurred."""
    why = sys.exc_info()[0]
    if why is not None and issubclass(why, KeyboardInterrupt):
        processes.kill()
    stop(llm, processes)
    if why is None:
        log.discard()


def stop(llm: Any, processes: Processes) -> None:
    """Shuts vLLM down and waits for its processes only; never raises."""
    import gc

    processes.all()
    core = getattr(llm.llm_engine, "engine_core", None)
    if core is not None:
        _within(SHUTDOWN_SECONDS, core.shutdown)
    del llm
    gc.collect()
    if processes.wait(10):
        processes.kill()
        processes.wait(5)


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Runs an action with a time limit, because a client whose engine is dying may wait for the engine forever."""

    def attempt() -> None:
        with contextlib.suppress(BaseException):
            action()

    thread = threading.Thread(target=attempt, name="scoremode-stop", daemon=True)
    thread.start()
    thread.join(seconds)
