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
from collections.abc import Iterator, Mapping
from typing import Any
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
SPAN = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")


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
    check_answers()
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


# ── its answers ──────────────────────────────────────────────────────────────────────────────────────────────────────
class LargeFile(msgspec.Struct):
    sha256: Sha256 | None = None  # in the list of a repository
    oid: Sha256 | None = None  # in the list of a folder
    size: Size | None = None


class HubFile(msgspec.Struct):
    """A file as the hub lists it, with those of its fields that its client makes names of files from."""

    rfilename: str = ""  # in the list of a repository
    path: str = ""  # in the list of a folder
    size: Size | None = None
    lfs: LargeFile | None = None
    oid: Digest | None = None
    blobId: Digest | None = None  # noqa: N815 - as in the answer
    xetHash: Sha256 | None = None  # noqa: N815

    def __post_init__(self) -> None:
        require_inside(self.rfilename or self.path)


class HubRepository(msgspec.Struct):
    sha: Commit | None = None
    siblings: list[HubFile] | None = None


class HubHeaders(msgspec.Struct):
    commit: Commit | None = msgspec.field(default=None, name="X-Repo-Commit")
    xet: Sha256 | None = msgspec.field(default=None, name="X-Xet-Hash")
    etag: Digest | None = msgspec.field(default=None, name="ETag")
    size: Size | None = msgspec.field(default=None, name="Content-Length")


_sizes: dict[str, int] = {}  # of files, by their addresses, as the hub stated them


def check_answers() -> None:
    """From now on the hub's client refuses answers that could name a file outside its cache, or that never end.

    The client believes them: a commit, a path and an ETag become names of files that it writes.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    factory: Any = _http._GLOBAL_CLIENT_FACTORY  # perhaps the user's own
    if hasattr(factory, "is_checking"):
        return

    def make_client() -> Any:
        client = factory()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks.get("response", ()), _check]}
        return client

    make_client.is_checking = True  # type: ignore[attr-defined]
    set_client_factory(make_client)


def usable_answer(answer: Any, value: Any, form: Any, *, strict: bool = True) -> Any:
    """A value in an answer of the hub as an object of this form; ModelError if it is none."""
    try:
        return msgspec.convert(value, form, strict=strict)
    except ValueError as error:
        raise unusable_answer(answer, re.sub("`str` matching regex '.*'", "a digest", str(error))) from None


def unusable_answer(answer: Any, reason: str) -> ModelError:
    host = answer.request.url.netloc.decode("ascii", "replace")
    return ModelError(f"the hub at {host} gave an unusable answer: {reason}", fix=ADDRESS)


def _check(answer: Any) -> None:
    """Refuses the headers of an answer, or sees to it that its content is checked when it is read."""
    headers, address = answer.headers, str(answer.request.url)
    names = {name: headers.get(name) for name in ("X-Repo-Commit", "X-Xet-Hash")}
    if answer.request.method == "HEAD" and names["X-Repo-Commit"] and answer.status_code < 400:
        tag = headers.get("X-Linked-Etag") or headers.get("ETag")
        length = headers.get("X-Linked-Size") or (None if answer.is_redirect else headers.get("Content-Length"))
        names |= {"ETag": tag and tag.lstrip("W/").strip('"'), "Content-Length": length}
    stated = usable_answer(answer, names, HubHeaders, strict=False)
    if stated.size is not None:
        _sizes[address] = stated.size
        _sizes[str(answer.next_request.url if answer.next_request else address)] = stated.size
    most = _sizes.get(address, 2**63 if "Content-Length" in headers else LARGEST_ANSWER)
    if span := SPAN.fullmatch(answer.request.headers.get("Range", "")):
        most = int(span[2]) - int(span[1]) + 1
    chunks, read = answer.iter_bytes, answer.read

    def read_checked() -> bytes:
        answer.iter_bytes = lambda size=None: _at_most(most if span else LARGEST_ANSWER, chunks(size), answer)
        content: bytes = read()
        if not span and answer.is_success:
            _check_lists(answer)
        return content

    answer.iter_bytes = lambda chunk_size=None: _at_most(most, chunks(chunk_size), answer)
    answer.read = read_checked


def _at_most(most: int, chunks: Iterator[bytes], answer: Any) -> Iterator[bytes]:
    for chunk in chunks:
        most -= len(chunk)
        if most < 0:
            raise unusable_answer(answer, "it sends more than it stated")
        yield chunk


def _check_lists(answer: Any) -> None:
    with contextlib.suppress(ValueError, RecursionError):  # then its client cannot read it either
        value = answer.json()
        if isinstance(value, Mapping) and ("sha" in value or "siblings" in value):
            usable_answer(answer, value, HubRepository)
        elif isinstance(value, list):
            files = [one for one in value if isinstance(one, Mapping) and "path" in one]
            usable_answer(answer, files, list[HubFile])


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
        return any(isinstance(one, kind) for one in causes_of(error))

    for cause in causes_of(error):
        if isinstance(cause, ScoremodeError):  # its answer was refused
            return cause.message, cause.fix
    # the first match counts: a GatedRepoError is also a RepositoryNotFoundError
    known: tuple[tuple[type[Exception], str, str], ...] = (
        (errors.GatedRepoError, "access to it is restricted (a gated repository)", LOGIN),
        (errors.RepositoryNotFoundError, "there is no repository of that name, or it is private", NAME),
        (errors.RevisionNotFoundError, "the repository has no such revision", PAGE),
        (errors.RemoteEntryNotFoundError, "the repository does not have this file", PAGE),
        (errors.HFValidationError, "this is not a valid name on the hub", "give ORGANIZATION/NAME, or a local folder"),
    )
    for kind, reason, fix in known:
        if is_among(kind):
            return reason, fix
    missing = is_among(errors.LocalEntryNotFoundError) or is_among(errors.OfflineModeIsEnabled)
    if missing and constants.HF_HUB_OFFLINE:  # else it was on only because the hub cannot be reached
        return "it is not in the local cache, and offline mode is on", f"unset HF_HUB_OFFLINE, or {FOLDER}"
    status = status_of(error)
    if status is not None:
        return f"the hub answered with HTTP status {status}", f"try again later, or {FOLDER}"
    # recognised by the names of classes, because the client's HTTP library has changed over time
    names = {kind.__name__ for one in causes_of(error) for kind in type(one).__mro__}
    if names & {"ConnectionError", "TimeoutError", "TransportError", "LocalEntryNotFoundError"}:
        return "the hub cannot be reached", f"check the network and HF_ENDPOINT, or {FOLDER}"
    if isinstance(error, TypeError | LookupError | AttributeError | AssertionError | json.JSONDecodeError):
        return f"its answer cannot be used ({type(error).__name__}: {one_line(str(error))[:200]})", ADDRESS
    settings = "HF_TOKEN, HF_HOME, HTTPS_PROXY and HF_ENDPOINT"
    return f"{type(error).__name__}: {one_line(str(error))[:200]}", f"check the name and {settings}, or {FOLDER}"


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
    found = (getattr(getattr(one, "response", None), "status_code", None) for one in causes_of(error))
    return next((status for status in found if isinstance(status, int)), None)
