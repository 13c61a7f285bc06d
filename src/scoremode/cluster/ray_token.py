"""Ray's token: with it, strangers on the network cannot run code in a cluster.

Ray writes the token of a cluster of its own into the home folder, and from then on takes it for every cluster that it
finds there. One that was started before, without a token, then loses each replica at once. So a Ray of ours has its
token in the environment alone, and what Ray set for one cluster is put back before the next.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from typing import Any

NAMES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
Settings = dict[str, str | None]

WRONG_TOKEN = "the cluster was started without Ray's token, and this process uses one: set RAY_AUTH_MODE=disabled"


def give_one() -> None:
    """Sets a new token for a Ray that starts now, unless the user has settings of their own."""
    if not any(settings().values()):
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        _read_again()


def settings() -> Settings:
    return {name: os.environ.get(name) for name in NAMES}


def put_back(before: Settings) -> None:
    """Restores the settings from before a cluster was joined."""
    if settings() == before:
        return
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _read_again()


def is_wrong(words: str) -> bool:
    """Whether this is how Ray says that the cluster cannot talk to a driver that asks for a token."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token" and "all references to the actor" in words


def _read_again() -> None:
    """Ray keeps these settings in C++ from their first use on."""
    with contextlib.suppress(ImportError, AttributeError):
        inside: Any = importlib.import_module("ray._raylet")
        inside.Config.initialize("")
        inside.AuthenticationTokenLoader.instance().reset_cache()
