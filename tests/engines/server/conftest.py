"""A real inference server, started as its users start it."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.makers import make_small_llama, make_tokenizer

SECONDS = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = importlib.util.find_spec("vllm") is None
    for item in items:
        if "engines/server/test_real_server" in item.nodeid:
            item.add_marker(pytest.mark.slow)
            if absent:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make test installs it"))


class RealServer:
    """``vllm serve`` on this machine's CPU, in float32. It can be killed and started again at the same address."""

    def __init__(self, model: Path, log: Path) -> None:
        self.model, self.log = model, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *more: str) -> RealServer:
        # the module behind ``vllm serve``: the command itself looks for a package that the CPU build does not have
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        words += ["--served-model-name", "llama", "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        words += ["--enforce-eager", "--max-model-len", "256", "--disable-uvicorn-access-log", *more]
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
            )
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=2):
                    return self
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"the server did not start: {self.log.read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        """All of its processes, at once."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama4h")
    make_tokenizer(folder, adds_bos=False)
    return make_small_llama(folder)


@pytest.fixture(scope="session")
def real(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = RealServer(small_llama, tmp_path_factory.mktemp("server") / "log.txt")
    try:
        yield server.start()
    finally:
        server.kill()
