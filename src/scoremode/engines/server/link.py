"""Sends HTTP requests to one server, limits the size and time of answers, and retries after failures that may pass.

Answers are not trusted: reading stops at a size limit, an answer must be strict JSON, and its text is shown only in
harmless characters and without the key. Redirects are not followed, so the key is sent to no other host.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import httpx
import msgspec

from scoremode.core.scores.messages import CONTENT_TYPE
from scoremode.core.strict_json import parse_received
from scoremode.errors import EngineError, OptionError, one_line

PASSING = {408: "it waited too long", 425: "it was too early", 429: "it is busy"}
"""Status codes after which the same request may succeed later; so may all codes from 500 on."""

FIRST_DELAY, LONGEST_DELAY = 0.5, 15.0  # seconds between two tries
LONG_ANSWER = 1 << 14  # bytes
SMALL = 1 << 20  # bytes; the size limit of answers without data about tokens
UNREADABLE_TRIES = 3
NOT_JSON = "not JSON"
EXCERPT = 240  # characters of an answer that are shown
TELLS_AFTER = 3  # failed tries before the user is told
ANYTHING = frozenset(range(200, 600))  # accepts every status as an answer, for routes that a server need not have
CONNECT = 30.0  # most seconds to connect
TOO_SLOW = "no answer in time; --timeout SECONDS waits longer"
LOG = logging.getLogger("scoremode")


class StoppedError(Exception):
    """The link was closed, so nobody waits for this answer any more."""


class FailedError(Exception):
    """One try failed, and a later one may succeed."""

    def __init__(self, reason: str, wait: float | None = None, *, connects: bool = True) -> None:
        super().__init__(reason)
        self.wait, self.connects = wait, connects


class UnreadableError(FailedError):
    """The answer does not have the requested format, such as JSON."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that will not change if the request is sent again."""

    status: int
    value: Any  # the parsed JSON, or the bytes that were asked for; None if the answer is not JSON
    words: str = ""  # the server's error message, harmless and without the key
    wrong: str = ""  # why the answer could not be parsed

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON object in a good answer; an empty one if the answer is anything else."""
        return self.value if self.good and isinstance(self.value, dict) else {}


class Link:
    """Sends requests to one server, through a pool of connections. May be used from several threads."""

    def __init__(self, root: str, key: str | None, *, timeout: float, patience: float, connections: int = 1) -> None:
        self.root, self.timeout, self.patience, self._key = root, timeout, patience, key
        self.made = 0  # connections made so far
        headers = {"Accept-Encoding": "identity", "User-Agent": "scoremode"}
        self._client = _client(
            headers=headers if key is None else {**headers, "Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT)),
            # connections stay open: an open one shows that the server behind it is still the same process
            limits=httpx.Limits(
                max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=None
            ),
        )
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._told = False  # was the user told that the server does not answer?

    def __repr__(self) -> str:
        return f"Link({self.root})"

    def get(self, path: str, **how: Any) -> Reply:
        return self.ask("GET", path, **how)

    def post(self, path: str, body: Mapping[str, Any] | bytes, **how: Any) -> Reply:
        return self.ask("POST", path, body, **how)

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        largest: int = SMALL,
        first_contact: bool = False,
        final: frozenset[int] = frozenset(),
        answer: Any = Any,
    ) -> Reply:
        """Sends a request until it succeeds or ``patience`` seconds have passed; returns the answer.

        A mapping is sent as JSON, bytes as a message of scoremode. With ``first_contact``, a server that
        cannot be reached is an error at once. Answers with a status in ``final`` are returned at once, even errors.
        A good answer is read as the type ``answer`` if it fits: JSON, but for ``bytes``.
        """
        kind = CONTENT_TYPE if isinstance(body, bytes) else "application/json"
        content = json.dumps(body).encode() if isinstance(body, Mapping) else body
        began, tries, unreadable = time.monotonic(), 0, 0
        while True:
            try:
                status, headers, data = self._exchange(method, self.root + path, content, kind, largest)
                if answer is bytes and status < 300:
                    reply = Reply(status, data)
                else:
                    reply = self._read_json(status, headers, data, path, final=final, answer=answer)
                self._told = False
                return reply
            except FailedError as failure:
                tries += 1
                reason = self._harmless(str(failure))
                unreadable += isinstance(failure, UnreadableError)
                if first_contact and not failure.connects:
                    raise EngineError(
                        f"nothing answers at {self.root} ({reason})",
                        fix="start the server, or check the address and the proxy that the environment names; "
                        "--patience SECONDS waits for a server that is starting",
                    ) from None
                if unreadable >= UNREADABLE_TRIES:
                    raise EngineError(
                        f"{self.root}{path} does not answer as an inference server does ({reason})",
                        fix="check the address",
                    ) from None
                self._wait(failure.wait, reason, tries, began)

    def _wait(self, wait: float | None, reason: str, tries: int, began: float) -> None:
        """Sleeps until the next try; raises an error if ``patience`` would be exceeded."""
        if wait is None:
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(tries - 1, 10)) * random.uniform(0.75, 1.0)
        else:  # the time that the server names, plus a random part to spread the clients, and at least FIRST_DELAY
            delay = max(FIRST_DELAY, wait) * random.uniform(1.0, 1.25)
        left = self.patience - (time.monotonic() - began)
        if delay > left:
            hint = f", which asks to wait {wait:.0f} s" if wait is not None else ""
            raise EngineError(
                f"{self.root} gave no answer for {time.monotonic() - began:.0f} s in {tries} "
                f"{'tries' if tries > 1 else 'try'} ({reason}{hint})",
                fix="see to the server, then run the same command again: what is scored is kept; "
                "--patience SECONDS waits longer",
            ) from None
        if tries == TELLS_AFTER and not self._told:
            self._told = True
            LOG.warning("%s does not answer (%s); trying again for up to %.0f s", self.root, reason, left)
        if self._stop.wait(delay):
            raise StoppedError

    def _read_json(
        self, status: int, headers: Mapping[str, str], data: bytes, path: str, *, final: frozenset[int], answer: Any
    ) -> Reply:
        """Reads a JSON answer; raises FailedError if another try may get a better answer."""
        value, message, wrong = None, "", ""
        try:
            value = _parsed(data, answer if status < 300 else Any)
        except ValueError as error:
            wrong = str(error) if type(error) is ValueError and len(str(error)) < 60 else NOT_JSON
        if status >= 400:
            message = self._harmless(_message(value) or data[: 2 * EXCERPT].decode("utf-8", "replace"))
        if status in (401, 403) and path.startswith(("/v1", "/tokenize", "/detokenize", "/generate")):
            refusal = "wants a key" if self._key is None else "refuses the key"
            raise OptionError(
                f"{self.root} {refusal} ({status}{': ' + message if message else ''})",
                fix="put the key in an environment variable and give its name with --api-key-env NAME",
            )
        if status in final:
            return Reply(status, value, message, wrong=wrong)
        if 300 <= status < 400:
            place = self._harmless(headers.get("location", "")) or "another place"
            raise EngineError(
                f"{self.root}{path} redirects to {place}, which is not followed",
                fix="give the address that it redirects to",
            )
        if status in PASSING or status >= 500:
            reason, delay = f"{status} {PASSING.get(status, '')} {message}", headers.get("retry-after", "").strip()
            wait = float(delay) if delay.isdecimal() and len(delay) < 10 else 0.0
            raise FailedError(" ".join(reason.split()), wait or None)
        if value is None and status < 400:
            begins = self._harmless(data[:40].decode("utf-8", "replace"))
            raise UnreadableError(f"{wrong or 'nothing in it'}: {begins!r}" if data else "an empty answer")
        return Reply(status, value, message, wrong=wrong)

    def _harmless(self, text: str) -> str:
        """Makes a server's words safe to show: on one line, harmless to a terminal, and without the key."""
        if self._key is not None:
            text = text.replace(self._key, "(not shown)")
        text = " ".join(one_line(text).split())
        return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}…"

    # ── one request and its answer ───────────────────────────────────────────────────────────────────────────────────
    def _exchange(
        self, method: str, url: str, content: bytes | None, content_type: str, largest: int
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Sends a request once; returns the status, the headers and the whole body of the answer.

        Raises FailedError if the same request may work later, EngineError if the body has more than ``largest`` bytes.
        """
        headers = {} if content is None else {"Content-Type": content_type}
        try:
            if self._stop.is_set():
                raise StoppedError
            with self._client.stream(
                method, url, content=content, headers=headers, extensions={"trace": self._count}
            ) as response:
                return response.status_code, response.headers, self._body(response, url, largest)
        except httpx.ConnectTimeout:
            raise FailedError("no connection in time", connects=False) from None
        except httpx.TimeoutException:
            raise FailedError(TOO_SLOW) from None
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
            # InvalidURL: a redirect to an impossible address; RuntimeError: the pool was closed by another thread
            if self._stop.is_set():
                raise StoppedError from None
            if isinstance(error, RuntimeError):
                raise
            connects = not isinstance(error, httpx.ConnectError | httpx.ProxyError | httpx.UnsupportedProtocol)
            raise FailedError(str(error) or type(error).__name__, connects=connects) from None

    def _body(self, response: httpx.Response, url: str, largest: int) -> bytes:
        """Reads the body of an answer. A compressed body is refused: a few bytes may unpack to more than all memory."""
        packed = response.headers.get("content-encoding", "identity").strip().lower()
        if packed != "identity":
            raise UnreadableError(f"compressed ({packed[:20]}), which was not asked for")
        body, ends = bytearray(), time.monotonic() + self.timeout  # httpx limits the time of each read, not of all
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > largest:
                raise EngineError(
                    f"{url} answers with more than {largest:,} bytes",
                    fix="check that this is an inference server that scores prompts",
                )
            if time.monotonic() > ends:
                raise FailedError(TOO_SLOW)
        return bytes(body)

    def _count(self, event: str, _: Mapping[str, Any]) -> None:
        """Counts new connections. httpx calls it at every step of a request."""
        with self._lock:  # a connection that is not counted would hide another server behind it
            self.made += event.endswith("connect_tcp.complete")

    def close(self) -> None:
        """Stops all requests."""
        self._stop.set()
        with contextlib.suppress(Exception):  # other threads may be using the client
            self._client.close()


def _message(value: Any) -> str:
    """Returns the error message in a server's answer if it is in one of the usual places, else an empty string."""
    if isinstance(value, dict):
        inner = value.get("error", value)
        for place in (inner, value):
            for name in ("message", "detail", "error"):
                if isinstance(place, dict) and isinstance(place.get(name), str):
                    return str(place[name])
    return ""


def _client(**settings: Any) -> httpx.Client:
    """Returns an HTTP client that stores no cookies, because a server could set a cookie that cannot be sent."""
    try:
        client = httpx.Client(follow_redirects=False, verify=_trusted(), **settings)
    except (OSError, ValueError, ImportError, httpx.InvalidURL) as error:
        raise EngineError(
            f"a proxy or certificates that the environment names cannot be used ({one_line(str(error))[:200]})",
            fix="correct or unset HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, SSL_CERT_FILE and SSL_CERT_DIR",
        ) from None
    client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
    return client


@cache
def _trusted() -> ssl.SSLContext:
    """Returns the certificates to trust. They are read only once, because reading takes a tenth of a second."""
    return httpx.create_ssl_context()


def _parsed(data: bytes, answer: Any) -> Any:
    """Parses an answer. One of a known type, or a long one, is scores, whose form checks every value: much faster."""
    if answer is not Any or len(data) > LONG_ANSWER:
        with contextlib.suppress(ValueError, RecursionError):  # else parse_received says why it cannot be read
            return msgspec.json.decode(data, type=answer)
    return parse_received(data)
