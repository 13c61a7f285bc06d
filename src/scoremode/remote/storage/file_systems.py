"""The file systems behind URIs, of Arrow or else of fsspec, all with fsspec's methods, and what their errors mean.

Credentials come from the usual chains; nothing here takes or keeps one.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

from scoremode.core.arguments import SERVERS
from scoremode.core.disk.uri import RemotePath
from scoremode.core.hub import is_reachable
from scoremode.errors import InputError, ScoremodeError, StorageError, did_you_mean, one_line
from scoremode.remote.storage.hub import endpoint, hub_error

CONNECT_SECONDS = 10.0
READ_SECONDS = 15.0  # without a byte
REQUEST_SECONDS = 120.0  # for one HTTP request, which reads some megabytes at most
ATTEMPTS = 2  # of one request, by the library; objects.py repeats whole operations
BY_ARROW = ("s3", "gs", "hdfs", "viewfs", "abfs", "abfss")

NETWORK = "check the network, the endpoint (AWS_ENDPOINT_URL or ?endpoint_override=HOST:PORT) and that it is up"
GOOGLE = "https://storage.googleapis.com"
ADDRESS = "check the address, and that the server is up"
CREDENTIALS = "check the credentials in the environment, the profile or the machine's role, and what they may do"
AGAIN = "try again later"
ANOTHER = "use another URI, or a mounted folder"
SECRET = re.compile(r"(?i)((?:access|secret|session|sas|account)[\w-]*(?:key|token|id|signature)?[\"']?\s*[=:]\s*)\S+")


# ── open ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def file_system(place: RemotePath) -> Any:
    """fsspec's file system of a place. Nothing is asked of a server yet, except for the region of a bucket."""
    return _opened(place.scheme, place.root, place.settings, endpoint() if place.scheme == "hf" else None)


@cache
def _opened(scheme: str, root: str, settings: tuple[tuple[str, str], ...], hub: str | None) -> Any:
    try:
        if scheme not in BY_ARROW:
            return _by_fsspec(scheme, root, hub)
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow import fs

        known = {"s3": lambda: _s3(root, dict(settings)), "gs": lambda: _gs(dict(settings))}
        made = known.get(scheme, lambda: fs.FileSystem.from_uri(f"{scheme}://{root}/")[0])()
        return ArrowFSWrapper(made, skip_instance_cache=True)
    except ScoremodeError:
        raise
    except ImportError as error:
        raise StorageError(
            f"{scheme}:// needs a package that is not installed ({one_line(str(error))[:200]})",
            fix="install it, or use a mounted folder",
        ) from None
    except ValueError as error:  # of an environment variable: what a URI may say was checked
        words = one_line(str(error))[:200]
        raise StorageError(
            f"{scheme}:// cannot be used here ({words})", fix=f"check the environment; or {ANOTHER}"
        ) from None
    except Exception as error:  # a library raises whatever it likes
        reason = reason_of(error)
        host = f"check the host, as in {scheme}://HOST:PORT/PATH, and that it is up; or " if reason.may_pass else ""
        raise StorageError(f"{scheme}:// cannot be used here: {reason.words}", fix=host + ANOTHER) from None


