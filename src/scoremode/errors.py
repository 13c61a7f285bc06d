"""Everything scoremode refuses, each with one line saying what is wrong and one saying what to type next.

Every error is a ScoremodeError. The command line catches it in one place: exit code 2, never a traceback.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LOGGER = logging.getLogger("scoremode")
# A library is silent unless its user configures logging. This is here and not in the package's __init__, because
# importing logging takes ten times as long as that; every module that logs is loaded together with this one.
LOGGER.addHandler(logging.NullHandler())

_aliases: dict[str, str] = {}  # copies, and what the user calls what they are copies of


def alias_path(copy: str, name: str) -> None:
    """From now on, messages say ``name`` instead of ``copy``, a path in the cache that users do not know."""
    if copy != name:
        _aliases[copy] = name


def with_aliases(text: str) -> str:
    """A message in which paths of the cache are replaced by the names that the user gave."""
    for copy, name in _aliases.items():
        if copy in text:
            text = text.replace(copy, name)
    return text


names_flags = False  # the command line sets it; errors of Python functions name arguments instead
switches = {"fresh", "assistant_only", "add_bos"}  # flags without a value; engines add theirs
FLAG = re.compile(
    r"(?P<command>\b(?:scoremode|pip|ray|llama-[a-z]+) [a-z][^;,]*|start (?:it|the server)[^;]*)"  # is typed as it is
    r"|(?P<verb>\b(?:add|as in|give|needs|of|or|try|use|with) )?--(?P<name>[a-z][a-z0-9-]*)\b(?!_)"
    r"(?: (?P<value>\d[\w.]*|[A-Z][\w-]*|"
    r"(?(verb)(?!(?:a|and|as|for|or|out|that|to|which|without)\b)[a-z][\w./:-]*|$))(?![\w=]))?"
)


def in_python(text: str) -> str:
    """A message about flags for people who call functions.

    >>> in_python("--stride 9 never advances; use --method gptq, or give --corpus NAME-or-FILE with --fresh")
    'stride=9 never advances; use method="gptq", or give corpus="NAME-or-FILE" with fresh=True'
    >>> in_python("leave --field out, or type: scoremode ppl MODEL --corpus -")
    'leave field out, or type: scoremode ppl MODEL --corpus -'
    """

    def replacement(match: re.Match[str]) -> str:
        if match["command"]:
            return match[0]
        verb, name, value = match["verb"] or "", match["name"].replace("-", "_"), match["value"]
        if value:
            name += f"={value}" if value == "N" or value[0].isdigit() else f'="{value}"'
        elif verb and name in switches:
            name += "=True"
        return verb + name

    return FLAG.sub(replacement, text)


UNPRINTABLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


class ScoremodeError(Exception):
    """A refusal that a user can act on: ``fix`` says what to type next."""

    def __init__(self, message: str, *, fix: str = "") -> None:
        self.message = one_line(with_aliases(message))  # it may quote a file, and a file may hold anything
        self.fix = one_line(with_aliases(fix))
        super().__init__(self.message)

    def __str__(self) -> str:
        line = f"{self.message}; {self.fix}" if self.fix else self.message
        return line if names_flags else in_python(line)


class InputError(ScoremodeError):
    """What the user gave cannot be used."""


class CorpusError(InputError):
    """The text is missing, empty, damaged or too short."""


class MethodError(InputError):
    """The method is unknown, or does not allow a setting."""


class ModelError(InputError):
    """The model or its tokenizer is missing, incomplete or does not fit."""


class OptionError(InputError):
    """A flag or argument does not apply here."""


class UnknownArgumentError(OptionError, TypeError):
    """A function of scoremode has no argument of that name."""


class WrongTypeError(OptionError, TypeError):
    """An argument, or a part of one, has another type than the function declares."""

    def __init__(self, name: str, shown: str, declared: str) -> None:
        super().__init__(f"{name} is {shown}, which is not {declared}", fix="give one")
        self.name = name


class BoundaryError(ScoremodeError):
    """A token spans the end of the prompt and the caller asked to refuse that."""


class EngineError(ScoremodeError):
    """The engine stopped, or gave something that is not a score."""


class UntrustedError(EngineError):
    """What the engine gave contradicts itself. None of its scores can be believed, and a run keeps none of them."""


class CandidatesError(ScoremodeError):
    """Some candidates of a comparison failed. The others were finished: their results are in ``found``, by name.

    ``unwritten`` is set if files that a comparison leaves could not be written.
    """

    def __init__(
        self,
        found: Mapping[str, Any],
        failed: Mapping[str, ScoremodeError],
        unwritten: ScoremodeError | None = None,
    ) -> None:
        self.found, self.failed, self.unwritten = dict(found), dict(failed), unwritten
        if unwritten is not None and not failed:
            super().__init__(f"the comparison is finished, but {unwritten.message}", fix=unwritten.fix)
            return
        reasons = " | ".join(f"{name}: {error}" for name, error in self.failed.items())
        super().__init__(
            f"{len(self.failed)} of {len(self.found) + len(self.failed)} candidates could not be scored: {reasons}",
            fix="run the same command again" + (": it scores only what is missing" if self.found else ""),
        )


class RunError(ScoremodeError):
    """A run folder is damaged, was not made by scoremode, or cannot be written."""


class NotMeasuredError(RunError, AttributeError):
    """A result does not have this number: it was not measured, or it is not known."""


class StorageError(ScoremodeError):
    """A file or folder behind a URI cannot be read or written."""


def one_line(text: str) -> str:
    """Text on one line, harmless to a terminal; line ends and tabs become spaces.

    >>> one_line("two\\nlines \\x1b[2J")
    'two lines �[2J'
    """
    return harmless(" ".join(text.splitlines()).replace("\t", " "))


def harmless(text: str) -> str:
    """Untrusted text without control characters, which a terminal would obey, and without line ends."""
    if text.isprintable():
        return text
    return "".join(c if unicodedata.category(c) not in UNPRINTABLE else "�" for c in text)


def readable(text: str) -> str:
    """Text that can be stored as UTF-8. Names of files may have other bytes, or bytes that this locale did not decode.

    >>> readable("caf\\udcc3\\udca9"), readable("\\udcff"), readable("\\ud800")
    ('café', '�', '���')
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def escaped(text: str) -> str:
    """Text that is safe to print: control characters except line ends and tabs are escaped as in JSON.

    >>> escaped("red\\x1b[31m 😀\\n") == "red\\\\u001b[31m 😀\\n"
    True
    """
    if text.isprintable() or text.replace("\n", "").isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in UNPRINTABLE else escape(c) for c in text)


