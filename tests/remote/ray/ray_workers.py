"""Ray's workers, forked from a process that has imported torch: see ``tests/forked.py``.

Ray runs this script in place of its own ``setup_worker.py``. It sends its words, variables and streams to the template
that ``start_template`` started and ends; Ray knows its workers by a number among the words. What the template cannot
give, such as another number of threads, is started by Ray's own script.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

TEMPLATE = "SCOREMODE_TEST_RAY_TEMPLATE"  # the address of its socket
CONTEXT = "--serialized-runtime-env-context="
LANGUAGE = "--language="
# what Ray imports. Ray itself reads variables while it is imported, each worker others.
RAY_IMPORTS = ("yaml", "jsonschema", "msgpack", "google.protobuf.json_format", "click", "psutil", "setproctitle")


@functools.cache
def _listener() -> socket.socket:
    folder = tempfile.mkdtemp(prefix="scoremode-ray-")
    atexit.register(shutil.rmtree, folder)
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"{folder}/template")
    made.listen(64)
    return made


def fork_workers() -> None:
    """Let the clusters that this process starts send their workers to the template: its own, or that of the process
    whose variables it was given."""
    from ray._private import ray_constants

    ray_constants.SETUP_WORKER_FILENAME = __file__
    if TEMPLATE not in os.environ:
        os.environ[TEMPLATE] = _listener().getsockname()


@functools.cache
def start_template() -> int:
    """Start the template, which ends with this process; its id. Workers that were sent before wait for it."""
    import subprocess

    number, no = _listener().fileno(), subprocess.DEVNULL
    command = [sys.executable, "-P", __file__, "serve", str(number)]
    template = subprocess.Popen(command, stdin=no, stdout=no, pass_fds=[number])
    atexit.register(template.kill)
    return template.pid


def ask(words: list[str]) -> bool:
    """Send a worker's words to the template. Returns whether it can start that worker."""
    context = json.loads(next((word.removeprefix(CONTEXT) for word in words if word.startswith(CONTEXT)), "") or "{}")
    variables = context.pop("env_vars", {})
    ordinary = context.get("py_executable", sys.executable) == sys.executable and f"{LANGUAGE}PYTHON" in words
    if not ordinary or any(context.get(name) for name in ("command_prefix", "override_worker_entrypoint", "java_jars")):
        return False
    environment = {**os.environ, **variables}
    if any("$" in value for value in variables.values()) or environment.get("OMP_NUM_THREADS") != "1":
        return False
    if TEMPLATE not in os.environ:  # a Ray that another test started: this file stays in place of Ray's script
        return False
    rest = [word for word in words if not word.startswith((CONTEXT, LANGUAGE))]
    request: dict[str, Any] = {"words": rest, "folder": os.getcwd(), "environment": environment, "numbers": [0, 1, 2]}
    data = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(os.environ[TEMPLATE])
        socket.send_fds(channel, [len(data).to_bytes(8, "little")], [0, 1, 2])
        channel.sendall(data)
    return True


def serve(listener: socket.socket) -> None:
    """Fork a worker for every connection."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    import gc
    import importlib
    import signal
    import warnings

    from tests import forked

    for name in (*forked.LIBRARIES, *RAY_IMPORTS):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    gc.collect()
    gc.freeze()
    while True:
        channel, _ = listener.accept()
        request, descriptors = vars(forked)["_receive"](channel)
        channel.close()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            forked.settle(request, descriptors)
            forked.live(request["words"])
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(socket.socket(fileno=int(sys.argv[2])))
    elif not ask(sys.argv[1:]):
        import ray._private.workers

        stock = Path(ray._private.workers.__file__).with_name("setup_worker.py")
        os.execv(sys.executable, [sys.executable, str(stock), *sys.argv[1:]])
