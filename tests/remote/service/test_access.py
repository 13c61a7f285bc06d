"""Who may ask: the layer in front of vLLM's routes, in a real uvicorn server without vLLM."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from scoremode.remote.service.access import KEYS, Access, accepted_keys, digest_of, is_allowed

uvicorn = pytest.importorskip("uvicorn", reason="needs vLLM")
KEY = b"Authorization: Bearer sk-one\r\n"


def application() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    async def plain(request: Request) -> Response:
        return PlainTextResponse("here")

    async def body(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    paths = ("/health", "/ping", "/metrics", "/version", "/v1/models", "/docs", "/v1/load_lora_adapter")
    app = Starlette(
        routes=[
            *(Route(path, plain) for path in paths),
            *(Route(path, body, methods=["POST"]) for path in ("/pooling", "/tokenize", "/detokenize")),
        ]
    )
    app.add_middleware(Access)
    return app


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    """A server with two keys."""
    server = uvicorn.Server(uvicorn.Config(application(), port=0, log_level="critical"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEYS, ",".join(digest_of(key) for key in (b"sk-one", b"sk-two")))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            running = threading.Thread(target=server.run, args=([listening],), daemon=True)
            running.start()
            while not server.started:
                time.sleep(0.01)
            yield listening.getsockname()
            server.should_exit = True
            running.join(20)
    assert not running.is_alive()


def ask(address: tuple[str, int], path: str, *headers: bytes, method: str = "GET", body: bytes = b"") -> int:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n".encode()
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(head + b"".join(headers) + b"\r\n" + body)
        return int(connection.recv(1 << 16).split(b" ")[1])


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_route_but_health_wants_a_key(address: tuple[str, int]) -> None:
    for path in ("/health", "/ping", "/health?x=1"):
        assert ask(address, path) == 200
    for path in ("/metrics", "/version", "/v1/models", "/docs", "/openapi.json", "/v1/load_lora_adapter", "/nothing"):
        assert ask(address, path) == 401, path
        assert ask(address, path, KEY) in (200, 404)
    for path in ("/pooling", "/tokenize", "/detokenize"):
        assert ask(address, path, method="POST", body=b"abc") == 401, path
        assert ask(address, path, b"authorization: bEARER sk-two\r\n", method="POST", body=b"abc") == 200


@pytest.mark.parametrize("path", ["/health/", "//health", "/HEALTH", "/health/../metrics", "/health%2f..%2fmetrics"])
def test_no_other_path_passes_for_health(address: tuple[str, int], path: str) -> None:
    assert ask(address, path) == 401


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Authorization: Bearer \r\n",
        b"Authorization: Bearer sk-on\r\n",
        b"Authorization: Bearer sk-one,sk-two\r\n",
        b"Authorization: Basic sk-one\r\n",
        b"Authorization: Bearer \xff\xfe\r\n",
        b"Authorization: Bearer wrong\r\n" + KEY,
        b"X-Api-Key: sk-one\r\n",
    ],
)
def test_a_wrong_key_is_none(address: tuple[str, int], header: bytes) -> None:
    assert ask(address, "/metrics", header) == 401


def test_keys_come_from_both_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "c")
    monkeypatch.setenv(KEYS, f"{digest_of(b'a')},{digest_of(b'b')}")
    assert accepted_keys() == [digest_of(key) for key in (b"a", b"b", b"c")]
    monkeypatch.setenv("VLLM_API_KEY", "")
    monkeypatch.delenv(KEYS)
    assert accepted_keys() == []
    assert not is_allowed([(b"authorization", b"Bearer ")], [digest_of(b"a")])


def test_a_websocket_wants_a_key_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS, digest_of(b"a"))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Access(None)({"type": "websocket", "path": "/health", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
