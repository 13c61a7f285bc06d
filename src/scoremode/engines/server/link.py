"""HTTP to one server: one pool of connections, bounded answers, failures that pass are waited for.

An answer is not trusted: it is cut off where it is too long, must be JSON, and is shown only in harmless characters and
without the key. Redirects are not followed, so the key goes to no other host.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, NoReturn

import httpx

from scoremode.engines.messages import CONTENT_TYPE, Parts, size_of
from scoremode.errors import EngineError, OptionError, one_line

PASSING = {408: "it waited too long", 425: "it was too early", 429: "it is busy"}
"""Status codes after which the same request may succeed later; all from 500 on may, too."""

FIRST_DELAY, LONGEST_DELAY = 0.5, 15.0  # seconds between two tries
SMALL = 1 << 20  # bytes of an answer that is not about tokens
PIECE = 1 << 20  # bytes of a message that are sent at a time
UNREADABLE_TRIES = 3
EXCERPT = 240  # characters of an answer that are shown
TELLS_AFTER = 3  # tries, then a user is told
ANYTHING = frozenset(range(200, 600))  # every status is an answer: for what a server need not have
LOG = logging.getLogger("scoremode")


class StoppedError(Exception):
    """Nobody waits for this answer any more."""


class FailedError(Exception):
    """One try failed in a way that may pass."""

    def __init__(self, reason: str, wait: float | None = None, *, connects: bool = True) -> None:
        super().__init__(reason)
        self.wait, self.connects = wait, connects


class UnreadableError(FailedError):
    """The answer is not JSON."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that will not change if the request is sent again."""

    status: int
    value: Any  # parsed; None if it is not JSON
    words: str  # what an error says, harmless and without the key
    data: bytes = b""  # as it came, where bytes were asked for

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300


