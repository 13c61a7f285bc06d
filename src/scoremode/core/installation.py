"""How scoremode was installed, and so the command that adds one of its extras.

    pip install 'scoremode[peft]'                       from a package index
    pip install '.[peft]'                               from a checkout that is the current folder
    pip install -e '/home/me/scoremode[peft]'           from a checkout elsewhere, editable
    pip install 'scoremode[peft] @ git+https://…'       from a repository or an archive

Installers write where a package came from into ``direct_url.json``. A package from an index has no such file.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

NAME = "scoremode"


class _Folder(msgspec.Struct):
    editable: bool = False


class _Repository(msgspec.Struct):
    vcs: str
    requested_revision: str = ""


class _Origin(msgspec.Struct):
    """What ``direct_url.json`` says."""

    url: str
    dir_info: _Folder | None = None
    vcs_info: _Repository | None = None


def pip_install(extra: str) -> str:
    """The command that installs an extra of scoremode, as its user would type it here."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        ours = distribution(NAME)
        origin = _parse(ours.read_text("direct_url.json"))
        installer = (ours.read_text("INSTALLER") or "").strip()
    except PackageNotFoundError:  # run from its source, with PYTHONPATH
        origin, installer = _Origin(Path(__file__).parents[2].as_uri(), _Folder(editable=True)), "pip"
    return f"{'uv pip' if installer == 'uv' else 'pip'} install {_requirement(extra, origin)}"


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of packages, without those that are not installed."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in dict.fromkeys(packages):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _parse(text: str | None) -> _Origin | None:
    """The content of ``direct_url.json``; None if the file is missing or damaged."""
    try:
        return msgspec.json.decode(text or "", type=_Origin)
    except ValueError:
        return None


def _requirement(extra: str, origin: _Origin | None) -> str:
    if origin is None:
        return f"'{NAME}[{extra}]'"
    repository = origin.vcs_info
    if repository is None and origin.url.startswith("file:"):
        is_editable = origin.dir_info is not None and origin.dir_info.editable
        return f"{'-e ' if is_editable else ''}{shlex.quote(f'{_path(origin.url)}[{extra}]')}"
    prefix = f"{repository.vcs}+" if repository else ""
    revision = f"@{repository.requested_revision}" if repository and repository.requested_revision else ""
    return shlex.quote(f"{NAME}[{extra}] @ {prefix}{_without_user(origin.url)}{revision}")


def _path(url: str) -> str:
    """The path of a ``file:`` URL: ``.`` if it is the current folder."""
    from urllib.parse import unquote, urlsplit

    path = unquote(urlsplit(url).path)
    try:
        return "." if Path(path).samefile(".") else path
    except OSError:
        return path


def _without_user(url: str) -> str:
    """A URL without the user name and password that a careless installer may have left in it."""
    from urllib.parse import urlsplit, urlunsplit

    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
