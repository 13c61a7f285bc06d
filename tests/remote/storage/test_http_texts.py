"""Texts on web servers: what is not there, what is refused, and a server that never answers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import scoremode as sm
from scoremode.errors import CorpusError
from scoremode.remote.storage import objects
from tests.engines.server.small_server import SmallServer

pytest.importorskip("aiohttp", reason="needs aiohttp")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallServer]:
    monkeypatch.setattr(objects, "READ_SECONDS", 0.4)
    with SmallServer() as found:
        yield found


def answer(status: str, body: bytes = b"") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def silence() -> Iterator[bytes]:
    while True:
        time.sleep(0.05)
        yield b""


def refusal(server: SmallServer) -> str:
    with pytest.raises(CorpusError) as caught:
        sm.ppl("table:uniform", corpus=f"{server.address}/x.txt")
    return str(caught.value)


def test_what_a_server_says_of_a_text_is_said(server: SmallServer) -> None:
    for status in ("404 Not Found", "410 Gone"):
        server.wire = lambda path: [answer(status)]  # noqa: B023
        assert "there is no file" in refusal(server)
    server.wire = lambda path: [answer("503 Busy")]
    assert "cannot be read: HTTP status 503; check the URI" in refusal(server)


def test_a_server_that_never_answers_is_let_go(server: SmallServer) -> None:
    server.wire = lambda path: silence()
    began = time.monotonic()
    assert "cannot be read" in refusal(server)
    assert time.monotonic() - began < 10


def test_a_text_is_read(server: SmallServer) -> None:
    server.wire = lambda path: [answer("200 OK", b"abcd" * 9)]
    assert sm.ppl("table:uniform", corpus=f"{server.address}/x.txt").perplexity.value == pytest.approx(256)
