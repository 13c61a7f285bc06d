"""Bodies of requests: read whole, but never more than a request may have, nor more than all may have together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from scoremode.errors import InputError
from scoremode.service.limits import BusyError, TooLargeError


def declared_length(request: Any) -> int | None:
    """``Content-Length``; None if the client does not say."""
    said = request.headers.get("content-length")
    if said is None:
        return None
    if not said.isdecimal() or len(said) > 15:
        raise InputError("Content-Length is not a number", fix="send the number of bytes")
    return int(said)


class Bodies:
    """The bytes of all requests that are being answered."""

    def __init__(self, most_each: int, most_together: int) -> None:
        self.most_each, self.most_together, self.held = most_each, most_together, 0

    @asynccontextmanager
    async def of(self, request: Any) -> AsyncIterator[bytes]:
        """The body of a request; its bytes count until it is answered."""
        held = 0
        try:
            declared = declared_length(request)
            if declared is not None:
                self._require_room(declared, declared)
            body = bytearray()
            async for chunk in request.stream():
                self._require_room(len(chunk), len(body) + len(chunk))
                body += chunk
                self.held += len(chunk)
                held += len(chunk)  # what came, not what was declared: who sends nothing takes nobody's room
            yield bytes(body)
        finally:
            self.held -= held

    def _require_room(self, more: int, size: int) -> None:
        if size > self.most_each:
            raise TooLargeError(f"a request has more than {self.most_each} bytes", fix="send several requests")
        if self.held and self.held + more > self.most_together:
            raise BusyError("the server holds as many requests as it takes", fix="try again in a moment")
