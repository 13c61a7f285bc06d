"""A real inference server, started as its users start it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import LocalServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = importlib.util.find_spec("vllm") is None
    for item in items:
        if "engines/server/test_real_server" in item.nodeid:
            item.add_marker(pytest.mark.slow)
            if absent:
                item.add_marker(pytest.mark.skip(reason="needs vLLM"))


class RealServer(LocalServer):
    """``vllm serve`` on this machine's CPU, in float32."""

    def __init__(self, model: Path, log: Path) -> None:
        super().__init__(log)
        self.model = model

    def start(self, *more: str) -> RealServer:
        # the module behind ``vllm serve``: the command itself looks for a package that the CPU build does not have
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        words += ["--served-model-name", "llama", "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        words += ["--enforce-eager", "--max-model-len", "256", "--disable-uvicorn-access-log", *more]
        return self.launch(words, {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})


@pytest.fixture(scope="session")
def real(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = RealServer(small_llama, tmp_path_factory.mktemp("server") / "log.txt")
    try:
        yield server.start()
    finally:
        server.kill()
