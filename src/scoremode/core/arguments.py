"""What a caller may hand over: checked before it is used, refused with its name and what it should be."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from scoremode.errors import OptionError, shortened

LARGEST = 2**63 - 1  # what a file position, an array or a slice can still count
SERVERS = ("http", "https")  # where a model is named, these are servers of models
STORES = (  # schemes of files and folders; fsspec and Arrow know more
    *("s3", "s3a", "s3n", "gs", "gcs", "hf", "hdfs", "viewfs", "abfs", "abfss", "az", "adl", "memory", "file", "ftp"),
    *("sftp", "ssh", "smb", "webhdfs", "oss", "oci"),
)
ALMOST_URI = re.compile(rf"[^/\\]*:[/\\]|({'|'.join((*STORES, *SERVERS))}):", re.IGNORECASE)


def require_text(name: str, value: Any) -> None:
    """Refuse a value that is not a string.

    >>> require_text("method", 5)
    Traceback (most recent call last):
    ...
    scoremode.errors.OptionError: method is 5, which is not a string; give text in quotes
    """
    if not isinstance(value, str):
        raise OptionError(f"{name} is {_shown(value)}, which is not a string", fix="give text in quotes")


def whole_number(name: str, value: Any) -> int | None:
    """The value as a Python int, or None if none was given; refuses other types and numbers of 2**63 or more."""
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise OptionError(f"{name} is {_shown(value)}, which is not a whole number", fix=f"give one, as in {name}=512")
    number = int(value)
    if abs(number) > LARGEST:
        raise OptionError(f"{name} is too large", fix="give a number below 2**63")
    return number


def require_flag(name: str, value: Any) -> None:
    """Refuse a value that is neither True nor False."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {_shown(value)}, which is neither True nor False", fix="give one of them")


def path_text(name: str, value: Any) -> str:
    """Returns a path or a name as a string; refuses a value that is neither."""
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        what = f"{name} is {_shown(value)}, which is neither a name nor a path"
        raise OptionError(what, fix="give a string or a Path")
    return given


def user_path(path: str) -> Path:
    """A path in which a leading ``~`` or ``~USER`` is that home folder."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        user = shortened(path.partition("/")[0])
        raise OptionError(f"{user} is no home folder of this machine", fix="write the path out") from None


def _shown(value: Any) -> str:
    return shortened(repr(value), 60)


def read_key(variable: str | None) -> str | None:
    """The key in an environment variable. Neither the key nor the name is shown: some type the key as the name."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip() if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable) else ""
    if not key:
        raise OptionError(
            "the environment variable that --api-key-env names is not set",
            fix="export it first, and give its name, as in --api-key-env SERVER_KEY",
        )
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise OptionError("the key that --api-key-env names has spaces or unusual characters", fix="export it again")
    return key


def secret_on_command_line(what: str, instead: str) -> OptionError:
    """The refusal of a secret that was typed into a command; ``instead`` says where it belongs."""
    return OptionError(f"{what} would show a secret to everybody who lists this machine's processes", fix=instead)


def seconds_in(variable: str, default: float, least: float, example: str) -> float:
    """The seconds in an environment variable; OptionError if its value is not a number, or less than ``least``."""
    given = os.environ.get(variable, "").strip()
    try:
        seconds = float(given) if given else default
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= 86_400:
        raise OptionError(f"{variable} is not a number of seconds", fix=f"give {example}")
    return seconds
