"""Replaces the part of a README between two markers, and leaves every other byte of the file alone."""

from __future__ import annotations

import codecs
from pathlib import Path

from scoremode.core.disk.uri import is_uri
from scoremode.core.store.runs import is_run
from scoremode.core.verbs.outputs import Output, check_output
from scoremode.errors import InputError

MARKERS = ("<!-- scoremode begin -->", "<!-- scoremode end -->")
YAML_MARKERS = ("# scoremode begin", "# scoremode end")
UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def run_folders(folders: list[str]) -> list[str]:
    """The runs that were named, baseline first; for the folder of ``compare --out``, the runs inside it."""
    if len(folders) > 1 or is_uri(folders[0]) or is_run(folders[0]) or not is_run(Path(folders[0], "baseline")):
        return folders
    inside = sorted(p for p in Path(folders[0]).iterdir() if p.is_dir() and p.name != "baseline" and is_run(p))
    return [str(Path(folders[0], "baseline")), *map(str, inside)]


def check_readme(name: str, markers: tuple[str, str]) -> Output:
    """Checks the file of ``--write`` before any column is read; InputError says what to add to it."""
    output = check_output(name, "--write", is_ours=lambda output: True)  # only what is between its markers is replaced
    if output.is_stream or output.place is not None:
        raise InputError(f"{name} is not a file on this machine", fix="give --write a README.md")
    _parts(output, markers)
    return output


def replace_between(output: Output, text: str, markers: tuple[str, str]) -> bool:
    """Writes the text between the markers; returns whether the file changed.

    The text gets the file's line endings and its encoding. Characters that the encoding lacks become entities, which
    Markdown shows as the character.
    """
    before, between, after, encoding = _parts(output, markers)
    end = "\r\n" if "\r\n".encode(encoding) in between else "\n"
    lines = f"\n{text.strip()}\n".replace("\n", end)
    new = before + lines.encode(encoding, "xmlcharrefreplace") + after
    if new == before + between + after:
        return False
    output.write(new)
    return True


def _parts(output: Output, markers: tuple[str, str]) -> tuple[bytes, bytes, bytes, str]:
    """The bytes up to the end of the first marker, those between, those from the second marker on, and the encoding."""
    name, (begin, end) = output.name, markers
    add = f"add these two lines where the results belong: {begin} and {end}"
    try:
        content = output.path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no file {name}", fix=f"create it, then {add}") from None
    except OSError as error:
        raise InputError(f"{name} cannot be read ({error.strerror})", fix="give another file to --write") from None
    encoding = UTF16.get(content[:2]) or _encoding(content)
    first, last = begin.encode(encoding), end.encode(encoding)
    counts = content.count(first), content.count(last)
    if counts == (0, 0):
        raise InputError(f"{name} has no place for the results", fix=add)
    start = content.find(first) + len(first)
    if counts != (1, 1) or content.find(last) < start:
        raise InputError(f"{name} does not have one {begin} and after it one {end}", fix="leave one of each, in order")
    stop = content.find(last)
    return content[:start], content[start:stop], content[stop:], encoding


def _encoding(content: bytes) -> str:
    try:
        content.decode()
    except UnicodeDecodeError:
        return "ascii"  # unknown: what is written is ASCII, which all of these encodings contain
    return "utf-8"
