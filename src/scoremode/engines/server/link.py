"""HTTP to one server: bounded answers in a bounded time, and failures that pass are waited for.

An answer is not trusted: it is cut off where it is too long, must be strict JSON, and is shown only in harmless
characters and without the key. Redirects are not followed, so the key goes to no other host.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn

from scoremode.engines.heads import Parts
from scoremode.engines.server.exchange import (
    Answer,
    Connections,
    EndlessError,
    FailedError,
    Message,
    UnreadableError,
)
from scoremode.errors import EngineError, OptionError, one_line
from scoremode.scores.packing import CONTENT_TYPE
from scoremode.strict_json import parse_received

PASSING = {408: "it waited too long", 425: "it was too early", 429: "it is busy"}
"""Status codes after which the same request may succeed later; all from 500 on may, too."""

FIRST_DELAY, LONGEST_DELAY = 0.5, 15.0  # seconds between two tries
SMALL = 1 << 20  # bytes of an answer that is not about tokens
UNREADABLE_TRIES = 3
NOT_JSON = "not JSON"
EXCERPT = 240  # characters of an answer that are shown
TELLS_AFTER = 3  # tries, then a user is told
ANYTHING = frozenset(range(200, 600))  # every status is an answer: for what a server need not have
LOG = logging.getLogger("scoremode")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that will not change if the request is sent again."""

    status: int
    value: Any  # parsed; None if it is not JSON
    words: str  # what an error says, harmless and without the key
    data: bytes = b""  # as it came, where bytes were asked for
    wrong: str = ""  # why it could not be parsed

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300


class Link:
    """Requests to one server. May be used from several threads."""

    def __init__(self, root: str, key: str | None, *, timeout: float, patience: float, connections: int = 1) -> None:
        self.root, self.patience = root, patience
        self._key = key
        self._connections = Connections(
            {} if key is None else {"Authorization": f"Bearer {key}"}, timeout=timeout, connections=connections
        )
        self._told = False  # was it said that the server does not answer?

    @property
    def connected(self) -> int:
        """Connections that were ever made."""
        return self._connections.made

    def close(self) -> None:
        """Stop all requests: those that wait for an answer end at once."""
        self._connections.close()

    def __repr__(self) -> str:
        return f"Link({self.root})"

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def get(self, path: str, **how: Any) -> Reply:
        return self.ask("GET", path, None, **how)

    def post(self, path: str, body: Mapping[str, Any], **how: Any) -> Reply:
        return self.ask("POST", path, body, **how)

    def send(self, method: str, path: str, parts: Parts, *, largest: int = SMALL, binary: bool = True) -> Reply:
        """As ``ask``, with a message as the body. A good answer is bytes if ``binary``, else JSON."""
        return self._ask(method, path, Message(parts), largest, frozenset(), binary=binary)

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
        content: bytes | Message | None,
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
                reason = self._harmless(str(failure))
                unreadable += isinstance(failure, UnreadableError)
                if first_contact and not failure.connects:
                    raise EngineError(
                        f"nothing answers at {self.root} ({reason})", fix="start the server, or check the address"
                    ) from None
                if unreadable >= UNREADABLE_TRIES:
                    raise EngineError(
                        f"{self.root}{path} does not answer as an inference server does ({reason})",
                        fix="check the address",
                    ) from None
                self._wait(failure.wait, reason, tries, began)

    def _wait(self, wait: float | None, reason: str, tries: int, began: float) -> None:
        """Sleep until the next try, or give up."""
        if wait is None:
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(tries - 1, 10)) * random.uniform(0.75, 1.0)
        else:  # as the server asks, and not all clients at once; who asks for next to nothing still gets a pause
            delay = max(FIRST_DELAY, wait) * random.uniform(1.0, 1.25)
        left = self.patience - (time.monotonic() - began)
        if delay > left:
            asked = f", which asks to wait {wait:.0f} s" if wait is not None else ""
            raise EngineError(
                f"{self.root} gave no answer for {time.monotonic() - began:.0f} s in {tries} "
                f"{'tries' if tries > 1 else 'try'} ({reason}{asked})",
                fix="see to the server, then run the same command again: what is scored is kept; "
                "--patience SECONDS waits longer",
            ) from None
        if tries == TELLS_AFTER and not self._told:
            self._told = True
            LOG.warning("%s does not answer (%s); trying again for up to %.0f s", self.root, reason, left)
        self._connections.sleep(delay)

    def _once(
        self,
        method: str,
        path: str,
        content: bytes | Message | None,
        largest: int,
        *,
        final: frozenset[int],
        binary: bool,
    ) -> Reply:
        headers = {} if content is None else {"Content-Type": "application/json"}
        if isinstance(content, Message):
            headers = {"Content-Type": CONTENT_TYPE, "Content-Length": str(content.size)}
        try:
            answer = self._connections.exchange(method, self.root + path, content, headers, largest)
        except EndlessError:
            raise EngineError(
                f"{self.root}{path} answers with more than {largest:,} bytes",
                fix="check that this is an inference server that scores prompts",
            ) from None
        if binary and answer.status < 300:
            return Reply(answer.status, None, "", answer.data)
        return self._reply(answer, path, final)

    def _reply(self, answer: Answer, path: str, final: frozenset[int]) -> Reply:
        status, data, value, words, wrong = answer.status, answer.data, None, "", ""
        try:
            value = parse_received(data)
        except ValueError as error:
            wrong = str(error) if type(error) is ValueError and len(str(error)) < 60 else NOT_JSON
        if status >= 400:
            words = self._harmless(_message(value) or data[: 2 * EXCERPT].decode("utf-8", "replace"))
        if status in (401, 403) and path.startswith(("/v1", "/tokenize", "/detokenize")):
            self._no_entry(status, words)
        if 300 <= status < 400 and status not in final:
            there = self._harmless(answer.headers.get("location", ""))
            raise EngineError(
                f"{self.root}{path} redirects to {there or 'another place'}, which is not followed",
                fix="give the address that it redirects to",
            )
        if (status in PASSING or status >= 500) and status not in final:
            said = f"{status} {PASSING.get(status, '')} {words}"
            raise FailedError(" ".join(said.split()), _retry_after(answer.headers.get("retry-after")))
        if value is None and status < 400 and status not in final:
            begins = self._harmless(data[:40].decode("utf-8", "replace"))
            raise UnreadableError(f"{wrong or 'nothing in it'}: {begins!r}" if data else "an empty answer")
        return Reply(status, value, words, wrong=wrong)

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
    """Seconds that a server asks us to wait, given as a number or as a date; None if it asks for no wait at all."""
    if text is None:
        return None
    if text.strip().isdecimal() and len(text.strip()) < 10:
        return float(text) or None
    try:
        then = parsedate_to_datetime(text)
        then = then if then.tzinfo is not None else then.replace(tzinfo=UTC)
        seconds = (then - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return seconds if seconds > 0 else None
