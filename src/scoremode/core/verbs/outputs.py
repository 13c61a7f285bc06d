"""Checks output files that the user names before the work begins, so that nothing else is overwritten.

the name refers to              result
nothing, or an empty file       written atomically
ours in full, of the same       replaced: nothing is lost
ours in full, of another        refused; if the name is not the user's, ours gets another: NAME-DIGEST
any other file                  refused, with --fresh or without
a link                          its target is written by the same rules, and the link stays
a URI                           written as a whole, if its folder can be listed
anything else, /dev/stdout      refused
a file in a run or reference    refused
"""

from __future__ import annotations

import io
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Literal, NamedTuple

from scoremode.core.arguments import SERVERS
from scoremode.core.disk.files import written_atomically
from scoremode.core.disk.folders import JOURNAL, MANIFEST, SCORES
from scoremode.core.disk.manifests import about_sealed_text
from scoremode.core.disk.stores import store_of
from scoremode.core.disk.uri import RemotePath, is_uri, located, refuse_broken_uri
from scoremode.core.reading import LARGEST, open_regular
from scoremode.core.references.format import is_reference
from scoremode.core.strict_json import read_object
from scoremode.errors import InputError, RunError, print_line


@dataclass(frozen=True, slots=True)
class Output:
    """A file that may be written. ``str()`` gives the user's name for the file."""

    name: str  # as the user gave it
    flag: str  # the option that gave the name
    path: Path  # the file that is written; for a link, its target
    place: RemotePath | None = None  # set for a URI, which has no path

    def __str__(self) -> str:
        return self.name

    @property
    def where(self) -> Path | str:
        """The location of the file: a path, or the URI as text."""
        return Path(self.name) if self.place is None else str(self.place)

    @property
    def exists(self) -> bool:
        """Would a file with content be overwritten?"""
        if self.place is not None:
            return self.beginning(1) != b""
        return self.path.exists() and self.path.stat().st_size > 0

    def beginning(self, count: int) -> bytes:
        """Returns the first bytes of an existing file, to see what wrote it. Raises InputError if it is unreadable."""
        with self.opened(count) as file:
            return file.read(count)

    def opened(self, count: int) -> IO[bytes]:
        """Opens an existing file; of one behind a URI, the first bytes. Raises InputError if it is unreadable."""
        try:
            if self.place is not None:
                return io.BytesIO(store_of(self.place).read(self.place, count) or b"")
            return open_regular(self.path)
        except OSError as error:
            raise InputError(
                f"{self.name} exists and cannot be read ({error.strerror})", fix="give another name"
            ) from None

    def write(self, data: bytes | Path) -> None:
        """Writes all of it, or of another file, a plain file atomically. Raises RunError if that fails."""
        if self.place is not None:
            store_of(self.place).write(self.place, data if isinstance(data, bytes) else data.read_bytes())
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with (
                written_atomically(self.path) as file,
                io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as source,
            ):
                shutil.copyfileobj(source, file)
        except OSError as error:
            fix = f"give another file to {self.flag}"
            raise RunError(f"{self.name} cannot be written ({error.strerror})", fix=fix) from None

    def announce(self, line: str, *, quiet: bool = False) -> None:
        """Prints that the file was written, unless standard output has JSON (``quiet``)."""
        if not quiet:
            print(line)


# ── what may be replaced ─────────────────────────────────────────────────────────────────────────────────────────────
About = frozenset[str]
"""What a file shows: a digest of the question and the model for each result in it."""


class FileKind(NamedTuple):
    """A kind of file that scoremode writes."""

    words: str  # as in "a report of scoremode"
    about: Callable[[IO[bytes]], About | None]  # what a file shows; None: it is not ours in full, or was changed
    most: int = LARGEST  # bytes of a file behind a URI


def _about_text(file: IO[bytes]) -> About | None:
    return about_sealed_text(file.read(LARGEST + 1))


PAGE = FileKind("a report of scoremode", _about_text)
EVALUATION = FileKind("an evaluation of scoremode", _about_text)
NEVER_REPLACED = FileKind("a file of scoremode", lambda file: None)
"""Only the same bytes may be there."""

ANY = FileKind("a file", lambda file: frozenset())
"""Anything may be there: it is looked at again, or most of it stays."""

Standing = Literal["free", "same", "other", "foreign"]


def standing(output: Output, kind: FileKind, data: bytes | About | None = None) -> Standing:
    """Decides for every output whether what is there may be replaced: only if it is ours in full, and nothing is lost.

    ``data`` is what would be written, or what that shows: all that the file shows must be there. None: not known yet.
    """
    if not output.exists:
        return "free"
    with output.opened(kind.most + 1) as file:
        there = kind.about(file)
    if there is None:
        return "same" if isinstance(data, bytes) and output.beginning(len(data) + 1) == data else "foreign"
    new = kind.about(io.BytesIO(data)) if isinstance(data, bytes) else data
    return "same" if data is None or there <= (new or frozenset()) else "other"


def check_output(
    name: str | Path,
    flag: str,
    kind: FileKind = NEVER_REPLACED,
    data: bytes | None = None,
    *,
    made_later: str | Path | None = None,
    in_run: bool = False,
) -> Output:
    """Checks a file before it is written. Raises InputError if it cannot be, or if what is there must stay.

    ``data`` is what would be written, if it is known. ``made_later``: a folder that will be created. ``in_run``: the
    file is part of a run.
    """
    output = _checked(os.fspath(name), flag, made_later, in_run=in_run)
    require_standing(output, kind, data)
    return output


