"""Python processes that need not import torch first: they are forked from one that has it.

``forked.run`` and ``forked.Popen`` take what ``subprocess.run`` and ``subprocess.Popen`` take, for commands
``[sys.executable, "-c" | "-m" | SCRIPT, …]``. The process is a real one and a child of the caller: its streams, folder,
environment, session, signals and exit code are its own, and it can be killed. Tests of the interpreter's start itself
(signals during imports, what is imported, memory, Python's own flags) use ``subprocess``.

``vllm_engines`` does the same for the processes that engines of vLLM start in the process of the tests.

A *template* imports the libraries once and then waits. It answers each request by forking a child that forks the new
process and ends, so that the new process is handed to the caller. Libraries read some variables when they are imported:
there is one template for each set of those.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import mmap
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = (
    *("scipy.stats", "pyarrow.dataset", "pyarrow.parquet", "torch", "accelerate", "gguf"),
    *("transformers.models.auto.tokenization_auto", "transformers.models.llama.modeling_llama"),
    *("scoremode.cli.commands", "scoremode.core.verbs.session", "scoremode.engines.transformers.engine"),
)
VLLM = (
    *("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner", "vllm.entrypoints.llm"),
    *("vllm.entrypoints.openai.api_server", "vllm.model_executor.layers.quantization.online.base"),
    *("scoremode.cli.commands", "scoremode.core.verbs.session"),
)
READ_AT_IMPORT = (
    *("PYTHON", "LC_", "LANG", "TZ", "LD_", "HOME", "XDG_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TRITON", "CUDA_"),
    *("OMP_", "MKL_", "OPENBLAS_", "TORCH_", "ARROW_", "VLLM_LOGGING", "VLLM_CONFIGURE", "VLLM_USE"),
)
READ_AGAIN = (  # by ``settle``, or by datasets, which no template imports; the last is set by Ray, and nobody needs it
    *("PYTHONPATH", "PYTHONWARNINGS", "PYTHONUNBUFFERED", "VLLM_LOGGING_LEVEL", "HF_DATASETS_CACHE"),
    "PYTHONBREAKPOINT",
)
SET_BY_VLLM = (  # when it is imported or starts an engine, the last one by benchmarks; no reason for another template
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "TOKENIZERS_PARALLELISM", "TRITON_CACHE_AUTOTUNING"),
    "VLLM_USE_FLASHINFER_SAMPLER",
)
PYTHONPATH = os.environ.get("PYTHONPATH", "")  # that of the suite
FRESH_ENGINES = "SCOREMODE_TESTS_FRESH_ENGINES"  # in the environment: engines of vLLM import it themselves
SPAWNED = "--multiprocessing-fork"  # the last word of a process that multiprocessing's method "spawn" starts
HIGH = 500  # a number of descriptors that nobody asks for
SET_SUBREAPER = 36  # of prctl: orphans among our descendants become our children
STOCK: Any = subprocess.Popen  # its own methods have no types
Request = dict[str, Any]


# ── the caller ───────────────────────────────────────────────────────────────────────────────────────────────────────
class Popen(subprocess.Popen):
    """``subprocess.Popen`` whose process is forked from a template."""

    libraries: tuple[str, ...] = LIBRARIES

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(STOCK._execute_child).bind(self, *arguments).arguments
        command, environment = [os.fspath(word) for word in given["args"]], given["env"] or dict(os.environ)
        assert command[0] == sys.executable
        assert not any(given[name] for name in ("shell", "preexec_fn", "pass_fds"))
        request = {
            "words": command[1:],
            "folder": os.fspath(given["cwd"] or os.getcwd()),
            "environment": {**environment},
            "session": given["start_new_session"],
        }
        ours = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        streams = [number if chosen == -1 else chosen for number, chosen in enumerate(ours)]
        self.pid = template_for(environment, self.libraries).fork(request, dict(enumerate(streams)))
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        STOCK._close_pipe_fds(self, *(given[name] for name in names))


class VllmPopen(Popen):
    """The same with vLLM, also in the processes that it starts."""

    libraries = VLLM


def run(
    command: list[Any], *, input: Any = None, timeout: float | None = None, check: bool = False, **more: Any
) -> subprocess.CompletedProcess[Any]:
    """Like ``subprocess.run``."""
    if input is not None:
        more["stdin"] = subprocess.PIPE
    if more.pop("capture_output", False):
        more["stdout"] = more["stderr"] = subprocess.PIPE
    with Popen(command, **more) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


if sys.platform != "linux":  # nothing else hands orphans over
    Popen, VllmPopen, run = subprocess.Popen, subprocess.Popen, subprocess.run  # type: ignore[misc, assignment]


class Template:
    """A process that has the libraries, at the other end of a socket. It ends when this one does."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel, self._one_at_a_time = channel, threading.Lock()

    def fork(self, request: Request, descriptors: dict[int, int]) -> int:
        """Start a process with these descriptors, by the numbers that they have there; its id."""
        with self._one_at_a_time:
            return self._fork(request, descriptors)

    def _fork(self, request: Request, descriptors: dict[int, int]) -> int:
        _become_subreaper(True)
        try:
            _send(self.channel, {**request, "numbers": [*descriptors]}, [*descriptors.values()])
            answer, _ = _receive(self.channel)
        except BaseException:  # a test out of time: its answer must not be taken for that of the next
            self.channel.close()
            raise
        finally:
            _become_subreaper(False)
        return int(answer["pid"])

    def spawn(self, words: list[str], descriptors: list[int]) -> int:
        """What multiprocessing's method "spawn" starts."""
        request = {"words": words[-3:], "folder": os.getcwd(), "environment": {**os.environ}, "session": False}
        return self.fork(request, {number: number for number in (0, 1, 2, *descriptors)})


