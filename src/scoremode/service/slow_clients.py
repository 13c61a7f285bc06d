"""Clients that send next to nothing, or do not read: they are let go, so that nobody holds the server's connections.

headers     60 s from the connection, or from the answer before
body        60 s without a byte; and 60 s in all, with a second more for each 64 KiB that came
answer      60 s in which the client reads nothing of it; of a long one, less than a MiB
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

SECONDS = 60.0
RATE = 64 << 10  # bytes a second
PROGRESS = 1 << 20  # bytes
LOOKS = 12  # times in that many seconds that connections are looked at


class TimedBody:
    """The body of a request, for the application. If it comes too slowly, the client counts as gone."""

    def __init__(self, receive: Any) -> None:
        self._receive, self._waited, self._came = receive, 0.0, 0
        self._is_whole = self.is_late = False

    async def receive(self) -> Any:
        if self.is_late:
            return {"type": "http.disconnect"}
        if self._is_whole:  # what comes now is the end of the connection, however late
            return await self._receive()
        loop = asyncio.get_running_loop()
        began = loop.time()
        left = SECONDS + self._came / RATE - self._waited  # while the application does something else, nobody waits
        try:
            async with asyncio.timeout(min(SECONDS, left)):
                message = await self._receive()
        except TimeoutError:
            self.is_late = True
            return {"type": "http.disconnect"}
        self._waited += loop.time() - began
        self._came += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        return message


class Watch:
    """Looks at the connections of a uvicorn server again and again, and ends those that wait for their client."""

    def __init__(self, connections: Collection[Any]) -> None:
        self.connections = connections
        self._waits: dict[Any, tuple[Any, float]] = {}  # connection -> what it waits for, and since when

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SECONDS / LOOKS)
            self.look(asyncio.get_running_loop().time())

    def look(self, now: float) -> None:
        before, self._waits = self._waits, {}
        for connection in [c for c in self.connections if hasattr(c, "cycle")]:  # others are no HTTP
            waits = _waits_for(connection)
            if waits is None:
                continue
            same, since = before.get(connection, (None, now))
            since = since if same == waits else now
            self._waits[connection] = waits, since
            if now - since >= SECONDS:
                connection.transport.abort()


def _waits_for(connection: Any) -> tuple[str, int] | None:
    """What a connection waits for, as a value that changes when the client does its part; None: for the server."""
    cycle, unread = connection.cycle, connection.transport.get_write_buffer_size()
    if unread:  # of a long answer, a few bytes are no progress
        return "answer", unread if unread < PROGRESS else -(unread // PROGRESS)
    if cycle is None or cycle.response_complete:
        return "headers", id(cycle)
    return None
