"""The files of a place: listed, read, written whole, removed, all by fsspec and its packages (s3fs, gcsfs, …).

Requests that fail are tried again by the library of each file system, and by nobody else. Credentials come from the
usual chains (for the hub: a login, or HF_TOKEN); nothing here takes or keeps one. On object stores a file has its name
only when it is complete; nothing else relies on that, because a run's manifest comes last and has its files' hashes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from scoremode.core.arguments import SERVERS
from scoremode.core.disk.uri import RemotePath
from scoremode.core.hub import check_answers, explain_hub_error, hub_is_reachable, status_of
from scoremode.core.installation import pip_install
from scoremode.errors import InputError, ScoremodeError, StorageError, did_you_mean, one_line

ATTEMPTS = 2  # of one request, by botocore; s3fs makes five of this
CONNECT_SECONDS, READ_SECONDS = 5.0, 15.0  # without a connection, without a byte
REQUEST_SECONDS = 600.0  # for a whole answer over HTTP
NO_FOLDERS = ("s3", "gs", "hf")  # they are parts of names, or come with the first file
CONDITIONAL = ("s3", "gs", "memory")  # the mode "xb" is a conditional write of the store
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}  # extras of scoremode
VERSIONS = ("mtime", "created", "ETag", "etag", "sha256", "oid", "blob_id", "LastModified", "Last-Modified")
CHECK = "check the URI, the network, the credentials and what they may do"
LOGIN = "check the name; log in with hf auth login, or set HF_TOKEN to a token that may"
SECRET = re.compile(r"(?i)((?:access|secret|session|sas|account)[\w-]*(?:key|token|id|signature)?[\"']?\s*[=:]\s*)\S+")


# ── file systems ─────────────────────────────────────────────────────────────────────────────────────────────────────
def file_system(place: RemotePath) -> Any:
    """fsspec's file system of a place. Nothing is asked of a server yet, except whether the hub is up."""
    # HF_ENDPOINT may name another hub; its client would read that only when it is imported
    hub = os.environ.get("HF_ENDPOINT") if place.scheme == "hf" else None
    return _opened(place.scheme, place.root, place.settings, hub or None)


@cache
def _opened(scheme: str, root: str, settings: tuple[tuple[str, str], ...], hub: str | None) -> Any:
    try:
        if scheme == "hf":
            return _hub(hub)
        import fsspec
        from fsspec.registry import known_implementations

        if scheme not in (*known_implementations, *fsspec.available_protocols()):
            fix = did_you_mean(scheme, ["s3", "gs", "hf", "file", "memory", "hdfs", "abfs", "sftp", *SERVERS])
            raise InputError(f"scoremode does not know the scheme {scheme}://", fix=fix)
        kind = fsspec.get_filesystem_class(scheme)
        host_and_port = kind._get_kwargs_from_urls(f"{scheme}://{root}")
        return kind(**host_and_port, **_options(scheme, dict(settings)), skip_instance_cache=True)
    except ScoremodeError:
        raise
    except Exception as error:  # a library raises whatever it likes, also for a package that is not installed
        reason, fix = _words(error), "check the host, or use another URI"
        if isinstance(error, ImportError) and scheme in PACKAGES:
            reason, fix = f"the package '{PACKAGES[scheme]}' is not installed", pip_install(scheme)
        raise StorageError(f"{scheme}:// cannot be used here: {reason}", fix=fix) from None


os.register_at_fork(after_in_child=_opened.cache_clear)  # most file systems have a thread, which a fork loses


