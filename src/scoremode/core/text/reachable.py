"""Can a server be reached? Clients of the hub and of buckets try again for up to a minute; here is one attempt."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

HUB = "https://huggingface.co"
SECONDS = 2.5  # for looking up the name and connecting
OFFLINE = ("huggingface_hub.constants", "datasets.config")  # modules with a setting HF_HUB_OFFLINE
PORTS = {"https": 443, "http": 80}


def hub_is_reachable() -> bool:
    return is_reachable(os.environ.get("HF_ENDPOINT") or HUB)


def is_reachable(address: str) -> bool:
    """Does a server, or the proxy in front of it, accept a connection? One attempt, within a few seconds."""
    server = urlsplit(address)
    proxy = getproxies().get(server.scheme)
    asked = urlsplit(proxy) if proxy and not proxy_bypass(server.hostname or "") else server
    return accepts_connections(asked.hostname or "", asked.port or PORTS.get(asked.scheme, 443))


def accepts_connections(host: str, port: int) -> bool:
    """Can a connection be opened, within a few seconds? Looking up a name may hang, so this is done in a thread."""
    opened = []

    def connect() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            socket.create_connection((host, port), timeout=SECONDS).close()
            opened.append(True)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return bool(opened)


def _is_true(variable: str | None) -> bool:
    """Does an environment variable of the hub's client switch something on?"""
    return (variable or "").upper() in ("1", "ON", "YES", "TRUE")


@contextlib.contextmanager
def offline_if_unreachable() -> Iterator[bool]:
    """Inside the block, clients of the hub use what is in their caches if the hub cannot be reached.

    Yields whether it can. ``datasets`` must be imported inside the block or before.
    """
    if _is_true(os.environ.get("HF_HUB_OFFLINE")) or hub_is_reachable():  # in offline mode the client says so itself
        yield True
        return
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"  # for modules that are imported in the block
    changed: list[Any] = [sys.modules[name] for name in OFFLINE if sys.modules.get(name) is not None]
    settings = [one.HF_HUB_OFFLINE for one in changed]
    for one in changed:
        one.HF_HUB_OFFLINE = True
    try:
        yield False
    finally:
        os.environ.pop("HF_HUB_OFFLINE")
        if before is not None:
            os.environ["HF_HUB_OFFLINE"] = before
        for name in OFFLINE:  # modules that were imported in the block have read the variable
            module: Any = sys.modules.get(name)
            if module is not None:
                module.HF_HUB_OFFLINE = settings[changed.index(module)] if module in changed else _is_true(before)
