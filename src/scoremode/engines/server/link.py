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
from typing import Any

from scoremode.engines.messages import Parts
from scoremode.engines.server.exchange import Connections, FailedError, HttpAnswer, UnreadableError, proxy_for
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

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON object in a good answer; an empty one if the answer is anything else."""
        return self.value if self.good and isinstance(self.value, dict) else {}


class Link(Connections):
    """Requests to one server. May be used from several threads."""

    def __init__(self, root: str, key: str | None, *, timeout: float, patience: float, connections: int = 1) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        super().__init__(headers, timeout=timeout, connections=connections)
        self.root, self.patience = root, patience
        self._key = key
        proxy = proxy_for(root)
        self._through = f" through the proxy {proxy}" if proxy else ""
        self._told = False  # was it said that the server does not answer?

    def __repr__(self) -> str:
        return f"Link({self.root})"

    def get(self, path: str, **how: Any) -> Reply:
        return self.ask("GET", path, **how)

    def post(self, path: str, body: Mapping[str, Any] | Parts, **how: Any) -> Reply:
        return self.ask("POST", path, body, **how)

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | Parts | None = None,
        *,
        largest: int = SMALL,
        first_contact: bool = False,
        final: frozenset[int] = frozenset(),
        binary: bool = False,
    ) -> Reply:
        """The answer to a request, tried again for as long as our patience lasts.

        A mapping is sent as JSON, parts as a message of scoremode. ``first_contact``: a server that cannot be reached
        is an error at once. ``final``: statuses that are answers. ``binary``: a good answer is bytes instead of JSON.
        """
        kind, parts = (CONTENT_TYPE, body) if isinstance(body, list) else ("application/json", [])
        if isinstance(body, Mapping):
            parts = [json.dumps(body).encode()]
        began, tries, unreadable = time.monotonic(), 0, 0
        while True:
            try:
                answer = self.exchange(method, self.root + path, parts, kind, largest)
                raw = binary and answer.status < 300
                reply = Reply(answer.status, None, "", answer.data) if raw else self._read_json(answer, path, final)
                self._told = False
                return reply
            except FailedError as failure:
                tries += 1
                reason = self._harmless(str(failure))
                unreadable += isinstance(failure, UnreadableError)
                if first_contact and not failure.connects:
                    fix = "start the server, or check the address"
                    if self._through:
                        fix += (
                            " and the proxy: HTTP_PROXY, HTTPS_PROXY or ALL_PROXY name it, NO_PROXY=HOST does without"
                        )
                    raise EngineError(f"nothing answers at {self.root}{self._through} ({reason})", fix=fix) from None
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
                f"{'tries' if tries > 1 else 'try'}{self._through} ({reason}{asked})",
                fix="see to the server, then run the same command again: what is scored is kept; "
                "--patience SECONDS waits longer",
            ) from None
        if tries == TELLS_AFTER and not self._told:
            self._told = True
            LOG.warning("%s does not answer (%s); trying again for up to %.0f s", self.root, reason, left)
        self.sleep(delay)

    def _read_json(self, answer: HttpAnswer, path: str, final: frozenset[int]) -> Reply:
        """The reply in an answer; FailedError if another try may get a better one."""
        status, data, value, words, wrong = answer.status, answer.data, None, "", ""
        try:
            value = parse_received(data)
        except ValueError as error:
            wrong = str(error) if type(error) is ValueError and len(str(error)) < 60 else NOT_JSON
        if status >= 400:
            words = self._harmless(_message(value) or data[: 2 * EXCERPT].decode("utf-8", "replace"))
        if status in (401, 403) and path.startswith(("/v1", "/tokenize", "/detokenize")):
            what = "wants a key" if self._key is None else "refuses the key"
            raise OptionError(
                f"{self.root} {what} ({status}{': ' + words if words else ''})",
                fix="put the key in an environment variable and give its name with --api-key-env NAME",
            )
        if status in final:
            return Reply(status, value, words, wrong=wrong)
        if 300 <= status < 400:
            place = self._harmless(answer.headers.get("location", "")) or "another place"
            raise EngineError(
                f"{self.root}{path} redirects to {place}, which is not followed",
                fix="give the address that it redirects to",
            )
        if status in PASSING or status >= 500:
            said = f"{status} {PASSING.get(status, '')} {words}"
            raise FailedError(" ".join(said.split()), _retry_after(answer.headers.get("retry-after")))
        if value is None and status < 400:
            begins = self._harmless(data[:40].decode("utf-8", "replace"))
            raise UnreadableError(f"{wrong or 'nothing in it'}: {begins!r}" if data else "an empty answer")
        return Reply(status, value, words, wrong=wrong)

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