def _s3(bucket: str, settings: dict[str, str]) -> Any:
    from pyarrow import fs

    told, given = os.environ.get, _s3_endpoint(settings)
    scheme, _, endpoint = given.rpartition("://")
    region = settings.get("region")
    if region is None and not given and not any(map(told, ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"))):
        try:
            region = fs.resolve_s3_region(bucket)
        except (OSError, ValueError) as error:
            may_be_private = os.path.exists(os.path.expanduser(told("AWS_CONFIG_FILE") or "~/.aws/config"))
            if reason_of(error) is UNREACHABLE and not may_be_private:
                raise StorageError(f"s3://{bucket} cannot be used here: {UNREACHABLE.words}", fix=NETWORK) from None
            region = None  # the first request says what is wrong
    return fs.S3FileSystem(
        region=region,
        endpoint_override=endpoint.rstrip("/") or None,
        scheme=settings.get("scheme") or scheme or "https",
        anonymous=settings.get("anonymous") == "true",
        connect_timeout=CONNECT_SECONDS,
        request_timeout=READ_SECONDS,
        background_writes=False,  # in the background, any number of parts would wait in memory
        allow_delayed_open=True,  # a small object is one request
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
    )


def _s3_endpoint(settings: dict[str, str]) -> str:
    told = os.environ.get
    return settings.get("endpoint_override") or told("AWS_ENDPOINT_URL_S3") or told("AWS_ENDPOINT_URL") or ""


def _gs(settings: dict[str, str]) -> Any:
    from pyarrow import fs

    elsewhere = "endpoint_override" in settings or os.environ.get("STORAGE_EMULATOR_HOST")
    if not elsewhere and not is_reachable(GOOGLE):
        raise StorageError(f"gs:// cannot be used here: {UNREACHABLE.words}", fix="check the network")
    return fs.GcsFileSystem(
        endpoint_override=settings.get("endpoint_override"),
        scheme=settings.get("scheme", "https"),
        anonymous=settings.get("anonymous") == "true",
        retry_time_limit=timedelta(seconds=READ_SECONDS),
    )


def _by_fsspec(scheme: str, root: str, hub: str | None) -> Any:
    if scheme == "hf":
        from huggingface_hub import HfFileSystem

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

    Arrow has no conditional writes. The packages of fsspec are used if they are installed.
    """
    settings = dict(place.settings)
    is_anonymous, scheme = settings.get("anonymous") == "true", settings.get("scheme", "https")
    address = _s3_endpoint(settings) if place.scheme == "s3" else settings.get("endpoint_override", "")
    url = address if not address or "://" in address else f"{scheme}://{address}"
    with suppress(ImportError):
        if place.scheme == "s3":
            from s3fs import S3FileSystem

            region = {"region_name": settings["region"]} if "region" in settings else {}
            return S3FileSystem(anon=is_anonymous, endpoint_url=url or None, client_kwargs=region)
        if place.scheme == "gs":
            from gcsfs import GCSFileSystem

            return GCSFileSystem(token="anon" if is_anonymous else None, endpoint_url=url or None)
        if place.scheme == "memory":
            return file_system(place)
    return None


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Reason:
    """What went wrong, what to do about it, and whether the same operation may work in a moment."""

    words: str
    fix: str
    may_pass: bool = False


UNREACHABLE = Reason("it cannot be reached", NETWORK, may_pass=True)
DENIED = Reason("access is denied", CREDENTIALS)
KNOWN: tuple[tuple[str, Reason], ...] = (
    (r"NO_SUCH_BUCKET|NoSuchBucket|bucket.*(does not exist|not found)", Reason("there is no such bucket", "make it")),
    (
        r"INVALID_ACCESS_KEY_ID|InvalidAccessKeyId|SIGNATURE_DOES_NOT_MATCH|SignatureDoesNotMatch|INVALID_CLIENT_TOKEN|"
        r"InvalidToken|EXPIRED_TOKEN|ExpiredToken|UNRECOGNIZED_CLIENT",
        Reason("the credentials are not accepted", CREDENTIALS),
    ),
    (
        r"PermanentRedirect|TemporaryRedirect|AuthorizationHeaderMalformed|HTTP status 301|IllegalLocationConstraint",
        Reason("the bucket is in another region", "set AWS_REGION, or add ?region=NAME to the URI"),
    ),
    (
        r"ACCESS_DENIED|AccessDenied|Access Denied|HTTP status 40[13]|Forbidden|Unauthorized|PERMISSION_DENIED|"
        r"Permission denied|MISSING_AUTHENTICATION|No credentials|credentials.*(not found|missing)|Anonymous",
        DENIED,
    ),
    (r"PRECONDITION_FAILED|PreconditionFailed", Reason("somebody else wrote it meanwhile", AGAIN)),
    (
        r"SLOW_DOWN|SlowDown|SERVICE_UNAVAILABLE|ServiceUnavailable|INTERNAL_FAILURE|InternalError|THROTTLING|"
        r"REQUEST_TIMEOUT|RequestTimeout|HTTP status 5\d\d|HTTP status 429|Too Many Requests",
        Reason("the server is busy or failing", AGAIN, may_pass=True),
    ),
    (
        r"NETWORK_CONNECTION|curlCode|[Cc]onnection|timed? ?out|resolve host|Temporary failure|UNAVAILABLE|"
        r"unexpected (end|EOF)|IncompleteRead|Broken pipe|[Cc]o(uldn't|uld not|nnot|n't) connect|Cannot connect|"
        r"Name or service not known|not known|No route|Network is unreachable",
        UNREACHABLE,
    ),
)


def reason_of(error: BaseException) -> Reason:
    """The meaning of an error of any file system."""
    text = one_line(str(error))
    if isinstance(error, FileNotFoundError):
        return Reason("it does not exist", "check the URI")
    for pattern, reason in KNOWN:
        if re.search(pattern, text):
            return reason
    if isinstance(error, PermissionError):
        return DENIED
    if isinstance(error, NotImplementedError):
        return Reason("its file system cannot do that", ANOTHER)
    if isinstance(error, ConnectionError | TimeoutError):
        return UNREACHABLE
    words = SECRET.sub(r"\1(not shown)", text)[:200]
    return Reason(f"{type(error).__name__}: {words}", AGAIN, may_pass=isinstance(error, OSError))


def refusal(place: RemotePath, doing: str, error: BaseException) -> StorageError:
    """The error for an operation that failed for good. ``doing`` completes "cannot …", as in "be read"."""
    if isinstance(error, StorageError):
        return error
    if place.scheme == "hf":
        return hub_error(place, doing, error)
    reason = reason_of(error)
    fix = ADDRESS if reason.fix == NETWORK and place.scheme in SERVERS else reason.fix
    return StorageError(f"{place} cannot {doing}: {reason.words}", fix=fix)
