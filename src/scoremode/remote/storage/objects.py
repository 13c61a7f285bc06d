"""The files of a place: listed, read, written whole, removed, all by fsspec. Arrow's file systems are wrapped by it.

Requests that fail are tried again by the library of each file system, and by nobody else. Credentials come from the
usual chains (for the hub: a login, or HF_TOKEN); nothing here takes or keeps one. On object stores a file has its name
only when it is complete; nothing else relies on that, because a run's manifest comes last and has its files' hashes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeGuard

from scoremode.core.arguments import SERVERS
from scoremode.core.disk.uri import RemotePath
from scoremode.core.hub import check_answers, explain_hub_error, hub_is_reachable, status_of
from scoremode.errors import InputError, ScoremodeError, StorageError, did_you_mean, one_line

ATTEMPTS = 4  # of one request, by Arrow
CONNECT_SECONDS, READ_SECONDS = 5.0, 15.0  # without a connection, without a byte
REQUEST_SECONDS = 600.0  # for a whole answer over HTTP
BY_ARROW = ("s3", "gs", "hdfs", "viewfs", "abfs", "abfss")
NO_FOLDERS = ("s3", "gs", "hf")  # they are parts of names, or come with the first file
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
        if scheme not in BY_ARROW:
            return _by_fsspec(scheme, root, hub)
        from fsspec.implementations.arrow import ArrowFSWrapper

        return ArrowFSWrapper(_by_arrow(scheme, root, dict(settings)), skip_instance_cache=True)
    except ScoremodeError:
        raise
    except Exception as error:  # a library raises whatever it likes, also for a package that is not installed
        raise StorageError(
            f"{scheme}:// cannot be used here: {_words(error)}", fix="check the host, or use another URI"
        ) from None


def _by_arrow(scheme: str, root: str, settings: dict[str, str]) -> Any:
    from pyarrow import fs

    is_anonymous = settings.get("anonymous") == "true"
    if scheme == "s3":
        url_scheme, _, address = _endpoint_of_s3(settings).rpartition("://")
        return fs.S3FileSystem(
            region=settings.get("region"),
            endpoint_override=address.rstrip("/") or None,
            scheme=settings.get("scheme") or url_scheme or "https",
            anonymous=is_anonymous,
            connect_timeout=CONNECT_SECONDS,
            request_timeout=READ_SECONDS,
            background_writes=False,  # in the background, any number of parts would wait in memory
            allow_delayed_open=True,  # a small object is one request
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        )
    if scheme == "gs":
        return fs.GcsFileSystem(
            endpoint_override=settings.get("endpoint_override"),
            scheme=settings.get("scheme", "https"),
            anonymous=is_anonymous,
            retry_time_limit=timedelta(seconds=READ_SECONDS),
        )
    return fs.FileSystem.from_uri(f"{scheme}://{root}/")[0]


def _endpoint_of_s3(settings: dict[str, str]) -> str:
    told = os.environ.get
    return settings.get("endpoint_override") or told("AWS_ENDPOINT_URL_S3") or told("AWS_ENDPOINT_URL") or ""


def _by_fsspec(scheme: str, root: str, hub: str | None) -> Any:
    if scheme == "hf":
        from huggingface_hub import HfFileSystem
        from huggingface_hub.utils import disable_progress_bars

        if not hub_is_reachable():  # its client would try for half a minute
            fix = "check the network and HF_ENDPOINT"
            raise StorageError("hf:// cannot be used here: the hub cannot be reached", fix=fix)
        check_answers()
        disable_progress_bars()  # they would mix with ours
        return HfFileSystem(endpoint=hub, skip_instance_cache=True)
    import fsspec
    from fsspec.registry import known_implementations

    if scheme not in (*known_implementations, *fsspec.available_protocols()):
        fix = did_you_mean(scheme, ["s3", "gs", "hf", "file", "memory", "hdfs", "abfs", "sftp", *SERVERS])
        raise InputError(f"scoremode does not know the scheme {scheme}://", fix=fix)
    kind = fsspec.get_filesystem_class(scheme)
    settings = kind._get_kwargs_from_urls(f"{scheme}://{root}")  # host and port
    if scheme in SERVERS:
        from aiohttp import ClientTimeout

        limits = ClientTimeout(total=REQUEST_SECONDS, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
        settings["client_kwargs"] = {"timeout": limits}
    return kind(**settings)


def creating(place: RemotePath) -> Any | None:
    """fsspec's file system of a place, if its mode "xb" is a conditional write of the store; None if there is none.

    Arrow has no conditional writes: they need s3fs or gcsfs.
    """
    if place.scheme == "memory":
        return file_system(place)
    settings = dict(place.settings)
    is_anonymous, scheme = settings.get("anonymous") == "true", settings.get("scheme", "https")
    address = _endpoint_of_s3(settings) if place.scheme == "s3" else settings.get("endpoint_override", "")
    url = address if not address or "://" in address else f"{scheme}://{address}"
    with suppress(ImportError):
        import fsspec

        if place.scheme == "s3":
            region = {"region_name": settings["region"]} if "region" in settings else {}
            return fsspec.filesystem("s3", anon=is_anonymous, endpoint_url=url or None, client_kwargs=region)
        if place.scheme == "gs":
            return fsspec.filesystem("gs", token="anon" if is_anonymous else None, endpoint_url=url or None)
    return None


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class MissingError(StorageError):
    """There is no such file, folder or bucket."""


@dataclass(frozen=True, slots=True)
class Found:
    name: str  # relative to the place that was listed
    size: int
    is_folder: bool


class Objects:
    """The files in a folder elsewhere, by names relative to it."""

    def __init__(self, place: RemotePath) -> None:
        self.place, self._fs = place, file_system(place)

    @contextmanager
    def _doing(self, action: str, name: str = "") -> Iterator[str]:
        """Gives the path of a file. Errors become StorageErrors; ``action`` completes "cannot …", as in "be read"."""
        place, inner = self.place / name if name else self.place, self.place.path
        if place.scheme in ("hdfs", "viewfs"):
            inner = "/" + inner.partition("/")[2]
        elif place.scheme not in BY_ARROW:
            inner = str(self._fs._strip_protocol(f"{place.scheme}://{inner}"))  # without the host, unless it is http
        try:
            self._fs.invalidate_cache()  # others may have changed something
            yield f"{inner}/{name}" if name else inner
        except FileNotFoundError as error:
            cause = error.__cause__
            if place.scheme == "hf" and _is_hidden(cause):
                raise _hub_error(place, action, cause) from None
            # over HTTP, fsspec calls every file missing that it cannot read
            if place.scheme in SERVERS and cause is not None and getattr(cause, "status", None) not in (404, 410):
                raise StorageError(f"{place} cannot {action}: {_words(cause)}", fix=CHECK) from None
            raise MissingError(f"{place} cannot {action}: it does not exist", fix=CHECK) from None
        except ScoremodeError:
            raise
        except Exception as error:  # each file system of fsspec raises its own kinds
            if place.scheme == "hf":
                raise _hub_error(place, action, error) from None
            raise StorageError(f"{place} cannot {action}: {_words(error)}", fix=CHECK) from None

    # ── look ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def listed(self, *, deep: bool = False) -> list[Found]:
        """The files in the folder, sorted by name; none if there is no such folder."""
        entries = list[Found]()
        with suppress(MissingError), self._doing("be listed") as path:
            entries = [_found(info, info["name"][len(path) :].lstrip("/")) for info in self._entries(path, deep=deep)]
        return sorted(entries, key=lambda entry: entry.name)

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

    def look(self, name: str = "") -> Found | None:
        """The file or folder of that name; None if there is none."""
        info = self._info(name)
        return None if info is None else _found(info, name)

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
        store = creating(self.place)
        if store is None:
            if self.look(name) is not None:
                return False
            self.write(name, data)
            return True
        with self._doing("be written", name) as path:
            try:
                with store.open(path, "xb") as file:
                    file.write(data)
            except Exception:  # stores say in many ways that there is one
                if self.look(name) is None:
                    raise
                return False
            return True

    def remove(self, name: str) -> None:
        """Removes a file; does nothing if there is none."""
        with suppress(MissingError), self._doing("be removed", name) as path:
            self._fs.rm_file(path)


def _found(info: dict[str, Any], name: str) -> Found:
    return Found(name.rstrip("/"), info["size"] or 0, info["type"] == "directory")


def _words(error: BaseException) -> str:
    """What a library says of an error, in one line and without secrets."""
    status = getattr(error, "status", None)
    reason = f"HTTP status {status}" if isinstance(status, int) else one_line(str(error)) or type(error).__name__
    return SECRET.sub(r"\1(not shown)", reason)[:300]


def _is_hidden(error: BaseException | None) -> TypeGuard[Exception]:
    """Is not only a file missing, but its repository or revision, or the right to see it?"""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error, RepositoryNotFoundError | RevisionNotFoundError | HFValidationError)


def _hub_error(place: RemotePath, action: str, error: Exception) -> StorageError:
    """The refusal for an error of the hub's client. ``action`` completes "cannot …", as in "be read"."""
    status = status_of(error)
    reason, fix = explain_hub_error(error)
    if status in (401, 403):
        reason, fix = f"access is denied (HTTP status {status})", LOGIN
    elif _is_hidden(error):
        fix += "; hf repo create makes a new one"
    return StorageError(f"{place} cannot {action}: {reason}", fix=fix)