def columns_of(stream: Any) -> int | None:
    """The width that COLUMNS or the stream's terminal gives; None if neither does."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return (os.get_terminal_size(stream.fileno()).columns or None) if stream.isatty() else None
    except (OSError, ValueError):  # it is closed, or no file
        return None


def escape(character: str) -> str:
    """A character in ASCII, as JSON escapes it.

    >>> escape("é"), escape("😀")
    ('\\\\u00e9', '\\\\ud83d\\\\ude00')
    """
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i] << 8 | units[i + 1]:04x}" for i in range(0, len(units), 2))


def shortened(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def listed(names: Sequence[str], last: str = "and") -> str:
    """Joins names for use in a sentence.

    >>> listed(("logprob", "rank", "entropy"))
    'logprob, rank and entropy'
    """
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def few(names: Sequence[str], most: int = 8) -> str:
    """The first names of a list that may be long and come from anywhere, and how many more there are.

    >>> few(["a", "b", "c"], 2)
    'a, b, … and 1 more'
    """
    left_out = len(names) - most
    return ", ".join(shortened(name, 200) for name in names[:most]) + (f", … and {left_out:,} more" * (left_out > 0))


def print_line(line: str) -> None:
    """Logs a warning that the command line prints as it is, even without ``scoremode: `` before it."""
    LOGGER.warning(line.removeprefix("scoremode: "), extra={"line": line})


def did_you_mean(word: str, choices: Iterable[str], otherwise: str = "") -> str:
    """``did you mean 'gptq'?`` if a choice is similar, else another hint, or a list of all choices."""
    names = sorted(choices)
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else otherwise or f"known: {', '.join(names)}"
