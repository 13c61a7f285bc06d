"""Checks the key and the speed of every request, also on vLLM's own routes. Named with vLLM's flag ``--middleware``.

vLLM itself requires the key only under /v1 and a few other paths. Here every request needs it, except for health.
Clients that send almost nothing or do not read are disconnected, so that nobody occupies the server's connections:

headers     60 s from the start of the connection, or from the previous answer
body        60 s without a byte; and 60 s in total, plus a second for each 64 KiB received
answer      60 s in which the client reads none of it, or of a long answer less than a MiB
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import Collection, Sequence
from typing import Any

KEYS = "SCOREMODE_SERVICE_KEYS"  # SHA-256 of each key, so that no command line has the keys themselves
OPEN = ("/health", "/ping")  # these paths only say whether the server is up
SECONDS = 60.0
RATE = 64 << 10  # bytes per second
PROGRESS = 1 << 20  # bytes
LOOKS = 12  # checks of all connections per SECONDS


def digest_of(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def accepted_keys(args: Any) -> list[str]:
    """Returns the digests of all keys: those of ``scoremode serve``, and those that vLLM found itself."""
    ours = [digest for digest in os.environ.get(KEYS, "").split(",") if digest]
    theirs = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    return ours + [digest_of(key.encode()) for key in theirs if key]


def is_allowed(headers: Sequence[tuple[bytes, bytes]], keys: Sequence[str]) -> bool:
    """Does a request have one of the keys? The duration of the check reveals nothing about the keys."""
    given = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, key = given.partition(b" ")
    found = digest_of(key)
    return scheme.lower() == b"bearer" and sum(secrets.compare_digest(found, known) for known in keys) > 0


class Access:
    """The outermost layer of vLLM's application. Refuses requests that have no key or come too slowly."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._keys: list[str] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            # vLLM's server has a list of its connections, and is stored in the state of the application
            if (server := getattr(scope["app"].state, "server", None)) is not None:
                self._watching = asyncio.create_task(ConnectionWatch(server.server_state.connections).run())
            await self.app(scope, receive, send)
            return
        if self._keys is None:
            self._keys = accepted_keys(scope["app"].state.args)
        if self._keys and not _is_open(scope) and not is_allowed(scope["headers"], self._keys):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await refuse(send, 401, "the key is missing or wrong; send Authorization: Bearer KEY")
        elif scope["type"] == "http":
            await self._in_time(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _in_time(self, scope: Any, receive: Any, send: Any) -> None:
        body, started = TimedBody(receive), False

        async def send_unless_late(message: Any) -> None:
            nonlocal started
            if not body.is_late:
                started = True
                await send(message)

        try:
            await self.app(scope, body.receive, send_unless_late)
        except Exception:
            if not body.is_late:  # a late body makes the application fail, as it should
                raise
        if body.is_late and not started:
            await refuse(send, 408, "the request came too slowly; send it again, faster")


def _is_open(scope: Any) -> bool:
    """May this request come without a key? Health may, and a CORS preflight, which has no key and reaches no route."""
    if scope["type"] == "http" and scope["method"] == "OPTIONS":
        return any(name == b"access-control-request-method" for name, _ in scope["headers"])
    return scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) in OPEN


async def refuse(send: Any, status: int, message: str) -> None:
    """Answers with one line and closes the connection without reading more of the request."""
    body = json.dumps({"error": {"message": message, "type": "Refused", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# ── slow clients ─────────────────────────────────────────────────────────────────────────────────────────────────────
class TimedBody:
    """The body of a request, for the application. If it comes too slowly, the client counts as disconnected."""

    def __init__(self, receive: Any) -> None:
        self._receive, self._waited, self._came = receive, 0.0, 0
        self._is_whole = self.is_late = False

    async def receive(self) -> Any:
        if self.is_late:
            return {"type": "http.disconnect"}
        if self._is_whole:  # the next message is the end of the connection, however late
            return await self._receive()
        loop = asyncio.get_running_loop()
        began = loop.time()
        left = SECONDS + self._came / RATE - self._waited  # time in which the application is busy does not count
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


class ConnectionWatch:
    """Checks the connections of a uvicorn server regularly, and ends those that wait too long for their client."""

    def __init__(self, connections: Collection[Any]) -> None:
        self.connections = connections
        self._waits: dict[Any, tuple[Any, float]] = {}  # connection -> what it waits for, and since when

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SECONDS / LOOKS)
            self.look(asyncio.get_running_loop().time())

    def look(self, now: float) -> None:
        before, self._waits = self._waits, {}
        for connection in [c for c in self.connections if hasattr(c, "cycle")]:  # other connections are not HTTP
            waits = _waits_for(connection)
            if waits is None:
                continue
            same, since = before.get(connection, (None, now))
            since = since if same == waits else now
            self._waits[connection] = waits, since
            if now - since >= SECONDS:
                connection.transport.abort()


def _waits_for(connection: Any) -> tuple[str, int] | None:
    """Returns what a connection waits for, as a value that changes on progress of the client; None: for the server."""
    cycle, unread = connection.cycle, connection.transport.get_write_buffer_size()
    if unread:  # a few bytes of a long answer are not progress
        return "answer", unread if unread < PROGRESS else -(unread // PROGRESS)
    if cycle is None or cycle.response_complete:
        return "headers", id(cycle)
    return None
