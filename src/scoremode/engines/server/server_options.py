"""How a server is asked: the options of the engine, the address as a user types it, and the key for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from scoremode.core.engine.options import Options, option
from scoremode.core.engine.plugin import Capabilities
from scoremode.errors import OptionError

PLAIN = Capabilities(replicas=True)
SERVICE = Capabilities(rank=True, entropy=True, top=True, any_target=True, replicas=True, scores_only=True)
CONCURRENCY = 32
SERVICE_CONCURRENCY = 8  # requests of many windows
TIMEOUT = 600.0
PATIENCE = 300.0
EXAMPLE = "give --engine http://HOST:PORT"
# a name, whose parts have at most 63 characters, or an address of IPv6
HOST = r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?|[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*"
PATH = r"([A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*"  # RFC 3986


@dataclass(frozen=True, slots=True)
class ServerOptions(Options):
    """How requests are sent to a server. This does not change the answers, so it is no part of a run's identity."""

    api_key_env: str | None = option(
        "environment variable that holds the server's API key; the key itself is never typed or kept",
        metavar="NAME",
        in_identity=False,
        may_vary=False,
    )
    concurrency: int | None = option(
        f"requests at a time (default: {CONCURRENCY}; {SERVICE_CONCURRENCY} of many windows to a scoring service)",
        metavar="N",
        above=0,
        at_most=1024,
        in_identity=False,
    )
    timeout: float | None = option(
        f"seconds to wait for one answer (default: {TIMEOUT:g})",
        metavar="SECONDS",
        above=0,
        at_most=86_400,
        in_identity=False,
        may_vary=False,
    )
    patience: float | None = option(
        f"seconds that a request is tried again when the server is busy, fails or is gone (default: {PATIENCE:g}); "
        "if given, also waits for a server that is starting",
        metavar="SECONDS",
        above=0,
        at_most=86_400,
        in_identity=False,
        may_vary=False,
    )


def root_of(address: str) -> str:
    """Checks an address and removes the version of the API from its end.

    >>> root_of("http://localhost:8000/v1/"), root_of("https://gate.example/team")
    ('http://localhost:8000', 'https://gate.example/team')
    """
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        raise OptionError("--engine is not a usable address: its host or port is wrong", fix=EXAMPLE) from None
    if parts.username is not None or parts.password is not None:
        raise OptionError(
            "--engine contains a user name or password", fix="leave it out; --api-key-env NAME gives a key"
        )
    if parts.query or parts.fragment:
        raise OptionError("--engine has something behind a ? or #", fix=EXAMPLE)
    host = parts.hostname or ""
    if not re.fullmatch(HOST, host):
        raise OptionError("--engine is not a usable address: it names no host", fix=EXAMPLE)
    if not re.fullmatch(PATH, parts.path):
        raise OptionError("--engine is not a usable address: its path must be percent-encoded", fix=EXAMPLE)
    place = (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    path = parts.path.rstrip("/")
    return f"{parts.scheme.lower()}://{place}{path.removesuffix('/v1')}"
