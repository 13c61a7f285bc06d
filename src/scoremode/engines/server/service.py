"""A server that is a scoring service: what it says of itself, and whether it is still the same."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from types import UnionType
from typing import Any

import msgspec
import numpy as np

from scoremode.engines.server.address import root_of
from scoremode.engines.server.link import ANYTHING, NOT_JSON, Link
from scoremode.engines.server.probe import UNCHANGED, distance
from scoremode.errors import EngineError, ScoremodeError, harmless
from scoremode.scores.packing import VERSION
from scoremode.scores.schema import BUILT_IN, Column

ROOT = "/v1/scoremode"
SECONDS = 10.0  # to wait for a first word
BUSY = 503
TRIES = 8  # requests that may reach another of several servers


@dataclass(frozen=True, slots=True)
class Service:
    """What a service says of itself."""

    instance: str
    dtype: str
    device: str
    head: str
    vocabulary: int
    max_model_len: int
    batch_tokens: int
    divergence: bool
    versions: dict[str, str]
    settings: dict[str, Any]
    notes: tuple[str, ...]
    probe: tuple[float, ...]  # scores of a fixed prompt
    body_bytes: int
    windows: int
    columns: tuple[Column, ...] = ()  # that it measures beside the built-in ones

    def identity(self) -> dict[str, Any]:
        """What decides its numbers, but for the weights."""
        names = ("dtype", "device", "head", "vocabulary", "max_model_len", "versions", "settings")
        return {name: getattr(self, name) for name in names}


def find_service(link: Link) -> Service | None:
    """The service behind a link; None if the server is another one."""
    value = _description(link)
    version = value.get("messages")
    if version is None:
        return None
    if version != VERSION:
        raise EngineError(
            f"the service at {link.root} speaks version {harmless(str(version))[:20]}, and this is version {VERSION}",
            fix="use one version of scoremode on both sides",
        )
    try:
        return _read(value)
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as wrong:
        raise _wrong(link, harmless(str(wrong))[:80]) from None


def _description(link: Link) -> dict[str, Any]:
    """What the server says of itself; nothing if it is no service."""
    reply = link.get(ROOT, final=ANYTHING - {BUSY})
    if reply.good and reply.wrong not in ("", NOT_JSON):  # JSON, and yet not to be used
        raise _wrong(link, reply.wrong)
    return reply.value if reply.good and isinstance(reply.value, dict) else {}


def _wrong(link: Link, why: str) -> EngineError:
    return EngineError(
        f"{link.root}{ROOT} does not say what a service must say ({why})",
        fix="use one version of scoremode on both sides",
    )


def _read(value: dict[str, Any]) -> Service:
    texts: dict[str, Any] = {
        name: harmless(_of(value[name], str))[:200] for name in ("instance", "dtype", "device", "head")
    }
    numbers: dict[str, Any] = {name: _count(value[name]) for name in ("vocabulary", "max_model_len", "batch_tokens")}
    limits = _of(value["limits"], dict)
    columns = msgspec.convert(value.get("columns", ()), tuple[Column, ...])
    return Service(
        **texts,
        **numbers,
        divergence=_of(value["divergence"], bool),
        versions={harmless(k)[:80]: harmless(_of(v, str))[:80] for k, v in _of(value["versions"], dict).items()},
        settings={harmless(k)[:80]: _plain(v) for k, v in _of(value["settings"], dict).items()},
        notes=tuple(harmless(_of(note, str))[:500] for note in _of(value["notes"], list)),
        probe=tuple(float(_of(x, int | float)) for x in _of(value["probe"], list)),
        body_bytes=_count(limits["body_bytes"]),
        windows=_count(limits["windows"]),
        columns=BUILT_IN.extended(columns).declared,
    )


def _of(value: Any, kind: type | UnionType) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"not a {getattr(kind, '__name__', 'number')}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 < value < 1 << 48:
        raise ValueError("not a number above 0")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return harmless(value)[:500]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError("not a plain value")


def is_service(address: str) -> bool | None:
    """Is there a service at an address? None if it does not say without a key, or does not answer."""
    try:
        link = Link(root_of(address), None, timeout=SECONDS, patience=0.0)
        with contextlib.closing(link):
            return "messages" in _description(link)
    except ScoremodeError:
        return None


class SameService:
    """Every answer names the server that gave it. One that is new must say and score what the first one did."""

    def __init__(self, link: Link, first: Service) -> None:
        self.link, self.first = link, first
        self._known = {first.instance}
        self._lock = threading.Lock()

    def confirm(self, instance: str) -> None:
        """Require that this instance is the service that the run began with, or one just like it."""
        with self._lock:
            for _ in range(TRIES):
                if instance in self._known:
                    return
                now = find_service(self.link)
                if now is None:
                    raise self._changed("it is no scoring service any more")
                self._require_same(now)
                self._known.add(now.instance)
        raise self._changed("an answer came from a server that is not found again")

    def _require_same(self, now: Service) -> None:
        before, after = self.first.identity(), now.identity()
        for name, value in before.items():
            if after[name] != value:
                raise self._changed(f"its {name} was {str(value)[:200]} and is {str(after[name])[:200]}")
        ours, theirs = np.array(self.first.probe), np.array(now.probe)
        moved = distance(ours, theirs) if ours.shape == theirs.shape else float("inf")
        if not moved <= UNCHANGED:
            raise self._changed(f"it gives other scores than before (by {moved:.2g} nats a token on a probe)")

    def _changed(self, why: str) -> EngineError:
        return EngineError(
            f"{self.link.root} changed: {why}",
            fix="start the server as it was and run the same command again to resume; "
            "a run of the server as it is now begins with --fresh or in another --out",
        )
