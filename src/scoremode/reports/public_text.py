"""Names and commands for publication: without folders of this machine, buckets and hosts."""

from __future__ import annotations

import os
import re
import shlex
from functools import cache

from scoremode.core.extensions import BaselineOffer, FormatOffer, offered
from scoremode.core.models.names import reader_of
from scoremode.core.verbs.replicas import spread_options
from scoremode.errors import shortened

URI = re.compile(r"\b([a-z][a-z0-9+.-]*)://([^\s'\"]*[^\s'\",;().])", re.IGNORECASE)
SIGNED_IN = re.compile(r"^(?:[^/@]*|[^@]*:[^@]*)@")  # what stands before the host of a URI
HOST = re.compile(
    r"(?<![\w.:/-])(?:localhost|\d+(?:\.\d+){3}|[a-z][\w-]*(?:\.[\w-]+)+|\[[\da-f:]+\]):\d{2,5}\b(?!\.)", re.I
)
ANY_HOST = re.compile(r"[\w.-]+:\d{4,5}")  # where a whole word may be an address
# a path may go on after a space, if the next word has a slash; one that does not begin with a slash has two at least
PART = r"(?:[^\s'\",;()/\\]|\x20(?=[^\s/\\'\",;():]+[/\\]\w))+"
PATH = re.compile(
    rf"(?<![^\s:='\"(\[])(?:(?:~[\w.-]*|\.{{1,2}}|[A-Za-z]:)?[/\\](?![/\\])|[\w.-]+[/\\]{PART}[/\\]){PART}(?:[/\\]+(?:{PART})?)*"
)
LONGEST = 300  # characters of a name, and of a text in a command
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
PUBLIC = ("hf",)  # schemes whose addresses everybody may read
SERVERS = ("http", "https")
TEXT = "--text"  # its value is no name; a long one is cut, since records have its digest
OUTPUTS = {"--out", "--report", "--output", "-o", "--fail-if", "--write", "--api-key-env", "--token"}
SWITCHES = {"--markdown", "--model-index", "--json", "--fresh", "--quiet", "--verbose"}


@cache
def _left_out() -> tuple[set[str], set[str]]:
    """Flags that change no number or name a place of this machine: those with a value, and switches."""
    formats = offered(FormatOffer)
    places = {flag.split()[0] for kind in formats for flag in kind.compare if flag.endswith((" DIR", " FILE"))}
    addresses = {option.flag for option in spread_options().values() if option.details.metavar == "ADDRESS"}
    return OUTPUTS | places | addresses, SWITCHES | {f"--{kind.name}" for kind in formats if kind.layout}


def public_name(name: str) -> str:
    """The name of a model or a text without the folder it lies in; names on the hub stay.

    >>> public_name("/home/me/models/q4.gguf"), public_name("org/model"), public_name("s3://bucket/runs/q4")
    ('q4.gguf', 'org/model', 'q4')
    >>> public_name("quants/mine/q4"), public_name("wikitext2:/data/wiki.txt")
    ('q4', 'wikitext2:wiki.txt')
    """
    if is_public_name(name):
        return name
    if ANY_HOST.fullmatch(name):
        return "HOST"
    short = public_words(name)
    if ("/" in short or "\\" in short) and "://" not in short:
        files = (".gguf", ".txt", ".jsonl", *(kind.suffix for kind in offered(BaselineOffer)))
        is_local = not HUB_NAME.fullmatch(short) or short.endswith(files)
        if is_local or os.path.exists(short):
            return _last(short)
    return short


def is_public_name(name: str) -> bool:
    """Is this the name of a model that is not a path of this machine, as of a file on the hub?"""
    return len(name) <= LONGEST and not name.startswith("~") and name.isprintable() and reader_of(name) is not None


def public_words(text: str) -> str:
    """A sentence in which every path and private address is replaced by its last part."""
    for folder in (os.getcwd(), os.path.expanduser("~")):  # they may have spaces
        text = text.replace(f"{folder.rstrip(os.sep)}{os.sep}", os.sep) if len(folder) > 1 else text
    text = URI.sub(_public_uri, text)
    return HOST.sub("HOST", PATH.sub(lambda path: path[0] if is_public_name(path[0]) else _last(path[0]), text))


def _public_uri(match: re.Match[str]) -> str:
    scheme, rest = match[1].lower(), SIGNED_IN.sub("", re.split("[?#]", match[2])[0])
    if scheme in SERVERS:
        return f"{scheme}://HOST"  # of a server that scored: its address is nobody's business
    return f"{scheme}://{rest}" if scheme in PUBLIC else _last(rest)


def _last(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or path


def public_command(command: str) -> str:
    """A command without outputs, which change no number, and without folders.

    >>> public_command("scoremode compare org/m /home/me/q4 --corpus wikitext2 --out /tmp/x --json")
    'scoremode compare org/m q4 --corpus wikitext2'
    """
    try:
        tokens = shlex.split(command)
    except ValueError:  # a quote that is not closed: the tokens are not known
        return ""
    outputs, switches = _left_out()
    arguments, skips, before = list[str](), False, ""
    for token in tokens:
        if skips or token in switches or token.partition("=")[0] in outputs:
            skips = not skips and token in outputs
            continue
        flag, equals, value = token.partition("=") if token.startswith("--") else ("", "", token)
        is_text, before = TEXT in (flag, before), token
        arguments.append(f"{flag}{equals}{shortened(public_words(value), LONGEST) if is_text else public_name(value)}")
    return shlex.join(arguments)
