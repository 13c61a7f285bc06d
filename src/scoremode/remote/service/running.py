"""vLLM's server in this process, which ``starting`` made for it.

Until the server is ready, its output goes to a log alone: a start that fails is one line, and not vLLM's 167.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from typing import NoReturn

from scoremode import errors
from scoremode.engines.vllm.processes import VllmLog
from scoremode.errors import EngineError, ScoremodeError
from scoremode.remote.service.starting import READY
from scoremode.reports.command import signals

SECONDS = 0.5  # between two looks at the log


def main() -> NoReturn:
    errors.names_flags = True
    signals.install()
    signals.nothing_is_kept("start it again")
    code = 0
    try:
        _serve(*sys.argv[1:2])
    except ScoremodeError as error:
        code = 2
        _say(str(error))
    except KeyboardInterrupt:  # without a code of ours, vLLM handled it: it takes SIGTERM while it starts
        code = signals.exit_code() or 143
        if signals.exit_code() is None:
            _say(signals.line(code - 128))
    if code:
        os._exit(code)
    sys.exit(0)


def _serve(module: str) -> None:
    del sys.argv[0]
    log, terminal = VllmLog(), (os.dup(1), os.dup(2))
    if log.path is not None:
        _say(f"until it is ready, its output goes to {log.path}")
        threading.Thread(target=_show_when_ready, args=(log, terminal), daemon=True).start()
    with log.taking_output(), log.explaining("the server ended", EngineError):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"exit code {ended.code}") from None
    log.discard()


def _show_when_ready(log: VllmLog, terminal: tuple[int, int]) -> None:
    """Gives this process its streams back as soon as the server is ready; the engine's go on to the log."""
    while READY not in log.text():
        time.sleep(SECONDS)
    for number, copy in enumerate(terminal, start=1):
        os.dup2(copy, number)
    _say("the server is ready")


def _say(line: str) -> None:
    os.write(2, f"scoremode: {line}\n".encode())


if __name__ == "__main__":
    main()
