"""Conversations ─▶ texts, by chat templates in Jinja, exactly as Transformers renders them, but within limits.

A template is a program, and a model may come from anybody. This file is also run as a process of its own, in which the
system limits memory and time, because a single operation inside of Python can take gigabytes or hours.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from scoremode.errors import ModelError

SECONDS = 3  # of the processor, for one conversation
MEMORY = 1 << 30  # bytes for one conversation, and COPIES times its own bytes
LONGEST_TEXT = 16 << 20  # characters, and COPIES times those of the conversation
COPIES = 16

_lock = threading.Lock()


def _after_fork() -> None:
    """The lock may have been held, and the process that renders is the parent's."""
    globals()["_lock"] = threading.Lock()
    _worker.cache_clear()


os.register_at_fork(after_in_child=_after_fork)


def render_template(template: str, messages: list[Any], *, open_turn: bool, special: Mapping[str, Any]) -> str:
    """A conversation as a chat template writes it; ``special`` are the names of BOS and EOS."""
    conversation = {"conversations": [messages], "chat_template": template, "add_generation_prompt": open_turn}
    request = json.dumps({**special, **conversation}, default=str).encode() + b"\n"
    answer = b""
    with _lock:
        worker, answers = _worker()
        try:
            worker.stdin.write(request)
            worker.stdin.flush()
            answer = answers.readline()
        except BrokenPipeError:
            pass
        finally:  # Ctrl-C too: another row must not get the answer to this one
            if not answer.endswith(b"\n"):
                _worker.cache_clear()
                answers.close()
                worker.kill()
                worker.communicate()
    if not answer.endswith(b"\n"):
        late = worker.returncode == -signal.SIGPROF
        raise refused_row(f"it takes more than {SECONDS} seconds" if late else "its process ended")
    response = json.loads(answer)
    if "error" in response:
        raise refused_row(response["error"])
    return str(response["text"])


def refused_row(reason: str) -> ModelError:
    return ModelError(
        f"the chat template refused a row ({reason[:200]})", fix="check the template, and the roles in the row"
    )


@cache
def _worker() -> tuple[Any, BinaryIO]:
    """The process that renders, and its answers, which have a pipe of their own: libraries print to the usual one."""
    answers, end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=(end,),
            start_new_session=True,  # Ctrl-C is for us
        )
    except OSError as error:
        raise ModelError(
            f"no process for chat templates can be started ({error.strerror})", fix="start Python by its full name"
        ) from None
    finally:
        os.close(end)
    return process, os.fdopen(answers, "rb")


# ── in the other process ─────────────────────────────────────────────────────────────────────────────────────────────
def _serve() -> None:
    """Answers requests, which are lines of JSON."""
    from transformers.utils.chat_template_utils import render_jinja_template

    taken, answers = 0, os.fdopen(int(sys.argv[1]), "wb")
    with suppress(OSError):
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF then ends this process, whatever it does
        _limit_memory(taken + MEMORY + COPIES * len(line))
        answer = _answer(render_jinja_template, line)
        _limit_memory(resource.RLIM_INFINITY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer + b"\n")
        answers.flush()


def _answer(render: Any, line: bytes) -> bytes:
    try:
        (text,), _ = render(**json.loads(line))
        if len(text) > LONGEST_TEXT + COPIES * len(line):
            raise MemoryError
        return json.dumps({"text": text}, ensure_ascii=False).encode()
    except Exception as error:  # templates raise their own errors, and Python's
        reason = "the text is too long" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
        return json.dumps({"error": reason[:200]}).encode()


def _limit_memory(most: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with suppress(OSError, ValueError):  # macOS has no such limit, and the user's own may be lower
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    _serve()
