"""No process of vLLM's outlives the one it scores for, however that one ends.

vLLM's processes notice nothing when their parent is killed outright, and go on to hold the GPU. So each of them
watches the process that asked for scores, by the identity that it left in the environment, and its own parent.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

PARENT = "SCOREMODE_VLLM_PARENT"  # identity of the process that asked for scores
SECONDS = 0.5  # between two looks
PROC = Path("/proc/self/stat")
_watching: set[int] = set()  # process ids, because a forked process inherits this set but no thread


def identity(pid: int) -> str | None:
    """A process, for ``PARENT``: its id may be given to another one later, its start time is not. None: it has ended.

    The start time is the kernel's own count: made into a date it would move when somebody sets the clock.
    """
    stat = Path(f"/proc/{pid}/stat")
    if not PROC.exists():
        return _identity_without_proc(pid)
    try:
        fields = stat.read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else f"{pid}:{int(fields[19])}"  # a zombie has ended


def _identity_without_proc(pid: int) -> str | None:
    import psutil  # vLLM needs it, so it is there

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{pid}:{process.create_time()}"
    except psutil.NoSuchProcess:
        return None


def watch_parent() -> None:
    """End this process soon after the one that it works for; may be called any number of times."""
    wanted = os.environ.get(PARENT, "")
    pid = int(wanted.partition(":")[0] or 0)
    if pid in (0, os.getpid()) or os.getpid() in _watching:
        return
    if not _watching:
        os.register_at_fork(after_in_child=watch_parent)  # workers that are forked load no plugin again
    _watching.add(os.getpid())
    import psutil  # noqa: F401 - before the thread begins: a process that is forked meanwhile would have half of it

    arguments = (pid, wanted, os.getppid())
    threading.Thread(target=_watch, args=arguments, name="scoremode-guard", daemon=True).start()


def _watch(pid: int, wanted: str, parent: int) -> None:
    while os.getppid() == parent and identity(pid) == wanted:
        time.sleep(SECONDS)
    _end()


def _end() -> None:
    """Everything below this process goes with it, but for the tracker that frees shared memory and then ends."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if not is_tracker(child):
                    child.kill()
    os._exit(1)


def is_tracker(process: Any) -> bool:
    """Is this multiprocessing's resource tracker? It ends by itself when the last process that uses it has ended."""
    return any("resource_tracker" in word for word in process.cmdline())


class EngineCoreTarget:
    """Stands for the function that vLLM's engine process runs, and watches from the very beginning.

    vLLM loads its plugins late: importing takes many seconds, and then the process waits minutes for its parent's first
    message. This object is unpickled in a new process before anything of vLLM is imported.
    """

    def __init__(self, stock: Any = None) -> None:
        self._stock = stock

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        watch_parent()
        stock = self._stock
        if stock is None:
            from vllm.v1.engine.core import EngineCoreProc

            stock = EngineCoreProc.run_engine_core
        return stock(*arguments, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_new_process, ()


def _in_new_process() -> EngineCoreTarget:
    watch_parent()
    return EngineCoreTarget()


@contextlib.contextmanager
def guarded_start() -> Any:
    """Engine processes that are started inside this block watch this process."""
    from vllm.v1.engine.core import EngineCoreProc

    stock = EngineCoreProc.__dict__.get("run_engine_core")
    if stock is None:  # another version of vLLM: the plugin watches, if later
        yield
        return
    EngineCoreProc.run_engine_core = staticmethod(EngineCoreTarget(EngineCoreProc.run_engine_core))
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = stock
