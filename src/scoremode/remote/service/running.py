"""vLLM's server in this process, which ``starting`` made for it.

Until it is ready, its output goes to a log alone: a start that fails is one line, and not vLLM's 167.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

from scoremode.console.signals import WORDS
from scoremode.core.engine import base
from scoremode.engines.vllm.processes import VllmLog
from scoremode.errors import EngineError
from scoremode.remote.service.starting import READY

SECONDS = 0.5  # between two looks at the log
logger = logging.getLogger(__name__)


def run_server(argv: list[str]) -> None:
    """Runs a module with its arguments until the server ends."""
    base.may_hang_at_exit = True
    log, terminal = VllmLog(), (os.dup(1), os.dup(2))
    _end_by_signals()
    if log.path is not None:
        logger.info("until it is ready, its output goes to %s", log.path)
        threading.Thread(target=_show_when_ready, args=(log, terminal), daemon=True).start()
    with log.taking_output(), log.explaining("the server ended", EngineError):
        sys.argv[:] = argv
        try:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"exit code {ended.code}") from None
    log.discard()


def _end_by_signals() -> None:
    """Until the server handles signals itself, one ends this process, and with it the engine, which watches it.

    While it starts, vLLM makes a KeyboardInterrupt of SIGTERM, and swallows one while it waits for its engine.
    """
    stock: Any = signal.signal

    def end(before: Any, number: int, frame: Any) -> None:
        try:
            before(number, frame)
        finally:
            os._exit(128 + number)

    def install(number: int, handler: Any) -> Any:
        is_vllms = str(getattr(handler, "__module__", "")).startswith("vllm.entrypoints.")
        return signal.getsignal(number) if is_vllms else stock(number, handler)

    for number in WORDS:
        if callable(before := signal.getsignal(number)):
            stock(number, partial(end, before))
    vars(signal)["signal"] = install


def _show_when_ready(log: VllmLog, terminal: tuple[int, int]) -> None:
    """Gives this process its streams back as soon as the server is ready; the engine's go on to the log."""
    while READY not in log.text():
        time.sleep(SECONDS)
    for number, copy in enumerate(terminal, start=1):
        os.dup2(copy, number)
    logger.info("the server is ready")
