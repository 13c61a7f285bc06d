"""Who may ask, and how slowly: the layer in front of vLLM's routes, in a real uvicorn server without vLLM."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scoremode.service import access
from scoremode.service.access import KEYS, Access, ConnectionWatch, accepted_keys, digest_of, is_allowed

uvicorn = pytest.importorskip("uvicorn", reason="needs vLLM")
QUICK = 0.6  # seconds that a client gets here, instead of a minute
KEY = b"Authorization: Bearer sk-one\r\n"
LARGE = 64 << 20  # bytes of an answer: more than the buffers on the way


def application() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    async def plain(request: Request) -> Response:
        return PlainTextResponse("here")

    async def body(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    async def thinks(request: Request) -> Response:
        await asyncio.sleep(3 * QUICK)
        return PlainTextResponse("thought")

    async def large(request: Request) -> Response:
        return Response(b"x" * LARGE)

    paths = ("/health", "/ping", "/metrics", "/version", "/v1/models", "/docs", "/v1/load_lora_adapter")
    app = Starlette(
        routes=[
            *(Route(path, plain) for path in paths),
            *(Route(path, body, methods=["POST"]) for path in ("/pooling", "/tokenize", "/detokenize")),
            Route("/thinks", thinks),
            Route("/large", large),
        ]
    )
    app.add_middleware(Access)
    return app


@pytest.fixture(scope="module", params=["h11", "httptools"])
def address(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """A server as vLLM starts it: it leaves itself and its arguments in the state of the application."""
    pytest.importorskip(request.param)
    app = application()
    server = uvicorn.Server(uvicorn.Config(app, port=0, http=request.param, log_level="critical"))
    app.state.server, app.state.args = server, Namespace(api_key=["sk-one", "sk-two"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access, "SECONDS", QUICK)
        patch.delenv(KEYS, raising=False)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            running = threading.Thread(target=server.run, args=([listening],), daemon=True)
            running.start()
            while not server.started:
                time.sleep(0.01)
            yield listening.getsockname()
            server.should_exit = True
            running.join(20)
    assert not running.is_alive()


def raw(address: tuple[str, int], data: bytes, then: Callable[[socket.socket], None] | None = None) -> bytes:
    """Send bytes, and read all that comes until the server ends the connection."""
    with socket.create_connection(address, timeout=20 * QUICK) as connection:
        connection.sendall(data)
        if then is not None:
            then(connection)
        found = b""
        try:
            while piece := connection.recv(1 << 16):
                found += piece
        except ConnectionError:
            pass
        return found


def trickle(piece: bytes) -> Callable[[socket.socket], None]:
    """Go on sending, byte by byte, until the server has enough of it."""

    def send(connection: socket.socket) -> None:
        ends = time.monotonic() + 10 * QUICK
        while time.monotonic() < ends:
            try:
                connection.sendall(piece)
                connection.settimeout(0.05)
                if not connection.recv(1, socket.MSG_PEEK):
                    return
                time.sleep(0.05)
            except TimeoutError:
                continue
            except ConnectionError:
                return
        raise AssertionError("the server let it go on")

    return send


def ask(address: tuple[str, int], path: str, *headers: bytes, method: str = "GET", body: bytes = b"") -> int:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n".encode()
    return int(raw(address, head + b"".join(headers) + b"\r\n" + body).split(b" ")[1])


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
        b"Authorization: \r\n",
        b"Authorization: Bearer\r\n",
        b"Authorization: Bearer \r\n",
        b"Authorization: Bearer sk-on\r\n",
        b"Authorization: Bearer sk-one,sk-two\r\n",
        b"Authorization: Basic sk-one\r\n",
        b"Authorization: sk-one\r\n",
        b"Authorization: Bearer \xff\xfe\r\n",
        b"Authorization: Bearer wrong\r\n" + KEY,
        b"X-Api-Key: sk-one\r\n",
    ],
)
def test_a_wrong_key_is_none(address: tuple[str, int], header: bytes) -> None:
    assert ask(address, "/metrics", header) == 401


def test_a_browser_may_ask_whether_it_may_ask(address: tuple[str, int]) -> None:
    wanted = b"Origin: http://a\r\nAccess-Control-Request-Method: POST\r\n"
    assert ask(address, "/pooling", wanted, method="OPTIONS") != 401
    assert ask(address, "/pooling", method="OPTIONS") == 401
    assert ask(address, "/pooling", wanted, method="POST") == 401


def test_keys_come_from_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "c")
    monkeypatch.setenv(KEYS, f"{digest_of(b'a')},{digest_of(b'b')}")
    assert accepted_keys(Namespace(api_key=None)) == [digest_of(key) for key in (b"a", b"b", b"c")]
    assert accepted_keys(Namespace(api_key=["d"])) == [digest_of(key) for key in (b"a", b"b", b"d")]
    monkeypatch.setenv("VLLM_API_KEY", "")
    monkeypatch.delenv(KEYS)
    assert accepted_keys(Namespace(api_key=None)) == []
    assert not is_allowed([(b"authorization", b"Bearer ")], [digest_of(b"a")])


def test_a_websocket_wants_a_key_too() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    app: Any = Namespace(state=Namespace(args=Namespace(api_key=["a"])))
    scope = {"type": "websocket", "path": "/health", "headers": [], "app": app}
    asyncio.run(Access(None)(scope, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


# ── slow clients ─────────────────────────────────────────────────────────────────────────────────────────────────────
POST = b"POST /pooling HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n"


@pytest.mark.parametrize(
    ("start", "piece", "answer"),
    [
        (b"", b"", b""),
        (b"GET /health HTTP/1.1\r\n", b"", b""),
        (b"GET /health HTTP/1.1\r\nX: ", b"y", b""),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /he", b"a", b"200 OK"),
        (POST + KEY + b"\r\n", b"", b"408"),
        (POST + KEY + b"\r\n", b"x", b"408"),
        (POST + b"\r\n", b"x", b"401"),
        (POST + KEY + b"Expect: 100-continue\r\n\r\n", b"", b"408"),
    ],
)
def test_a_slow_client_is_let_go(address: tuple[str, int], start: bytes, piece: bytes, answer: bytes) -> None:
    began = time.monotonic()
    found = raw(address, start, trickle(piece) if piece else None)
    assert time.monotonic() - began < 8 * QUICK
    assert answer in found
    assert ask(address, "/health") == 200


def test_a_client_that_does_not_read_its_answer_is_let_go(address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n")
        time.sleep(4 * QUICK)
        came = 0
        try:
            while piece := connection.recv(1 << 20):
                came += len(piece)
        except ConnectionError:
            pass
        assert came < LARGE


def test_clients_in_good_faith_are_not_let_go(address: tuple[str, int]) -> None:
    """One that waits for a long computation; one that sends a large body in pieces; one that reads in pieces."""
    assert ask(address, "/thinks", KEY) == 200
    assert ask(address, "/pooling", KEY, method="POST", body=bytes(8 << 20)) == 200

    def in_pieces(connection: socket.socket) -> None:
        for _ in range(4):  # each in less time than a client gets, all together in more, at the least rate
            time.sleep(QUICK / 2)
            connection.sendall(bytes(25_000))

    assert b"200 OK" in raw(
        address, POST.replace(b"Host: x", b"Host: x\r\nConnection: close") + KEY + b"\r\n", in_pieces
    )
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + KEY + b"\r\n")
        came = 0
        while piece := connection.recv(1 << 20):
            came += len(piece)
            time.sleep(QUICK / 20)
        assert came > LARGE


def test_a_few_bytes_of_a_long_answer_are_no_progress() -> None:
    """The client reads a byte between two looks: of a long rest that is nothing, of a short one it is something."""

    class Transport:
        unread, aborted = 0, False

        def get_write_buffer_size(self) -> int:
            return self.unread

        def abort(self) -> None:
            self.aborted = True

    class Connection:
        transport: Transport
        cycle = Namespace(response_complete=False)

    for unread, is_let_go in ((3 << 20, True), (1000, False)):
        transport = Transport()
        connection = Connection()
        connection.transport = transport
        watch = ConnectionWatch([connection])
        for step in range(20):
            transport.unread = unread + 500 - step
            watch.look(access.SECONDS / 12 * step)
        assert transport.aborted == is_let_go
