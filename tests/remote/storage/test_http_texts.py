"""Texts on web servers: what is not there, what is refused, and servers that never come to an end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

import pytest

import scoremode as sm
from scoremode.errors import CorpusError
from scoremode.remote.storage import file_systems
from tests.engines.server.small_server import SmallServer

pytest.importorskip("aiohttp", reason="needs aiohttp")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallServer]:
    monkeypatch.setenv("SCOREMODE_STORAGE_PATIENCE", "0.3")
    monkeypatch.setattr(file_systems, "READ_SECONDS", 0.4)
    monkeypatch.setattr(file_systems, "REQUEST_SECONDS", 0.6)
    with SmallServer() as found:
        yield found


def answer(status: str, body: bytes = b"") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def slowly(piece: bytes) -> Iterator[bytes]:
    while True:
        time.sleep(0.05)
        yield piece


def refusal(server: SmallServer) -> str:
    with pytest.raises(CorpusError) as caught:
        sm.ppl("table:uniform", corpus=f"{server.address}/x.txt")
    return str(caught.value)


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("404 Not Found", "there is no file"),
        ("410 Gone", "there is no file"),
        ("403 Forbidden", "access is denied"),
        ("401 Unauthorized", "access is denied"),
        ("503 Busy", "busy or failing"),
        ("418 Teapot", "HTTP status 418"),
    ],
)
def test_what_a_server_says_of_a_text_is_said(server: SmallServer, status: str, says: str) -> None:
    server.wire = lambda path: [answer(status)]
    assert says in refusal(server)


@pytest.mark.parametrize(
    "pieces",
    [
        lambda: slowly(b""),
        lambda: itertools.chain([b"HTTP/1.1 200 OK\r\nX: "], slowly(b"y")),
        lambda: slowly(b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["nothing", "headers", "100 Continue"],
)
def test_a_server_that_never_ends_is_let_go(server: SmallServer, pieces: Iterable[bytes]) -> None:
    server.wire = lambda path: pieces()  # type: ignore[operator]
    began = time.monotonic()
    assert "the server does not answer" in refusal(server)
    assert time.monotonic() - began < 10


def test_a_text_that_comes_byte_by_byte_is_let_go(server: SmallServer) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    server.wire = lambda path: itertools.chain([head], slowly(b"a"))
    began = time.monotonic()
    assert "cannot be read" in refusal(server)
    assert time.monotonic() - began < 20


def test_a_text_is_read(server: SmallServer) -> None:
    server.wire = lambda path: [answer("200 OK", b"abcd" * 9)]
    assert sm.ppl("table:uniform", corpus=f"{server.address}/x.txt").perplexity.value == pytest.approx(256)
