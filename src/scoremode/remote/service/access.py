"""Checks the key of every request, also on vLLM's own routes. Named with vLLM's flag ``--middleware``.

vLLM itself requires the key only under /v1 and a few other paths. Here every request needs it, except for health.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from typing import Any

KEYS = "SCOREMODE_SERVICE_KEYS"  # SHA-256 of each key, so that no command line has the keys themselves
OPEN = ("/health", "/ping")  # these paths only say whether the server is up


def digest_of(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def accepted_keys() -> list[str]:
    """Returns the digests of all keys: those of ``scoremode serve``, and the one in vLLM's own variable."""
    ours = [digest for digest in os.environ.get(KEYS, "").split(",") if digest]
    theirs = os.environ.get("VLLM_API_KEY")
    return [*ours, digest_of(theirs.encode())] if theirs else ours


def is_allowed(headers: Sequence[tuple[bytes, bytes]], keys: Sequence[str]) -> bool:
    """Does a request have one of the keys? The duration of the check reveals nothing about the keys."""
    authorization = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, key = authorization.partition(b" ")
    digest = digest_of(key)
    return scheme.lower() == b"bearer" and sum(secrets.compare_digest(digest, key_digest) for key_digest in keys) > 0


class Access:
    """The outermost layer of vLLM's application. Refuses requests that have no key."""

    def __init__(self, app: Any) -> None:
        self.app, self._keys = app, accepted_keys()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_open = scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) in OPEN
        if scope["type"] == "lifespan" or is_open or not self._keys or is_allowed(scope["headers"], self._keys):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            from starlette.responses import JSONResponse

            # the connection is closed without reading more of the request
            message = "the key is missing or wrong; send Authorization: Bearer KEY"
            body = {"error": {"message": message, "type": "Refused", "code": 401}}
            await JSONResponse(body, 401, {"connection": "close"})(scope, receive, send)