class Link:
    """Requests to one server. May be used from several threads."""

    def __init__(self, root: str, key: str | None, *, timeout: float, patience: float, connections: int = 1) -> None:
        self.root, self.patience = root, patience
        self._key = key
        headers = {"Accept-Encoding": "identity", "User-Agent": "scoremode"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 30.0)),
            # a connection that is never given up shows that the server behind it is still the same process
            limits=httpx.Limits(
                max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=None
            ),
            follow_redirects=False,
            verify=_trusted(),
        )
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self.connected = 0  # connections that were ever made
        self._told = False  # was it said that the server does not answer?

    def __repr__(self) -> str:
        return f"Link({self.root})"

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def get(self, path: str, **how: Any) -> Reply:
        return self.ask("GET", path, None, **how)

    def post(self, path: str, body: Mapping[str, Any], **how: Any) -> Reply:
        return self.ask("POST", path, body, **how)

    def send(self, method: str, path: str, parts: Parts, *, largest: int = SMALL, binary: bool = True) -> Reply:
        """As ``ask``, with a message as the body. A good answer is bytes if ``binary``, else JSON."""
        return self._ask(method, path, _Message(parts), largest, frozenset(), binary=binary)

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        largest: int = SMALL,
        first_contact: bool = False,
        final: frozenset[int] = frozenset(),
    ) -> Reply:
        """The answer to a request, tried again for as long as our patience lasts.

        ``first_contact``: a server that cannot be reached is an error at once. ``final``: statuses that are answers.
        """
        content = None if body is None else json.dumps(body).encode()
        return self._ask(method, path, content, largest, final, first_contact=first_contact)

    def _ask(
        self,
        method: str,
        path: str,
        content: bytes | _Message | None,
        largest: int,
        final: frozenset[int],
        *,
        first_contact: bool = False,
        binary: bool = False,
    ) -> Reply:
        began, tries, unreadable = time.monotonic(), 0, 0
        while True:
            try:
                reply = self._once(method, path, content, largest, final=final, binary=binary)
                self._told = False
                return reply
            except FailedError as failure:
                tries += 1
                unreadable += isinstance(failure, UnreadableError)
                if first_contact and not failure.connects:
                    raise EngineError(
                        f"nothing answers at {self.root} ({failure})", fix="start the server, or check the address"
                    ) from None
                if unreadable >= UNREADABLE_TRIES:
                    raise EngineError(
                        f"{self.root}{path} does not answer as an inference server does ({failure})",
                        fix="check the address",
                    ) from None
                self._wait(failure, tries, began)

    def _wait(self, failure: FailedError, tries: int, began: float) -> None:
        """Sleep until the next try, or give up."""
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(tries - 1, 10)) * random.uniform(0.75, 1.0)
        delay = delay if failure.wait is None else failure.wait
        left = self.patience - (time.monotonic() - began)
        if delay > left:
            asked = f", which asks to wait {failure.wait:.0f} s" if failure.wait is not None else ""
            raise EngineError(
                f"{self.root} gave no answer for {time.monotonic() - began:.0f} s in {tries} "
                f"{'tries' if tries > 1 else 'try'} ({failure}{asked})",
                fix="see to the server, then run the same command again: what is scored is kept; "
                "--patience SECONDS waits longer",
            ) from None
        if tries == TELLS_AFTER and not self._told:
            self._told = True
            LOG.warning("%s does not answer (%s); trying again for up to %.0f s", self.root, failure, left)
        if self._stop.wait(delay):
            raise StoppedError

    def _once(
        self,
        method: str,
        path: str,
        content: bytes | _Message | None,
        largest: int,
        *,
        final: frozenset[int],
        binary: bool,
    ) -> Reply:
        if self._stop.is_set():
            raise StoppedError
        headers = {} if content is None else {"Content-Type": "application/json"}
        if isinstance(content, _Message):
            headers = {"Content-Type": CONTENT_TYPE, "Content-Length": str(content.size)}
        try:
            with self._client.stream(
                method, self.root + path, content=content, headers=headers, extensions={"trace": self._trace}
            ) as response:
                data = self._read(response, path, largest)
                if binary and response.status_code < 300:
                    return Reply(response.status_code, None, "", data)
                return self._reply(response, data, path, final)
        except httpx.ConnectTimeout:
            raise FailedError("no connection in time", connects=False) from None
        except httpx.TimeoutException:
            raise FailedError("no answer in time; --timeout SECONDS waits longer") from None
        except httpx.TransportError as error:
            if self._stop.is_set():
                raise StoppedError from None
            connects = not isinstance(error, httpx.ConnectError | httpx.ProxyError | httpx.UnsupportedProtocol)
            raise FailedError(self._harmless(str(error)) or type(error).__name__, connects=connects) from None
        except RuntimeError:  # the pool was closed by another thread
            if self._stop.is_set():
                raise StoppedError from None
            raise

    def _read(self, response: httpx.Response, path: str, largest: int) -> bytes:
        found = bytearray()
        for chunk in response.iter_bytes():
            found += chunk
            if len(found) > largest:
                raise EngineError(
                    f"{self.root}{path} answers with more than {largest:,} bytes",
                    fix="check that this is an inference server that scores prompts",
                )
        return bytes(found)

    def _reply(self, response: httpx.Response, data: bytes, path: str, final: frozenset[int]) -> Reply:
        status = response.status_code
        value, words = self._parsed(data), ""
        if status >= 400:
            words = self._harmless(_message(value) or data[: 2 * EXCERPT].decode("utf-8", "replace"))
        if status in (401, 403) and path.startswith(("/v1", "/tokenize", "/detokenize")):
            self._no_entry(status, words)
        if 300 <= status < 400 and status not in final:
            there = self._harmless(response.headers.get("location", ""))
            raise EngineError(
                f"{self.root}{path} redirects to {there or 'another place'}, which is not followed",
                fix="give the address that it redirects to",
            )
        if (status in PASSING or status >= 500) and status not in final:
            said = f"{status} {PASSING.get(status, '')} {words}"
            raise FailedError(" ".join(said.split()), _retry_after(response.headers.get("retry-after")))
        if value is None and status < 400 and status not in final:
            begins = self._harmless(data[:40].decode("utf-8", "replace"))
            raise UnreadableError(f"not JSON: {begins!r}" if data else "an empty answer")
        return Reply(status, value, words)

    def _parsed(self, data: bytes) -> Any:
        try:
            return json.loads(data.decode(), parse_constant=_no_number)
        except (ValueError, RecursionError):
            return None

    def _no_entry(self, status: int, words: str) -> NoReturn:
        what = "wants a key" if self._key is None else "refuses the key"
        raise OptionError(
            f"{self.root} {what} ({status}{': ' + words if words else ''})",
            fix="put the key in an environment variable and give its name with --api-key-env NAME",
        )

    def _harmless(self, text: str) -> str:
        """Words of a server: one line, harmless to a terminal, and never with the key."""
        if self._key is not None:
            text = text.replace(self._key, "(not shown)")
        text = " ".join(one_line(text).split())
        return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}…"

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────
    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event not in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            return
        stream = info.get("return_value")
        found = stream.get_extra_info("socket") if stream is not None else None
        with self._lock:
            self.connected += event == "connection.connect_tcp.complete"
            self._sockets = [s for s in self._sockets if s.fileno() >= 0]
            if isinstance(found, socket.socket):
                self._sockets.append(found)

    def close(self) -> None:
        """Stop all requests: those that wait for an answer end at once."""
        self._stop.set()
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(Exception):  # other threads may be using it
            self._client.close()


@cache
def _trusted() -> ssl.SSLContext:
    """Whom to trust: read once, because it takes a tenth of a second."""
    return httpx.create_ssl_context()


class _Message:
    """A body that is sent piece by piece, as often as it is tried."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.size = parts, size_of(parts)

    def __iter__(self) -> Iterator[bytes]:
        for part in self.parts:
            for first in range(0, len(part), PIECE):
                yield bytes(part[first : first + PIECE])


def _message(value: Any) -> str:
    """The message of an error, where the server sends one in a usual place."""
    if isinstance(value, dict):
        inner = value.get("error", value)
        for place in (inner, value):
            for name in ("message", "detail", "error"):
                if isinstance(place, dict) and isinstance(place.get(name), str):
                    return str(place[name])
    return ""


def _retry_after(text: str | None) -> float | None:
    """Seconds that a server asks us to wait, given as a number or as a date."""
    if text is None:
        return None
    if text.strip().isdecimal() and len(text.strip()) < 10:
        return float(text)
    try:
        then = parsedate_to_datetime(text)
        then = then if then.tzinfo is not None else then.replace(tzinfo=UTC)
        return max(0.0, (then - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, IndexError):
        return None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
