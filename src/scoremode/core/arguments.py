"""Reads names, keys and numbers from a caller or from the environment. Types of arguments: see ``core.typed``."""

from __future__ import annotations

import os
import re
from pathlib import Path

from scoremode.errors import OptionError, shortened

LARGEST = 2**63 - 1  # what a file position, an array or a slice can still count
SERVERS = ("http", "https")  # where a model is named, these are servers of models
STORES = (  # schemes of files and folders; fsspec and Arrow know more
    *("s3", "s3a", "s3n", "gs", "gcs", "hf", "hdfs", "viewfs", "abfs", "abfss", "az", "adl", "memory", "file", "ftp"),
    *("sftp", "ssh", "smb", "webhdfs", "oss", "oci"),
)
ALMOST_URI = re.compile(rf"[^/\\]*:[/\\]|({'|'.join((*STORES, *SERVERS))}):", re.IGNORECASE)


def user_path(path: str) -> Path:
    """A path in which a leading ``~`` or ``~USER`` is that home folder."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        user = shortened(path.partition("/")[0])
        raise OptionError(f"{user} is no home folder of this machine", fix="write the path out") from None


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


def secret_on_command_line(flag: str, instead: str) -> OptionError:
    """The refusal of a secret that was typed into a command; ``instead`` says where it belongs."""
    return OptionError(f"{flag} would show a secret to everybody who lists this machine's processes", fix=instead)


def seconds_in(variable: str, default: float, least: float, example: str) -> float:
    """The seconds in an environment variable; OptionError if its value is not a number, or less than ``least``."""
    text = os.environ.get(variable, "").strip()
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= 86_400:
        raise OptionError(f"{variable} is not a number of seconds", fix=f"give {example}")
    return seconds
