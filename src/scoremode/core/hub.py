"""The Hugging Face hub: can it be reached, can its answers be used, and why did it not give a file?

Clients of the hub and of buckets try again for up to a minute; here is one attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any, TypedDict
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from scoremode.core.strict_json import Commit, Digest, Sha256, Size, require_inside
from scoremode.errors import ModelError, ScoremodeError, one_line

HUB = "https://huggingface.co"
SECONDS = 1.5  # for looking up the name and connecting: a command without a network answers within 3
OFFLINE = ("huggingface_hub.constants", "datasets.config")  # modules with a setting HF_HUB_OFFLINE
PORTS = {"https": 443, "http": 80}
LOGIN = "accept its terms on its page, then log in with: hf auth login (or set HF_TOKEN)"
NAME = "check the name, give a local folder, or log in with: hf auth login"
PAGE = "check its page on the hub"
FOLDER = "give a local folder"
LARGEST_ANSWER = 256 << 20  # bytes of an answer that says no length
ADDRESS = f"check HF_ENDPOINT, or {FOLDER}"


def hub_is_reachable() -> bool:
    return is_reachable(os.environ.get("HF_ENDPOINT") or HUB)


def is_reachable(address: str) -> bool:
    """Does a server, or the proxy in front of it, accept a connection? One attempt, within a few seconds."""
    server = urlsplit(address)
    proxy = getproxies().get(server.scheme)
    endpoint = urlsplit(proxy) if proxy and not proxy_bypass(server.hostname or "") else server
    return accepts_connections(endpoint.hostname or "", endpoint.port or PORTS.get(endpoint.scheme, 443))


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
    check_answers()
    if _is_true(os.environ.get("HF_HUB_OFFLINE")) or hub_is_reachable():  # in offline mode the client says so itself
        yield True
        return
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"  # for modules that are imported in the block
    changed: list[Any] = [sys.modules[name] for name in OFFLINE if sys.modules.get(name) is not None]
    settings = [client.HF_HUB_OFFLINE for client in changed]
    for client in changed:
        client.HF_HUB_OFFLINE = True
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


# ── its answers ──────────────────────────────────────────────────────────────────────────────────────────────────────
class LargeFile(msgspec.Struct):
    sha256: Sha256 | None = None  # in the list of a repository
    oid: Sha256 | None = None  # in the list of a folder


class HubFile(msgspec.Struct):
    rfilename: str = ""  # in the list of a repository
    path: str = ""  # in the list of a folder
    size: Size | None = None
    lfs: LargeFile | None = None

    def __post_init__(self) -> None:
        require_inside(self.rfilename or self.path)


class HubRepository(msgspec.Struct):
    sha: Commit | None = None
    siblings: list[HubFile] | None = None


HubHeaders = TypedDict("HubHeaders", {"X-Repo-Commit": Commit | None, "ETag": Digest | None, "size": Size | None})
FILES = (200, 206)  # with these, an answer is a file or a part of it
CHECKS = "checks_answers"  # the mark of our factory of clients
_sizes: dict[str, int | None] = {}  # of files, by their addresses, as the hub stated them


def check_answers() -> None:
    """From now on the hub's client refuses answers that could name a file outside its cache, or that never end.

    The client itself believes them: a commit, a path and an ETag become names of files that it writes.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    factory: Any = _http._GLOBAL_CLIENT_FACTORY  # perhaps the user's own

    def make_client() -> Any:
        client = factory()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks.get("response", ()), _check]}
        return client

    if not hasattr(factory, CHECKS):
        setattr(make_client, CHECKS, True)
        set_client_factory(make_client)


def _require(form: Any, value: Any, answer: Any) -> None:
    try:
        msgspec.convert(value, form, strict=form is not HubHeaders)
    except ValueError as error:
        raise _unusable(answer, re.sub("`str` matching regex '.*'", "a digest", str(error))) from None


def _unusable(answer: Any, reason: str) -> ModelError:
    host = answer.request.url.netloc.decode("ascii", "replace")
    return ModelError(f"the hub at {host} gave an unusable answer: {reason}", fix=ADDRESS)