_templates: dict[Any, Template] = {}


def template_for(environment: dict[str, str], libraries: tuple[str, ...] = LIBRARIES) -> Template:
    environment = {n: v for n, v in environment.items() if n not in SET_BY_VLLM}
    if libraries == VLLM:  # no test of it fetches anything
        environment["HF_HUB_OFFLINE"] = "1"
    read = {n: v for n, v in environment.items() if v and n.startswith(READ_AT_IMPORT) and n not in READ_AGAIN}
    key = libraries, frozenset(read.items())
    if key not in _templates or _templates[key].channel.fileno() == -1:
        ours, theirs = socket.socketpair()
        # not by the script's folder: tests/core/statistics is not Python's module of that name
        command, no = [sys.executable, "-P", __file__, str(theirs.fileno()), *libraries], subprocess.DEVNULL
        its = {**environment, "PYTHONPATH": PYTHONPATH}
        process = subprocess.Popen(command, env=its, stdin=no, stdout=no, pass_fds=[theirs.fileno()])
        theirs.close()
        _templates[key] = Template(ours)
        atexit.register(process.kill)
    return _templates[key]


@contextlib.contextmanager
def vllm_engines(template: Template | None = None) -> Iterator[None]:
    """Processes that vLLM starts, by multiprocessing's method "spawn", have vLLM already."""
    util: Any = multiprocessing.util
    stock = util.spawnv_passfds

    def spawn(program: bytes, words: list[str], descriptors: list[int]) -> Any:
        if SPAWNED not in words or sys.platform != "linux" or os.environ.get(FRESH_ENGINES):
            return stock(program, words, descriptors)
        return (template or template_for(dict(os.environ), VLLM)).spawn(words, descriptors)

    util.spawnv_passfds = spawn
    yield
    util.spawnv_passfds = stock


def _become_subreaper(wanted: bool) -> None:
    ctypes.CDLL(None).prctl(SET_SUBREAPER, int(wanted), 0, 0, 0)


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _send(to: socket.socket, message: Request, descriptors: list[int]) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(to, [len(data).to_bytes(8, "little")], descriptors)
    to.sendall(data)


def _receive(source: socket.socket) -> tuple[Request, list[int]]:
    """A message and the descriptors that came with it."""
    size, descriptors, _, _ = socket.recv_fds(source, 8, 64)
    if not size:
        raise EOFError("the process at the other end is gone")
    wanted, data = int.from_bytes(size, "little"), bytearray()
    while len(data) < wanted:
        data += source.recv(wanted - len(data))
    return json.loads(data), descriptors


