"""Why a file system did not do what it was asked: in words, and whether it is worth trying again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from scoremode.errors import StorageError, one_line
from scoremode.places.uri import SERVERS, Place

NETWORK = "check the network, the endpoint (AWS_ENDPOINT_URL or ?endpoint_override=HOST:PORT) and that it is up"
ADDRESS = "check the address, and that the server is up"
CREDENTIALS = "check the credentials in the environment, the profile or the machine's role, and what they may do"
AGAIN = "try again later"

SECRET = re.compile(r"(?i)((?:access|secret|session|sas|account)[\w-]*(?:key|token|id|signature)?[\"']?\s*[=:]\s*)\S+")


@dataclass(frozen=True, slots=True)
class Reason:
    """What went wrong, what to do about it, and whether the same may work in a moment."""

    words: str
    fix: str
    may_pass: bool = False


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
        Reason("access is denied", CREDENTIALS),
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
        Reason("it cannot be reached", NETWORK, may_pass=True),
    ),
)


def reason_of(error: BaseException) -> Reason:
    """What an error of any file system means."""
    text = one_line(str(error))
    if isinstance(error, FileNotFoundError):
        return Reason("it does not exist", "check the URI")
    for pattern, reason in KNOWN:
        if re.search(pattern, text):
            return reason
    if isinstance(error, PermissionError):
        return Reason("access is denied", CREDENTIALS)
    if isinstance(error, NotImplementedError):
        return Reason("its file system cannot do that", "use another URI, or a mounted folder")
    if isinstance(error, ConnectionError | TimeoutError):
        return Reason("it cannot be reached", NETWORK, may_pass=True)
    words = SECRET.sub(r"\1(not shown)", text)[:200]
    return Reason(f"{type(error).__name__}: {words}", AGAIN, may_pass=isinstance(error, OSError))


def refusal(place: Place, doing: str, error: BaseException) -> StorageError:
    """The one line for an operation that failed for good, as in ``doing`` "be read"."""
    if isinstance(error, StorageError):
        return error
    reason = reason_of(error)
    fix = ADDRESS if reason.fix == NETWORK and place.scheme in SERVERS else reason.fix
    return StorageError(f"{place} cannot {doing}: {reason.words}", fix=fix)
