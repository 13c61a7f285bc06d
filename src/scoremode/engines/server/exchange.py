"""One request and its answer: at most so many bytes, in at most so much time, whatever the server does.

httpx limits the time of each read and write. A server that sends one byte a second, or ``100 Continue`` without end,
keeps within that for ever. So every read and write also gets no more than what is left of the request's own time.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from http.cookiejar import DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from scoremode.engines.messages import Parts
from scoremode.errors import EngineError, one_line

PIECE = 1 << 20  # bytes of a body that are handed over at a time
WRITTEN = 1 << 16  # bytes that are written before the clock is looked at
UPLOAD = 1 << 20  # bytes that may take a second more
CONNECT = 30.0  # seconds
TOO_SLOW = "no answer in time; --timeout SECONDS waits longer"


class StoppedError(Exception):
    """Nobody waits for this answer any more."""


class FailedError(Exception):
    """One try failed in a way that may pass."""

    def __init__(self, reason: str, wait: float | None = None, *, connects: bool = True) -> None:
        super().__init__(reason)
        self.wait, self.connects = wait, connects


class UnreadableError(FailedError):
    """The answer is not what was asked for, such as JSON."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What came back, read to its end."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class Connections:
    """A pool of connections to one server. May be used from several threads."""

    def __init__(self, headers: dict[str, str], *, timeout: float, connections: int) -> None:
        self.timeout = timeout
        self.made = 0  # connections that were ever made
        # a connection that is never given up shows that the server behind it is still the same process
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=None)
        self._client = _client(
            headers={"Accept-Encoding": "identity", "User-Agent": "scoremode", **headers},
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT)),
            limits=limits,
        )
        self._clock = threading.local()  # when the request of this thread must be over
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []

    def exchange(self, method: str, url: str, parts: Parts, content_type: str, largest: int) -> HttpAnswer:
        """The whole answer. FailedError if the same may work later, EngineError if it has more bytes than that."""
        if self._stop.is_set():
            raise StoppedError
        size = sum(len(part) for part in parts)
        self._clock.ends = time.monotonic() + self.timeout + size / UPLOAD
        headers = {"Content-Type": content_type, "Content-Length": str(size)} if parts else {}
        content = _pieces(parts) if parts else None
        try:
            with self._client.stream(
                method, url, content=content, headers=headers, extensions={"trace": self._trace}
            ) as response:
                return HttpAnswer(response.status_code, dict(response.headers), _read(response, url, largest))
        except httpx.ConnectTimeout:
            raise FailedError("no connection in time", connects=False) from None
        except httpx.TimeoutException:
            raise FailedError(TOO_SLOW) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:  # a redirect to a place that cannot be is the latter
            if self._stop.is_set():
                raise StoppedError from None
            connects = not isinstance(error, httpx.ConnectError | httpx.ProxyError | httpx.UnsupportedProtocol)
            raise FailedError(str(error) or type(error).__name__, connects=connects) from None
        except RuntimeError:  # the pool was closed by another thread
            if self._stop.is_set():
                raise StoppedError from None
            raise

    def sleep(self, seconds: float) -> None:
        """Wait; StoppedError if nobody waits for the answer any more."""
        if self._stop.wait(seconds):
            raise StoppedError

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Called by the library at every step of a request: see who connects."""
        if not event.endswith(("connect_tcp.complete", "start_tls.complete")):
            return
        stream = info["return_value"]
        self._limit(stream)
        with self._lock:
            self.made += event.endswith("connect_tcp.complete")
            self._sockets = [s for s in self._sockets if s.fileno() >= 0]
            if isinstance(found := stream.get_extra_info("socket"), socket.socket):
                self._sockets.append(found)

    def _limit(self, stream: Any) -> None:
        """Every read and write of a connection ends when the time of the request is over."""
        read, write = stream.read, stream.write

        def read_in_time(max_bytes: int, timeout: float | None = None) -> Any:
            return read(max_bytes, self._left(timeout))

        def write_in_time(buffer: bytes, timeout: float | None = None) -> None:
            for first in range(0, len(buffer), WRITTEN):
                write(buffer[first : first + WRITTEN], self._left(timeout))

        stream.read, stream.write = read_in_time, write_in_time

    def _left(self, timeout: float | None) -> float:
        left = float(self._clock.ends - time.monotonic())  # a request is answered in the thread that sent it
        if left <= 0:
            raise FailedError(TOO_SLOW)
        return left if timeout is None else min(left, timeout)

    def close(self) -> None:
        """Stop all requests: those that wait for an answer end at once."""
        self._stop.set()
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(Exception):  # other threads may be using it
            self._client.close()


def _pieces(parts: Parts) -> Iterator[bytes]:
    for part in parts:
        for first in range(0, len(part), PIECE):
            yield bytes(part[first : first + PIECE])


def _read(response: httpx.Response, url: str, largest: int) -> bytes:
    """The body as it came. It is never unpacked: a few bytes may unpack to more than all memory."""
    packed = response.headers.get("content-encoding", "identity").strip().lower()
    if packed != "identity":
        raise UnreadableError(f"compressed ({packed[:20]}), which was not asked for")
    found = bytearray()
    for chunk in response.iter_raw():
        found += chunk
        if len(found) > largest:
            raise EngineError(
                f"{url} answers with more than {largest:,} bytes",
                fix="check that this is an inference server that scores prompts",
            )
    return bytes(found)


def _client(**settings: Any) -> httpx.Client:
    """A client without cookies, which a server could make unsendable."""
    trusted = _trusted()
    try:
        client = httpx.Client(follow_redirects=False, verify=trusted, **settings)
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        raise EngineError(
            f"a proxy that the environment names cannot be used ({one_line(str(error))[:200]})",
            fix="correct or unset HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY",
        ) from None
    client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    return client


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for an address, without a user name or password; None if there is none."""
    asked, known = urlsplit(url), getproxies()
    proxy = known.get(asked.scheme) or known.get("all")
    if not proxy or proxy_bypass(asked.hostname or ""):
        return None
    return proxy.rpartition("://")[2].rpartition("@")[2]


@cache
def _trusted() -> ssl.SSLContext:
    """Whom to trust: read once, because it takes a tenth of a second."""
    try:
        return httpx.create_ssl_context()
    except (OSError, ValueError) as error:
        raise EngineError(
            f"the certificates that the environment names cannot be read ({one_line(str(error))[:200]})",
            fix="correct or unset SSL_CERT_FILE and SSL_CERT_DIR",
        ) from None