# ── the template ─────────────────────────────────────────────────────────────────────────────────────────────────────
def serve(channel: socket.socket, *, nested: bool) -> tuple[Request, contextlib.AbstractContextManager[None]]:
    """Answer requests. Returns in each new process, with its request; vLLM's have a template of their own."""
    while True:
        try:
            request, descriptors = _receive(channel)
        except EOFError:
            os._exit(0)
        reader, writer = os.pipe()
        middle = os.fork()
        if middle:
            os.waitpid(middle, 0)  # then the new process is the caller's child
            _send(channel, {"pid": int.from_bytes(os.read(reader, 8), "little")}, [])
            _close(reader, writer, *descriptors)
            continue
        middle = os.getpid()
        if pid := os.fork():
            os.write(writer, pid.to_bytes(8, "little"))
            os._exit(0)
        while os.getppid() == middle:
            time.sleep(0.0002)
        _close(channel.detach(), reader, writer)
        if request["session"]:
            os.setsid()
        if nested:  # it starts processes too: an engine its core, and the core its workers
            ours, channel = socket.socketpair()
            if not os.fork():
                _close(ours.detach(), *descriptors)
                continue
            channel.close()
            ours = socket.socket(fileno=fcntl.fcntl(ours.detach(), fcntl.F_DUPFD_CLOEXEC, HIGH))
            settle(request, descriptors)
            return request, vllm_engines(Template(ours))
        settle(request, descriptors)
        return request, contextlib.nullcontext()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def settle(request: Request, descriptors: list[int]) -> None:
    """Streams, folder and environment of a new process."""
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH) for descriptor in descriptors]
    _close(*descriptors)
    for number, descriptor in zip(request["numbers"], aside, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):  # Python looked at the template's
        old, buffering = getattr(sys, name), 1 if number == 2 else -1
        new = open(number, old.mode, buffering, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    for words in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        vars(warnings)["_setoption"](words)
    if logger := sys.modules.get("vllm.logger"):
        logger._configure_vllm_root_logger()


def execute(words: list[str]) -> None:
    """What ``python WORDS`` does."""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.path.insert(0, "")
    match words:
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            exec(compile(code, "<string>", "exec"), main.__dict__)
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *rest]:
            sys.argv, sys.path[0] = [script, *rest], str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")


def live(words: list[str]) -> NoReturn:
    """Execute, and end as Python does, but for taking the imported libraries down one by one, which takes a second."""
    code: object = 0
    try:
        execute(words)
    except SystemExit as ended:
        code = ended.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = "interrupted" if isinstance(error, KeyboardInterrupt) else 1
    vars(threading)["_shutdown"]()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == "interrupted":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code if isinstance(code, int) else 0)


def become(_program: str, words: list[str], environment: dict[str, str]) -> NoReturn:
    """Like ``os.execve`` of another Python, without importing the libraries again."""
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    live(words[1:])


def spare_work_of_vllm() -> None:
    """What an engine does for long runs, and what costs a short one seconds."""
    if messages := sys.modules.get("vllm.distributed.device_communicators.shm_broadcast"):
        # Who waits sleeps: a loop of a second costs the others. Not at once, because of two messages within a
        # millisecond ZeroMQ drops the second one's wake-up, and vLLM would sleep for a minute.
        messages.SpinCondition.__init__.__defaults__ = (0.05,)
    platforms = sys.modules.get("vllm.platforms")
    if platforms and platforms.current_platform.is_cpu():  # each worker would search all modules for Triton's kernels
        platforms.current_platform.register_triton_kernel_overrides()
        type(platforms.current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
        torch: Any = sys.modules["torch"]
        with contextlib.suppress(Exception):  # no compiler. A process takes seconds to compile for the first time
            torch.compile(lambda x: x + 1)(torch.zeros(2))
    inspect_here()
    if caches := sys.modules.get("vllm.v1.worker.utils"):  # its K/V cache is the one tensor of bytes that it makes
        vars(caches)["torch"] = LazyZeros()
    vars(gc)["unfreeze"] = lambda: None  # when an engine ends, it would search and copy all that was imported here


def inspect_here() -> None:
    """vLLM asks a fresh process of its own what each architecture can do that a machine has not seen before: so that
    its first process need not touch a GPU. Importing vLLM once more takes a quarter of a minute."""
    registry, platforms = map(sys.modules.get, ("vllm.model_executor.models.registry", "vllm.platforms"))
    if registry and platforms and platforms.current_platform.is_cpu():
        vars(registry)["_run_in_subprocess"] = lambda ask: ask()


class LazyZeros:
    """torch, whose zeros are written by the system when they are used: an engine uses little of its gigabyte."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["torch"], name)

    def zeros(self, *size: Any, **how: Any) -> Any:
        torch: Any = sys.modules["torch"]
        if how == {"dtype": torch.int8, "device": torch.device("cpu")}:
            return torch.frombuffer(mmap.mmap(-1, *size), dtype=torch.int8)
        return torch.zeros(*size, **how)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in sys.argv[2:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):  # it finds the place of a process's name only while the environment is new
        importlib.import_module("setproctitle").getproctitle()
    spare_work_of_vllm()
    with contextlib.suppress(ImportError):  # some imports compute
        importlib.import_module("scoremode.engines.vllm.processes").end_openmp_threads()
    gc.collect()
    gc.freeze()
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # Arrow's allocator
    request, engines = serve(socket.socket(fileno=int(sys.argv[1])), nested=tuple(sys.argv[2:]) == VLLM)
    vars(os)["execve"] = become
    with engines:
        live(request["words"])
