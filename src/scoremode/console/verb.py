"""A command of the command line, as the core and each wing hand it over."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import ClassVar


class Verb:
    """A command of the command line: its help, its flags, and its work; its ``VerbEntry`` has its line of help."""

    epilog: str | None = None
    examples: tuple[str, ...] = ()  # two, or one where there is nothing else to show
    everyday: tuple[str, ...] | None = None  # flags that --help shows; None: all of them. --help-all shows all
    passes_on = False  # are flags that are not ours those of another program?
    passes_all_on = False  # are all of them? ``words`` has them
    prints_json = True  # has it --json?
    renamed: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Commands of older versions that are part of this one: what to type now, with {} for the words after the name, and
    the words to show where none were typed."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        raise NotImplementedError

    def instead(self, flag: str) -> str | None:
        """What to type instead of a flag that the verb does not have, or no longer has; None: nothing is known."""
        return None

    def run(self, parsed: argparse.Namespace) -> int | None:
        """Does the work and prints the result; returns the exit code if it is not 0."""
        raise NotImplementedError
