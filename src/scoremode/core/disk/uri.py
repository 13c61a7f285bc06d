"""A URI from a user ─▶ a place that is checked, has no secrets, and is safe to print and to store.

s3://BUCKET/KEY   gs://BUCKET/KEY   hf://datasets/OWNER/NAME/PATH   memory://PATH   …
file:///PATH      is an ordinary path

Names are used as they are, without unquoting. Settings may follow, as in s3://BUCKET/KEY?region=eu-west-1.

A text that only looks like a URI is refused, and does not become a local folder: file:/PATH, s3:BUCKET/KEY,
simplecache::s3://BUCKET/KEY, 1s://PATH, C:\\PATH. Other names with a colon are paths (run:1), and ./NAME always is.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from scoremode.core.arguments import ALMOST_URI, SERVERS, user_path
from scoremode.errors import InputError, harmless

URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
SETTINGS = re.compile(r"(.*?)\?([A-Za-z_-]+=.*)", re.DOTALL)
KNOWN_SETTINGS = {
    "s3": ("region", "endpoint_override", "scheme", "anonymous"),
    "gs": ("endpoint_override", "scheme", "anonymous"),
}
VALUES = {  # per setting: the pattern of its value, and an example
    "region": (r"[a-z0-9-]+", "eu-west-1"),
    "endpoint_override": (r"(https?://)?([\w.-]+|\[[0-9a-fA-F:]+\])(:[0-9]{1,5})?/?", "localhost:9000"),
    "scheme": (r"https?", "http"),
    "anonymous": (r"true|false", "true"),
}
SAME = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}  # other names of a scheme, and its usual name
CREDENTIALS = "leave it out: credentials come from the environment, a profile or the machine's role"


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or a folder behind a URI. ``str()`` gives the URI, which has no secrets.

    >>> str(parse("s3a://runs/base/") / "scores.parquet")
    's3://runs/base/scores.parquet'
    """

    scheme: str
    path: str  # starts with the bucket or the host; has no slash at its start or end
    settings: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        settings = "&".join(f"{name}={value}" for name, value in self.settings)
        return f"{self.scheme}://{self.path}" + (f"?{settings}" if settings else "")

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.scheme, f"{self.path}/{name}", self.settings)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.scheme, self.path.rpartition("/")[0], self.settings)

    @property
    def root(self) -> str:
        """The bucket or the host of this place."""
        return self.path.partition("/")[0]


def is_uri(text: object) -> bool:
    """Is this text a URI, and not a path?

    >>> [is_uri(text) for text in ("s3://bucket/key", "runs/base", "table:uniform", "wikitext2:wiki.test.raw")]
    [True, False, False, False]
    """
    return isinstance(text, str) and URI.match(text) is not None


def refuse_broken_uri(text: str) -> None:
    """Refuses a text that is not a URI but starts like one, or like a Windows path. The error shows only its start."""
    if ALMOST_URI.match(text) and not is_uri(text):
        raise InputError(
            f"{harmless(text.partition(':')[0])[:40]}:… is neither a URI nor a path of this machine",
            fix="a URI begins with SCHEME://, as in s3://BUCKET/KEY or file:///PATH; a name with a colon is ./NAME",
        )


def may_be_stored(location: object) -> bool:
    """Can a run be stored at this URI? Not at an http address, which may be the name of a model."""
    if isinstance(location, RemotePath):
        return True
    match = URI.match(location) if isinstance(location, str) else None
    return match is not None and match[1].lower() not in SERVERS


def located(location: str | os.PathLike[str] | RemotePath) -> Path | RemotePath:
    """Returns the location that a text names: a path of this machine, or a place behind a URI.

    >>> located("runs/base"), located("file:///runs/base")
    (PosixPath('runs/base'), PosixPath('/runs/base'))
    """
    if isinstance(location, RemotePath):
        return location
    text = os.fspath(location)
    refuse_broken_uri(text)
    if not is_uri(text):
        return user_path(text)
    if not text.lower().startswith("file://"):
        return parse(text)
    host, _, path = text[len("file://") :].partition("/")
    if host not in ("", "localhost") or not path:
        raise InputError(f"{text} is not a path of this machine", fix="give file:///PATH with three slashes, or a path")
    return Path("/" + path)


def stored_at(location: str | os.PathLike[str] | RemotePath) -> Path | RemotePath:
    """Returns the location of a run or a reference. An http address is not one, but may be the name of a model."""
    return located(location) if not isinstance(location, str) or may_be_stored(location) else Path(location)


def shown(uri: str) -> str:
    """Returns a URI in printable form. For an invalid URI, returns only its scheme, because it may contain secrets."""
    try:
        return str(located(uri))
    except InputError:
        return f"a {uri.partition('://')[0]}:// URI"


def name_in(location: str) -> str:
    """Returns the name of a folder, a file or a model: the last part of its path or URI."""
    return parse(location).name if may_be_stored(location) and not location.startswith("file:") else Path(location).name


def parse(text: str) -> RemotePath:
    """Returns the place that a URI names. Raises InputError if it is invalid or has a secret, which is not repeated."""
    scheme, _, rest = text.partition("://")
    scheme = SAME.get(scheme.lower(), scheme.lower())
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if at and (":" in user or scheme in KNOWN_SETTINGS):
        raise InputError(f"a {scheme}:// URI contains a user name or a secret, before the @", fix=CREDENTIALS)
    rest, settings = _split_settings(scheme, rest)
    if "\0" in rest or harmless(rest) != rest:
        raise InputError(f"{scheme}://{rest} has characters that no name can have", fix="check the URI")
    path = rest.strip("/") if scheme == "memory" or not rest.startswith("/") else ""
    if not path:
        noun, example = ("bucket", "BUCKET/FOLDER") if scheme in KNOWN_SETTINGS else ("file or folder", "PATH")
        raise InputError(f"{scheme}://{rest} names no {noun}", fix=f"as in {scheme}://{example}")
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise InputError(f"{scheme}://{path} has an empty part, or . or ..", fix="give the whole name")
    return RemotePath(scheme, path, settings)


def _split_settings(scheme: str, rest: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    names = KNOWN_SETTINGS.get(scheme, ())
    if rest.rpartition("?")[2] in names:
        rest += "="  # refused below as a setting without a value
    match = SETTINGS.fullmatch(rest)
    if match is None:
        return rest, ()
    settings: list[tuple[str, str]] = []
    for pair in match[2].split("&"):
        name, _, value = pair.partition("=")
        if name not in names:  # its value may be a secret, so it is not repeated
            allowed = f"{scheme}:// takes {', '.join(names)}; " if names else ""
            raise InputError(f"a {scheme}:// URI has the setting '{harmless(name)[:40]}'", fix=allowed + CREDENTIALS)
        pattern, example = VALUES[name]
        if not re.fullmatch(pattern, value):  # the value may be a secret here, too
            raise InputError(f"a {scheme}:// URI has an unusable {name}", fix=f"as in ?{name}={example}")
        if name in dict(settings):
            raise InputError(f"a {scheme}:// URI has the setting '{name}' twice", fix="give it once")
        settings.append((name, value))
    return match[1], tuple(sorted(settings))
