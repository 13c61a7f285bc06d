"""The options of the server engine."""

from __future__ import annotations

from dataclasses import dataclass

from scoremode.engines.options import Options, option
from scoremode.engines.plugin import Capabilities

PLAIN = Capabilities(replicas=True)
SERVICE = Capabilities(rank=True, entropy=True, top=True, any_target=True, divergence=True, replicas=True)
CONCURRENCY = 32
SERVICE_CONCURRENCY = 8  # requests of many windows
TIMEOUT = 600.0
PATIENCE = 300.0


@dataclass(frozen=True, slots=True)
class ServerOptions(Options):
    """How a server is asked. None of this decides what it answers, so none of it is part of a run's identity."""

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
        f"seconds that a request is tried again when the server is busy, fails or is gone (default: {PATIENCE:g})",
        metavar="SECONDS",
        above=0,
        at_most=86_400,
        in_identity=False,
        may_vary=False,
    )
