"""A real scoring service, started as its users start it: ``scoremode serve``."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.conftest import forked_engines  # noqa: F401  # a fixture
from tests.servers import LocalServer

KEY = "sk-verysecret"
GROUPS = {
    "vllm.general_plugins": "scoremode.engines.vllm.plugin:register",
    "vllm.endpoint_plugins": "scoremode.remote.service.endpoint:ScoreEndpoint",
}
REAL = ("service/test_service",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = importlib.util.find_spec("vllm") is None
    for item in items:
        if any(name in item.nodeid for name in REAL):
            item.add_marker(pytest.mark.slow)
            if absent:
                item.add_marker(pytest.mark.skip(reason="needs vLLM"))


def seen_by_vllm(folder: Path) -> str:
    """PYTHONPATH under which vLLM sees this checkout's entry points, even if an older one is installed."""
    path = os.environ.get("PYTHONPATH", "")
    if all(any(p.name == "scoremode" for p in entry_points(group=group)) for group in GROUPS):
        return path
    info = folder / "scoremode-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scoremode\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("".join(f"[{g}]\nscoremode = {point}\n" for g, point in GROUPS.items()))
    source = Path(__file__).resolve().parents[3] / "src"
    return os.pathsep.join(filter(None, (str(folder), str(source), path)))


class ServedModel(LocalServer):
    """``scoremode serve`` on this machine's CPU, in float32."""

    def __init__(self, model: Path, folder: Path, *flags: str, **environment: str) -> None:
        super().__init__(folder / "log.txt")
        self.model, self.flags = model, flags
        self.environment = {"PYTHONPATH": seen_by_vllm(folder / "site"), **environment}

    def start(self) -> ServedModel:
        words = [sys.executable, "-m", "scoremode", "serve", str(self.model), "--served-model-name", "llama"]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", "256", *self.flags]
        return self.launch(words, {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **self.environment})

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(60)
        self.process = None
        return code

    def ask(
        self,
        path: str,
        body: bytes | None = None,
        kind: str = "application/json",
        method: str | None = None,
        **more: str,
    ) -> tuple[int, Any]:
        """Status and body of an answer; JSON is parsed."""
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": kind, **more}
        asked = urllib.request.Request(self.address + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=120) as reply:
                status, data, told = reply.status, reply.read(), reply.headers.get("content-type", "")
        except urllib.error.HTTPError as error:
            status, data, told = error.code, error.read(), error.headers.get("content-type", "")
        return status, json.loads(data) if "json" in told else data


@pytest.fixture(scope="session")
def served(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    server = ServedModel(small_llama, tmp_path_factory.mktemp("service"), "--api-key-env", "SERVER_KEY", SERVER_KEY=KEY)
    try:
        yield server.start()
    finally:
        server.kill()