def _check(answer: Any) -> None:
    """Refuses headers that could name other files, and has the content checked when it is read."""
    headers, address, read = answer.headers, str(answer.request.url), answer.read
    if commit := headers.get("X-Repo-Commit"):
        tag = headers.get("X-Linked-Etag") or headers.get("ETag") if answer.request.method == "HEAD" else None
        size = headers.get("X-Linked-Size") or (None if answer.is_redirect else headers.get("Content-Length"))
        tag = tag.lstrip("W/").strip('"') if tag and answer.status_code < 400 else None
        _require(HubHeaders, {"X-Repo-Commit": commit, "ETag": tag, "size": size}, answer)
        if answer.request.method == "HEAD":
            target = answer.request.url.join(headers["Location"]) if answer.is_redirect else address
            _sizes[address] = _sizes[str(target)] = int(size) if size else None

    def read_checked() -> bytes:
        _stop_at(answer, LARGEST_ANSWER)
        content: bytes = read()
        if answer.is_success and "/api/" in address:  # else it is a file, whatever is in it
            _check_lists(answer)
        return content

    stated = _sizes.get(address) if answer.status_code in FILES else None  # else it says why there is no file
    _stop_at(answer, stated or (2**63 if "Content-Length" in headers else LARGEST_ANSWER))
    answer.read = read_checked


def _stop_at(answer: Any, most: int) -> None:
    chunks = answer.iter_bytes

    def limited(chunk_size: int | None = None) -> Iterator[bytes]:
        left = most
        for chunk in chunks(chunk_size):
            left -= len(chunk)
            if left < 0:
                raise _unusable(answer, "it sends more than it stated")
            yield chunk

    answer.iter_bytes = limited


def _check_lists(answer: Any) -> None:
    with contextlib.suppress(ValueError, RecursionError):  # then its client cannot read it either
        value = answer.json()
        if isinstance(value, dict) and value.keys() & {"sha", "siblings"}:
            _require(HubRepository, value, answer)
        elif isinstance(value, list):
            _require(list[HubFile], [entry for entry in value if isinstance(entry, dict) and "path" in entry], answer)


# ── its client ───────────────────────────────────────────────────────────────────────────────────────────────────────
@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Lets the hub's client print only errors inside the block; restores its verbosity afterwards."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def explain_hub_error(error: Exception) -> tuple[str, str]:
    """What went wrong and what to do about it, for any error that the hub's client raises."""
    from huggingface_hub import constants, errors

    def is_among(kind: type[Exception]) -> bool:
        return any(isinstance(cause, kind) for cause in causes_of(error))

    if refused := [cause for cause in causes_of(error) if isinstance(cause, ScoremodeError)]:
        return refused[0].message, refused[0].fix
    # the first match counts: a GatedRepoError is also a RepositoryNotFoundError
    reasons: tuple[tuple[type[Exception], str, str], ...] = (
        (errors.GatedRepoError, "access to it is restricted (a gated repository)", LOGIN),
        (errors.RepositoryNotFoundError, "there is no repository of that name, or it is private", NAME),
        (errors.RevisionNotFoundError, "the repository has no such revision", PAGE),
        (errors.RemoteEntryNotFoundError, "the repository does not have this file", PAGE),
        (errors.HFValidationError, "this is not a valid name on the hub", "give ORGANIZATION/NAME, or a local folder"),
    )
    for kind, reason, fix in reasons:
        if is_among(kind):
            return reason, fix
    missing = is_among(errors.LocalEntryNotFoundError) or is_among(errors.OfflineModeIsEnabled)
    if missing and constants.HF_HUB_OFFLINE:  # else it was on only because the hub cannot be reached
        return "it is not in the local cache, and offline mode is on", f"unset HF_HUB_OFFLINE, or {FOLDER}"
    status = status_of(error)
    if status is not None:
        return f"the hub answered with HTTP status {status}", f"try again later, or {FOLDER}"
    # recognised by the names of classes, because the client's HTTP library has changed over time
    names = {kind.__name__ for cause in causes_of(error) for kind in type(cause).__mro__}
    if names & {"ConnectionError", "TimeoutError", "TransportError", "LocalEntryNotFoundError"}:
        return "the hub cannot be reached", f"check the network and HF_ENDPOINT, or {FOLDER}"
    description = f"{type(error).__name__}: {one_line(str(error))[:200]}"
    is_unreadable = isinstance(error, TypeError | LookupError | AttributeError | AssertionError | json.JSONDecodeError)
    settings = "HF_TOKEN, HF_HOME, HTTPS_PROXY and HF_ENDPOINT"
    unusual = (description, f"check the name and {settings}, or {FOLDER}")
    return (f"its answer cannot be used ({description})", ADDRESS) if is_unreadable else unusual


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, then its causes, the innermost last."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or cause.__context__


def status_of(error: BaseException) -> int | None:
    """The HTTP status in an error or in its causes."""
    statuses = (getattr(getattr(cause, "response", None), "status_code", None) for cause in causes_of(error))
    return next((status for status in statuses if isinstance(status, int)), None)
