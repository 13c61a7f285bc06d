"""A place ─▶ the file system it lies on, of Arrow or else of fsspec. Credentials come from the usual chains."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

from scoremode.errors import InputError, ScoremodeError, StorageError, did_you_mean, one_line
from scoremode.places.explain import reason_of
from scoremode.places.uri import SERVERS, Place

CONNECT_SECONDS = 10.0
READ_SECONDS = 15.0  # without a byte
REQUEST_SECONDS = 120.0  # for one HTTP request, which reads some megabytes at most
ATTEMPTS = 2  # of one request, by the library; objects.py repeats whole operations
BY_ARROW = ("s3", "gs", "hdfs", "viewfs", "abfs", "abfss")
ATOMIC = ("s3", "gs", "abfs", "abfss", "hf")  # an object appears when it is complete, never before
FLAT = ("s3", "gs")  # folders are not made, they are parts of names
COSTLY_WRITES = ("hf",)  # each file that is written is a commit


@dataclass(frozen=True, slots=True)
class FileSystem:
    """An open file system, and how its files behave."""

    arrow: Any  # pyarrow.fs.FileSystem
    scheme: str

    @property
    def fsspec(self) -> Any | None:
        """The file system of fsspec behind it, if there is one."""
        return getattr(getattr(self.arrow, "handler", None), "fs", None)

    @property
    def is_atomic(self) -> bool:
        return self.scheme in ATOMIC

    @property
    def has_folders(self) -> bool:
        return self.scheme not in FLAT

    @property
    def writes_are_costly(self) -> bool:
        return self.scheme in COSTLY_WRITES


def file_system(place: Place) -> FileSystem:
    """The file system of a place, opened once. Nothing is asked of a server yet, except for the region of a bucket."""
    return _opened(place.scheme, place.root, place.settings)


@cache
def _opened(scheme: str, root: str, settings: tuple[tuple[str, str], ...]) -> FileSystem:
    try:
        return FileSystem(_file_system(scheme, root, dict(settings)), scheme)
    except ScoremodeError:
        raise
    except ImportError as error:
        raise StorageError(
            f"{scheme}:// needs a package that is not installed ({one_line(str(error))[:200]})",
            fix="install it, or use a mounted folder",
        ) from None
    except Exception as error:  # a library raises whatever it likes
        raise _unusable(scheme, error) from None


def _unusable(scheme: str, error: Exception) -> StorageError:
    reason, fix = reason_of(error), "use another URI, or a mounted folder"
    if isinstance(error, ValueError):  # of an environment variable: what a URI may say was checked
        words = one_line(str(error))[:200]
        return StorageError(f"{scheme}:// cannot be used here ({words})", fix=f"check the environment; or {fix}")
    host = f"check the host, as in {scheme}://HOST:PORT/PATH, and that it is up; or "
    return StorageError(f"{scheme}:// cannot be used here: {reason.words}", fix=(host if reason.may_pass else "") + fix)


def _file_system(scheme: str, root: str, settings: dict[str, str]) -> Any:
    if scheme == "s3":
        return _s3(root, settings)
    if scheme == "gs":
        return _gs(settings)
    return _by_uri(scheme, root) if scheme in BY_ARROW else _by_fsspec(scheme, root)


def _s3(bucket: str, settings: dict[str, str]) -> Any:
    from pyarrow import fs

    endpoint, scheme = _endpoint(settings)
    return fs.S3FileSystem(
        region=settings.get("region") or _region_of(bucket, settings),
        endpoint_override=endpoint,
        scheme=scheme,
        anonymous=settings.get("anonymous") == "true",
        connect_timeout=CONNECT_SECONDS,
        request_timeout=READ_SECONDS,
        background_writes=False,  # in the background, any number of parts would wait in memory
        allow_delayed_open=True,  # a small object is one request
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
    )


def _endpoint(settings: dict[str, str]) -> tuple[str | None, str]:
    """HOST:PORT and http or https: as the URI says, else as the variables of Amazon's own tools say."""
    given = settings.get("endpoint_override")
    given = given or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    if given is None:
        return None, settings.get("scheme", "https")
    scheme, apart, rest = given.rpartition("://")
    return rest.rstrip("/"), settings.get("scheme") or (scheme if apart else "https")


def _region_of(bucket: str, settings: dict[str, str]) -> str | None:
    """The region of a bucket, if nobody says it; None leaves it to the library."""
    from pyarrow import fs

    told = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE")
    if "endpoint_override" in settings or any(os.environ.get(name) for name in told):
        return None
    try:
        return str(fs.resolve_s3_region(bucket))
    except (OSError, ValueError):
        return None  # the first request says what is wrong


def _gs(settings: dict[str, str]) -> Any:
    from pyarrow import fs

    return fs.GcsFileSystem(
        endpoint_override=settings.get("endpoint_override"),
        scheme=settings.get("scheme", "https"),
        anonymous=settings.get("anonymous") == "true",
        retry_time_limit=timedelta(seconds=READ_SECONDS),
    )


def _by_uri(scheme: str, root: str) -> Any:
    from pyarrow import fs

    return fs.FileSystem.from_uri(f"{scheme}://{root}/")[0]


def _by_fsspec(scheme: str, root: str) -> Any:
    from pyarrow import fs

    try:
        import fsspec
        from fsspec.registry import known_implementations
    except ImportError:
        raise StorageError(f"{scheme}:// needs the package fsspec", fix="pip install fsspec") from None
    if scheme not in (*known_implementations, *fsspec.available_protocols()):
        fix = did_you_mean(scheme, ["s3", "gs", "hf", "file", "memory", "hdfs", "abfs", "sftp", *SERVERS])
        raise InputError(f"scoremode does not know the scheme {scheme}://", fix=fix)
    kind = fsspec.get_filesystem_class(scheme)
    settings = kind._get_kwargs_from_urls(f"{scheme}://{root}")  # host and port
    if scheme in SERVERS:
        settings["client_kwargs"] = {"timeout": _http_seconds()}
    return fs.PyFileSystem(fs.FSSpecHandler(kind(**settings)))


def _http_seconds() -> Any:
    """Limits for a server that sends nothing, or next to nothing."""
    from aiohttp import ClientTimeout

    return ClientTimeout(total=REQUEST_SECONDS, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