def _options(scheme: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """What fsspec's class of a file system is given for the settings of a URI, and for patience."""
    is_anonymous, address = settings.get("anonymous") == "true", settings.get("endpoint_override")
    url = address if address is None or "://" in address else f"{settings.get('scheme', 'https')}://{address}"
    if scheme == "s3":
        retries = {"total_max_attempts": ATTEMPTS, "mode": "standard"}
        patience = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": retries}
        region = {"region_name": settings["region"]} if "region" in settings else {}
        return {"anon": is_anonymous, "endpoint_url": url, "client_kwargs": region, "config_kwargs": patience}
    if scheme == "gs":
        return {"token": "anon" if is_anonymous else None, "endpoint_url": url}
    if scheme in SERVERS:
        from aiohttp import ClientTimeout

        limits = ClientTimeout(total=REQUEST_SECONDS, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        return {"client_kwargs": {"timeout": limits}}
    return {}


def _hub(endpoint: str | None) -> Any:
    from huggingface_hub import HfFileSystem
    from huggingface_hub.utils import disable_progress_bars

    if not hub_is_reachable():  # its client would try for half a minute
        fix = "check the network and HF_ENDPOINT"
        raise StorageError("hf:// cannot be used here: the hub cannot be reached", fix=fix)
    check_answers()
    disable_progress_bars()  # they would mix with ours
    return HfFileSystem(endpoint=endpoint, skip_instance_cache=True)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class MissingError(StorageError):
    """There is no such file, folder or bucket."""


class Objects:
    """The files in a folder elsewhere, by names relative to it."""

    def __init__(self, place: RemotePath) -> None:
        self.place, self._fs = place, file_system(place)

    @contextmanager
    def _doing(self, action: str, name: str = "") -> Iterator[str]:
        """Gives the path of a file. Errors become StorageErrors; ``action`` completes "cannot …", as in "be read"."""
        place = self.place / name if name else self.place
        folder = str(self._fs._strip_protocol(f"{place.scheme}://{self.place.path}"))  # most have no host in it
        try:
            self._fs.invalidate_cache()  # others may have changed something
            yield f"{folder}/{name}" if name else folder
        except ScoremodeError:
            raise
        except Exception as error:  # each file system of fsspec raises its own kinds
            raise _refusal(place, action, error) from None

    # ── look ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def listed(self, *, deep: bool = False) -> dict[str, bool]:
        """The names in the folder, sorted, each with whether it is a folder; none if there is no such folder."""
        entries = dict[str, bool]()
        with suppress(MissingError), self._doing("be listed") as path:
            for info in self._entries(path, deep=deep):
                entries[info["name"][len(path) :].strip("/")] = info["type"] == "directory"
        return dict(sorted(entries.items()))

    def _entries(self, path: str, *, deep: bool) -> Iterator[dict[str, Any]]:
        # not fsspec's own walk, which leaves out folders that it cannot read
        for info in self._fs.ls(path, detail=True):
            if info["name"].rstrip("/") != path:
                yield info
                if deep and info["type"] == "directory":
                    yield from self._entries(info["name"], deep=True)

    def _info(self, name: str) -> dict[str, Any] | None:
        with suppress(MissingError), self._doing("be read", name) as path:
            return dict(self._fs.info(path))
        return None

    def is_folder(self, name: str = "") -> bool | None:
        """Is there a folder of that name? None if there is nothing, False if there is a file."""
        info = self._info(name)
        return None if info is None else info["type"] == "directory"

    def version(self, name: str = "") -> str | None:
        """Everything that a server tells about a file's content without sending it; None if there is no such file."""
        info = self._info(name)
        if info is None or info["type"] == "directory":
            return None
        return f"{info['size'] or 0}|{[str(info.get(key)) for key in VERSIONS]}"

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def read(self, name: str, *, most: int) -> bytes | None:
        """The content of a small file, at most ``most`` bytes of it; None if there is no such file."""
        with suppress(MissingError), self._doing("be read", name) as path, self._fs.open(path) as file:
            return bytes(file.read(most))
        return None

    def fetch(self, name: str, to: Path) -> None:
        """Copies a file. The caller checks the result: the file may have been changed at the other end meanwhile."""
        with self._doing("be read", name) as path:
            self._fs.get_file(path, str(to))

    # ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def write(self, name: str, data: bytes) -> None:
        self._put(name, BytesIO(data))

    def send(self, name: str, path: Path) -> None:
        with path.open("rb") as file:
            self._put(name, file)

    def _put(self, name: str, file: IO[bytes]) -> None:
        with self._doing("be written", name) as path:
            if self.place.scheme not in NO_FOLDERS:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._fs.open(path, "wb") as stream:
                shutil.copyfileobj(file, stream, 1 << 22)

    def create(self, name: str, data: bytes) -> bool:
        """Writes a small file unless there is one of that name; returns whether it was written.

        Without a conditional write of the store, two processes at once may both be told that they wrote it.
        """
        if self.place.scheme not in CONDITIONAL:
            if self.is_folder(name) is not None:
                return False
            self.write(name, data)
            return True
        with self._doing("be written", name) as path:
            try:
                with self._fs.open(path, "xb") as file:
                    file.write(data)
            except Exception:  # stores say in many ways that there is one
                if self.is_folder(name) is None:
                    raise
                return False
            return True

    def remove(self, name: str) -> None:
        """Removes a file; does nothing if there is none."""
        with suppress(MissingError), self._doing("be removed", name) as path:
            self._fs.rm_file(path)


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _refusal(place: RemotePath, action: str, error: Exception) -> StorageError:
    """What became of a file, in one line. ``action`` completes "cannot …", as in "be read"."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else None
    is_missing = isinstance(error, FileNotFoundError)
    if place.scheme == "hf" and (_is_hidden(cause) or not is_missing):
        return _hub_error(place, action, cause if is_missing and cause else error)
    if place.scheme in SERVERS and cause is not None and getattr(cause, "status", None) not in (404, 410):
        is_missing = False  # over HTTP, fsspec calls every file missing that it cannot read
    says_why = cause is not None and (not is_missing or place.scheme in CONDITIONAL)
    reason = _words(cause or error) if says_why or not is_missing else "it does not exist"
    return (MissingError if is_missing else StorageError)(f"{place} cannot {action}: {reason}", fix=CHECK)


def _words(error: BaseException) -> str:
    """What a library says of an error, in one line and without secrets."""
    status = getattr(error, "status", None)
    reason = f"HTTP status {status}" if isinstance(status, int) else one_line(str(error)) or type(error).__name__
    return SECRET.sub(r"\1(not shown)", reason)[:300]


def _is_hidden(error: Exception | None) -> bool:
    """Is not only a file missing, but its repository or revision, or the right to see it?"""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error, RepositoryNotFoundError | RevisionNotFoundError | HFValidationError)


def _hub_error(place: RemotePath, action: str, error: Exception) -> StorageError:
    status = status_of(error)
    reason, fix = explain_hub_error(error)
    if status in (401, 403):
        reason, fix = f"access is denied (HTTP status {status})", LOGIN
    elif _is_hidden(error):
        fix += "; hf repo create makes a new one"
    return StorageError(f"{place} cannot {action}: {reason}", fix=fix)
