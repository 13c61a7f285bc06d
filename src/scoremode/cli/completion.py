"""``scoremode completion SHELL`` prints a script that completes verbs, flags, names and files; shtab writes it.

The script is fixed text: a TAB starts no Python. It has the flags of the plug-ins that are installed when it is made.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

from scoremode.console.flags import Verb
from scoremode.core.typed import typed
from scoremode.errors import InputError, OptionError, did_you_mean

SHELLS = ("bash", "zsh", "fish")
FILES = ("FILE", "DIR", "FOLDER", ".jsonl", "MODEL", "BASELINE", "CANDIDATE", "RUN")
"""What the values of flags and arguments that name files have in their names."""


class CompletionVerb(Verb):
    examples = (
        'eval "$(scoremode completion bash)"',
        "scoremode completion fish > ~/.config/fish/completions/scoremode.fish",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")

    def run(self, parsed: argparse.Namespace) -> None:
        sys.stdout.write(completion(parsed.shell))


@typed
def completion(shell: str) -> str:
    """Returns the script that completes commands in ``shell`` (bash, zsh or fish); it needs the package shtab.

    >>> "scoremode" in completion("bash")
    True
    """
    if shell not in SHELLS:
        raise OptionError(f"there is no completion for '{shell}'", fix=did_you_mean(shell, SHELLS))
    if importlib.util.find_spec("shtab") is None:
        raise InputError("tab completion needs the package shtab", fix="pip install 'shtab>=1.13,<2'")
    import shtab

    from scoremode.cli.commands import build_parser

    parser = build_parser()
    for verb in parser.verbs().values():
        for action in verb._actions:
            _name_values(action, shtab.FILE)
    return str(shtab.complete(parser, shell))


def _name_values(action: Any, files: dict[str, str]) -> None:
    """Tell shtab which values an argument may have: names that are known here, or files."""
    from scoremode.core.engine.registry import known_engines
    from scoremode.core.plan.recipes import METHODS

    if action.dest in ("method", "name"):
        action.choices = sorted(METHODS)
    elif action.dest in ("engine", "baseline_engine"):
        action.choices = sorted(known_engines())
    elif action.dest == "corpus" or any(word in str(action.metavar) for word in FILES):
        action.complete = files
