"""The address of a server as a user types it, and the key for it."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from scoremode.errors import OptionError

EXAMPLE = "give --engine http://HOST:PORT"
# a name, whose parts have at most 63 characters, or an address of IPv6
HOST = r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?|[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*"


def root_of(address: str) -> str:
    """The address without the version of the API, checked.

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
    if not re.fullmatch(HOST, host) or not re.fullmatch(r"[\w./~%-]*", parts.path):
        raise OptionError("--engine is not a usable address: it names no host", fix=EXAMPLE)
    place = (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    path = parts.path.rstrip("/")
    return f"{parts.scheme.lower()}://{place}{path.removesuffix('/v1')}"


def read_key(variable: str | None) -> str | None:
    """The key in an environment variable. Neither is ever shown: some type the key where its name belongs."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip() if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable) else ""
    if not key:
        raise OptionError(
            "the environment variable that --api-key-env names is not set",
            fix="export it first, and give its name, as in --api-key-env SERVER_KEY",
        )
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise OptionError("the key that --api-key-env names has spaces or unusual characters", fix="export it again")
    return key