def require_standing(output: Output, kind: FileKind, data: bytes | About | None) -> None:
    """Raises InputError if what is there must stay; see ``standing``."""
    match standing(output, kind, data):
        case "foreign":
            what = f"{output.name} exists and is not {kind.words}, or was changed"
        case "other":
            what = f"{output.name} exists and is {kind.words} about another model or question"
        case _:
            return
    raise InputError(what, fix=f"give another {output.flag}, or remove the file")


def write_files(
    texts: Mapping[Any, str], flag: str, kind: FileKind, *, in_run: bool = False, fresh: bool = False
) -> list[Output]:
    """Writes files under names that scoremode chose (Path or RemotePath), or none if a file of others has one of them.

    A file that shows something else stays, and the new one is written beside it, unless ``fresh``.
    """
    made = []
    for path, data in ((path, text.encode()) for path, text in texts.items()):
        output = _checked(str(path), flag, path.parent, in_run=in_run)
        if not fresh and standing(output, kind, data) == "other":
            (digest,) = kind.about(io.BytesIO(data)) or ("",)
            stem, dot, ending = path.name.rpartition(".")
            beside = path.parent / f"{stem}-{digest[:8]}{dot}{ending}"
            output = _checked(str(beside), flag, path.parent, in_run=in_run)
            print_line(f"scoremode: {path} is about another model or question and stays; beside it: {beside.name}")
        require_standing(output, kind, None if fresh else data)
        made.append((output, data))
    for output, data in made:
        output.write(data)
    return [output for output, _ in made]


def check_report(
    name: str | Path, flag: str = "-o", page: str | None = None, *, made_later: str | Path | None = None
) -> Output:
    """Checks like ``check_output``, for an HTML report, before the work and with the page that was made."""
    return check_output(name, flag, PAGE, None if page is None else page.encode(), made_later=made_later)


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _checked(text: str, flag: str, made_later: str | Path | RemotePath | None, *, in_run: bool = False) -> Output:
    """The file that a name refers to. Raises InputError if none can be written there."""
    another = f"give another file to {flag}"
    try:
        is_name = bool(os.fsencode(text)) and "\0" not in text
    except UnicodeEncodeError:  # half a surrogate pair
        is_name = False
    if not is_name:
        raise InputError(f"{flag} was given no file name", fix=f"give a file name to {flag}")
    if is_uri(text):
        return _check_elsewhere(text, flag, in_run=in_run)
    refuse_broken_uri(text)
    path, found = Path(os.path.realpath(text)), None
    try:
        found = path.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InputError(f"{text} cannot be used ({error.strerror})", fix=another) from None
    is_plain = stat.S_ISREG(found.st_mode) and not _is_printed_to(found) if found else not path.is_relative_to("/proc")
    path = path if os.path.islink(text) else Path(text)  # messages use the user's name for the file
    later = None if made_later is None else Path(os.path.realpath(str(made_later)))
    if text.endswith(os.sep) or path.absolute() == later or (found and stat.S_ISDIR(found.st_mode)):
        raise InputError(f"{text} is a folder", fix=f"give a file name to {flag}")
    if not is_plain:
        raise InputError(f"{text} is not a plain file", fix=another)
    will_be_there = later is not None and Path(os.path.realpath(path.parent)) in (later, *later.parents)
    _check_folder(path.parent, text, another, made_later=will_be_there)
    if not in_run and _is_ours(path.parent):
        raise InputError(f"{text} is inside a run or reference folder, where nothing else may be written", fix=another)
    if found and not os.access(path, os.W_OK):
        raise InputError(f"{text} may not be written", fix=another)
    return Output(text, flag, path)


def _check_elsewhere(text: str, flag: str, *, in_run: bool) -> Output:
    """Checks a file behind a URI: the server must answer now. Whether we may write shows only later."""
    where = located(text)
    if isinstance(where, Path):
        return _checked(str(where), flag, None, in_run=in_run)
    if where.scheme in SERVERS or "/" not in where.path or text.endswith("/"):
        raise InputError(f"{where} is not a file that can be written", fix=f"give a file name to {flag}")
    problem = None if in_run else store_of(where).problem_with_output(where)
    if problem is not None:
        raise InputError(f"{where} {problem}", fix=f"give another file to {flag}")
    return Output(str(where), flag, Path(), place=where)


def _is_printed_to(found: os.stat_result) -> bool:
    """Does standard output or standard error go to this file? To replace it would lose what was printed."""
    for stream in (1, 2):
        with suppress(OSError):  # it may be closed
            if os.path.samestat(found, os.fstat(stream)):
                return True
    return False


def _check_folder(folder: Path, text: str, fix: str, *, made_later: bool) -> None:
    while made_later and not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}", fix="make it first, or " + fix)
    try:
        with TemporaryFile(dir=folder):  # os.access does not know of every reason
            pass
    except OSError:
        raise InputError(f"the folder {folder} may not be written", fix=fix) from None


def _is_ours(folder: Path) -> bool:
    """Is the folder a run or a reference, finished or not? A lone scores.parquet may come from another program."""
    manifest = folder / MANIFEST
    if (folder / JOURNAL).exists() or (manifest.exists() and (folder / SCORES).exists()) or is_reference(folder):
        return True
    try:
        return isinstance(read_object(manifest).get("identity"), dict)
    except (OSError, ValueError):
        return False
