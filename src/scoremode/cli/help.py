"""Help that fits on a screen: the flags of every day and two examples. ``--help-all`` prints every flag."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from typing import Any

EVERYDAY = ("--help", "--help-all")


def add_help_flags(parser: Any) -> None:
    """Add ``--help`` and ``--help-all`` to a parser that was made without argparse's own help flag."""
    parser.add_argument("-h", "--help", action="help", help="show this page")
    about = "show every flag, those of each engine apart"
    nowhere = argparse.SUPPRESS
    parser.add_argument("--help-all", action=ShowEverything, nargs=0, dest=nowhere, default=nowhere, help=about)


class Formatter(argparse.HelpFormatter):
    """Shows a value once: ``-f, --corpus TEXT``, as Python does from 3.13 on."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = super()._format_action_invocation(action)
        return shown.replace(f" {action.metavar},", ",") if len(action.option_strings) > 1 else shown


class ShowEverything(argparse.Action):
    """An argparse action that prints the full help and ends the command."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.shows_all = True
        parser.print_help()
        parser.exit()


def verb_help(parser: argparse.ArgumentParser, everyday: Collection[str] | None, examples: Sequence[str]) -> str:
    """The help of a verb: flags in ``everyday`` alone, or all of them if it is None; then its examples."""
    formatter = parser._get_formatter()
    formatter.add_usage(_usage(parser), parser._actions, [])
    formatter.add_text(parser.description)
    # the flags that every verb has come last, before them those of one engine each
    groups = sorted(parser._action_groups[1:], key=lambda group: _place(parser, group))
    for group in [parser._action_groups[0], *groups]:
        shown = [action for action in group._group_actions if everyday is None or _is_shown(action, everyday)]
        if shown:
            titles = {parser._positionals: "arguments", parser._optionals: "more"}
            formatter.start_section(titles.get(group, group.title))
            formatter.add_text(group.description if everyday is None else None)
            formatter.add_arguments(shown)
            formatter.end_section()
    formatter.add_text(parser.epilog if everyday is None else None)
    return formatter.format_help() + _examples(examples)


def _is_shown(action: argparse.Action, everyday: Collection[str]) -> bool:
    return not action.option_strings or any(flag in (*EVERYDAY, *everyday) for flag in action.option_strings)


def _place(parser: argparse.ArgumentParser, group: argparse._ArgumentGroup) -> int:
    return 2 if group is parser._optionals else 1 if (group.title or "").startswith("engine ") else 0


def _usage(parser: argparse.ArgumentParser) -> str:
    """The usage with the names of the arguments alone; argparse would list every flag."""
    places = []
    for action in parser._positionals._group_actions:
        name = str(action.metavar or action.dest)
        many = f"{name} …" if action.nargs in ("+", "*") else name
        places.append(f"[{many}]" if action.nargs in ("?", "*") else many)
    needed = [action for action in parser._actions if action.required and action.option_strings]
    places += [f"{action.option_strings[0]} {action.metavar}" for action in needed]
    return " ".join(["%(prog)s", *places, "[flags]"])


def _examples(commands: Sequence[str]) -> str:
    return "\nexamples:\n" + "".join(f"  {command}\n" for command in commands) if commands else ""


def overview(parser: argparse.ArgumentParser, groups: Mapping[str, Collection[str]], examples: Sequence[str]) -> str:
    """The help of scoremode itself: the verbs in their groups."""
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, [])
    formatter.add_text(parser.description)
    for title, names in groups.items():
        formatter.start_section(title)
        formatter.add_arguments([choice for choice in verbs._choices_actions if choice.dest in names])
        formatter.end_section()
    formatter.start_section("more")
    formatter.add_arguments([action for action in parser._actions if action.option_strings])
    formatter.end_section()
    return formatter.format_help() + _examples(examples)
