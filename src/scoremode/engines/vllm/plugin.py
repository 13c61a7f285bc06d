"""Code that runs in every vLLM process: the plugin that makes models score, and a thread that watches our own process.

vLLM loads the plugin from the entry point ``vllm.general_plugins``. It runs in the front end, the engine core, every
worker and the process that inspects model classes, several times each, and also in engines that have nothing to do with
scoring. So it imports nothing heavy, may run any number of times, and does nothing unless ``SCOREMODE_VLLM=1`` is in
the environment, which our engine sets while it starts.

vLLM's processes never outlive the scoremode process that started them, however that process ends. Without help, they
would not notice that it was killed with SIGKILL, and would keep occupying the GPU. So each of them watches its parent:
the system gives a child another parent as soon as its own has ended. The id of the scoremode process is in the
environment, for a child that starts later than that. PR_SET_PDEATHSIG would not do: it ends a child with the thread
that started it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

SWITCH = "SCOREMODE_VLLM"
PARENT = "SCOREMODE_VLLM_PARENT"  # id of the scoremode process
SECONDS = 0.5  # between two checks
_watching: set[int] = set()  # process ids: a forked process inherits this set, but not the thread


def asked_for() -> bool:
    return os.environ.get(SWITCH) == "1"


def register() -> None:
    """Makes ``runner="pooling", convert="embed"`` build a model that scores instead of a model that embeds.

    Also makes this process end when the scoremode process ends.

    vLLM looks up ``as_embedding_model`` in its module at each call, so replacing that one attribute is enough. The
    replacement checks the switch at each call, so a process can score and later embed.
    """
    if not asked_for():
        return
    watch_parent()
    from vllm.model_executor.models import adapters

    if getattr(adapters.as_embedding_model, "stock", None) is None:
        adapters.as_embedding_model = _either(adapters.as_embedding_model)


class _either:  # noqa: N801  (replaces a function)
    def __init__(self, stock: object) -> None:
        self.stock = stock

    def __call__(self, model_class: type) -> type:
        if not asked_for():
            return self.stock(model_class)  # type: ignore[operator,no-any-return]
        from scoremode.engines.vllm.pooler import as_score_model

        return as_score_model(model_class)


# ── a process that ends with ours ────────────────────────────────────────────────────────────────────────────────────
def watch_parent() -> None:
    """Ends this process soon after the scoremode process ends; may be called any number of times."""
    pid = int(os.environ.get(PARENT) or 0)
    if pid in (0, os.getpid()) or os.getpid() in _watching:
        return
    if not _watching:
        os.register_at_fork(after_in_child=watch_parent)  # forked workers do not load plugins again
    _watching.add(os.getpid())
    import psutil  # before the thread starts: a process forked during the import would have half a module

    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and psutil.pid_exists(pid):
            time.sleep(SECONDS)
        _end()

    threading.Thread(target=watch, name="scoremode-guard", daemon=True).start()


def _end() -> None:
    """Kills all descendants except the resource tracker, which frees shared memory and then ends. Then exits."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if not is_tracker(child):
                    child.kill()
    os._exit(1)


def is_tracker(process: Any) -> bool:
    """Is this multiprocessing's resource tracker? The tracker ends by itself after the last process that uses it."""
    return any("resource_tracker" in word for word in process.cmdline())


class EngineCoreTarget:
    """Replaces the function that vLLM's engine process runs, and starts watching the scoremode process at once.

    vLLM loads its plugins late: imports take many seconds, and then the process may wait minutes for its parent's
    first message. This object is unpickled in the new process before any module of vLLM is imported.
    """

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __call__(self, *arguments: Any, **kwargs: Any) -> Any:
        watch_parent()
        return self._stock(*arguments, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_new_process, ()


def _in_new_process() -> Any:
    watch_parent()
    return _run_engine_core


def _run_engine_core(*arguments: Any, **kwargs: Any) -> Any:
    from vllm.v1.engine.core import EngineCoreProc

    return EngineCoreProc.run_engine_core(*arguments, **kwargs)


@contextlib.contextmanager
def guarded_start() -> Any:
    """Makes engine processes that are started inside this block watch this process."""
    from vllm.v1.engine.core import EngineCoreProc

    stock = EngineCoreProc.__dict__["run_engine_core"]
    EngineCoreProc.run_engine_core = staticmethod(EngineCoreTarget(EngineCoreProc.run_engine_core))
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = stock
