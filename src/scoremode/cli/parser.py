"""argparse for people who mistype: one line for each mistake, with the nearest flag, and nothing dropped silently.

Flags are never abbreviated: ``--max 5`` could be three of them, and a command that is kept in a script or a model card
must mean the same when a flag is added.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from scoremode.console.flags import Verb
from scoremode.console.streams import for_terminal
from scoremode.core.arguments import STORES
from scoremode.errors import few, harmless, listed, one_line, shortened

BAD_INPUT = 2
FLAG = re.compile(r"--[a-z][\w-]*")
MAY_BE_EMPTY = {"prompt", "target", "text", "fail_if"}  # a prompt may be empty; the verbs refuse the others themselves
TAKE_URIS = {
    *("corpus", "out", "report", "output", "file", "run_folder", "run_folders", "baseline", "candidates", "engine_arg"),
    *MAY_BE_EMPTY,
}
STORED = re.compile(rf"({'|'.join(STORES)})://", re.IGNORECASE)
OUTPUTS = {"out", "report", "output"}  # the arguments in TAKE_URIS that are written to
MOST_REPEATED = 300  # characters of a command that an answer repeats
LONGEST = 400  # characters of a complaint: an argument may be a whole book
EVERYDAY = ("--help", "--help-all")


class Once(argparse.Action):
    """An argparse action that stores a value and refuses a flag given twice: one value would be dropped silently."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        destinations: set[str] = namespace.__dict__.setdefault("given_once", set())
        if option_string is not None and self.dest in destinations:
            parser.error(f"{option_string} is given twice")
        destinations.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """argparse, with its complaints on one line and no usage dump before them."""

    verb = Verb()  # whose flags it reads; that of scoremode itself has none
    all_verbs: Callable[[], dict[str, Parser]] | None = None  # where this parser has one verb alone
    shows_all = False  # does its help show every flag?

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": HelpFormatter, **kwargs})
        for name in (None, "store"):
            self.register("action", name, Once)

    def format_help(self) -> str:
        """The help of a verb: its everyday flags alone, or all of them; then its examples."""
        everyday = None if self.shows_all or self.verb.everyday is None else {*EVERYDAY, *self.verb.everyday}
        formatter = self._get_formatter()
        formatter.add_usage(_usage(self), self._actions, [])
        formatter.add_text(self.description)
        # the flags that every verb has come last, before them those of one engine each
        groups = sorted(self._action_groups[1:], key=lambda group: _place(self, group))
        for group in [self._action_groups[0], *groups]:
            actions = group._group_actions
            shown = [a for a in actions if everyday is None or not a.option_strings or everyday & {*a.option_strings}]
            if shown:
                titles = {self._positionals: "arguments", self._optionals: "more"}
                formatter.start_section(titles.get(group, group.title))
                formatter.add_text(group.description if everyday is None else None)
                formatter.add_arguments(shown)
                formatter.end_section()
        formatter.add_text(self.epilog if everyday is None else None)
        passes = self.verb.passes_on or self.verb.passes_all_on  # else flags of an example may have gone with a wing
        examples = [line for line in self.verb.examples if passes or {*FLAG.findall(line)} <= self.flags()]
        return formatter.format_help() + examples_help(examples)

    def error(self, message: str) -> NoReturn:
        line = shortened(one_line(f"{self.prog}: {self._plainly(message)}"), LONGEST)
        self.exit(BAD_INPUT, for_terminal(f"{harmless(line)}; see {self.prog} --help") + "\n")

    def _plainly(self, message: str) -> str:
        """Rewords a message of argparse in scoremode's style."""
        required = "the following arguments are required: "
        if message.startswith(required):
            names = message.removeprefix(required)
            asks = "--corpus" in self.flags() and not names.startswith("-")
            places = [_name_of(action) for action in self._actions if not action.option_strings]
            hint = f"; as in {self.prog} {' '.join(places)} --corpus FILE" if asks else ""
            return f"{names} {'are' if ', ' in names else 'is'} missing{hint}"
        if message.startswith("argument -") and message.endswith("expected one argument"):
            flag = message.removeprefix("argument ").split(":")[0].split("/")[-1]
            return f"{flag} needs a value; one that begins with '-' is given as {flag}=VALUE"
        return message.removeprefix("argument ")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        argv = list(sys.argv[1:] if args is None else args)
        verbs = self.verbs()
        if verbs and argv and argv[0].startswith("-") and argv[0] not in self.flags():
            self.error(_unknown(argv, argv, self, verbs))
        if self.verb.passes_on and argv and argv[0].startswith("-") and argv[0].split("=")[0] not in self.flags():
            self.error(f"the model comes first, as in {self.prog} MODEL {argv[0]} …")
        parsed, unknown = self._parse(argv, namespace)
        if unknown and verbs:
            chosen = verbs.get(parsed.verb, self)
            if chosen.verb.passes_on:
                parsed.passed_on = unknown
                return parsed, []
            chosen.error(_unknown(unknown, argv[1:], chosen, self.all_verbs() if self.all_verbs else verbs))
        parsed.__dict__.pop("given_once", None)
        return parsed, unknown

    def _parse(self, argv: list[str], namespace: argparse.Namespace | None) -> tuple[argparse.Namespace, list[str]]:
        """Parses as argparse does, but reports missing arguments last: a mistyped flag is the likelier reason."""
        required = [a for a in self._actions if a.required]
        for action in required:
            action.required = False
        try:
            parsed, unknown = super().parse_known_args(argv, namespace)
        finally:
            for action in required:
                action.required = True
        self._refuse_unusable(parsed)
        if unknown or all(getattr(parsed, action.dest) is not None for action in required):
            return parsed, unknown
        return super().parse_known_args(argv, namespace)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """No value is glued to its flag: argparse reads ``-fa on``, llama.cpp's flash attention, as ``-f a``."""
        return []

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and arg_strings == ["--"]:  # some versions of argparse drop it and store []
            self.error(f"{_name_of(action)} needs a value, and -- is none")
        return super()._get_values(action, arg_strings)

    def _refuse_unusable(self, parsed: argparse.Namespace) -> None:
        for action in self._actions:
            value = getattr(parsed, action.dest, None)
            if action.dest not in MAY_BE_EMPTY and (value == "" or (isinstance(value, list) and "" in value)):
                self.error(f"{_name_of(action)} is empty")
            values = value if isinstance(value, list) else [value]
            if action.dest not in TAKE_URIS and any(isinstance(uri, str) and STORED.match(uri) for uri in values):
                self.error(f"{_name_of(action)} takes no URI; give a name or a path of this machine")
            if action.dest in OUTPUTS and isinstance(value, str) and value.lower().startswith("memory://"):
                self.error(f"{_name_of(action)} memory:// would be lost with this process; give a path or another URI")

    def verbs(self) -> dict[str, Parser]:
        """The parsers of the verbs; none in the parser of a verb."""
        subparsers = [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        return dict(subparsers[0].choices) if subparsers else {}

    def flags(self) -> set[str]:
        return {flag for action in self._actions for flag in action.option_strings}


def _name_of(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def _unknown(unknown: list[str], typed: list[str], chosen: Parser, verbs: dict[str, Parser]) -> str:
    """The message about unknown arguments: what was probably meant, or which verb a flag belongs to.

    ``typed`` is all that was typed after the verb.
    """
    flag = next((a.split("=")[0] for a in unknown if a.startswith("-") and a not in ("-", "--")), None)
    if flag is None:
        return _not_taken(unknown[0], typed, chosen)
    if chosen.verbs():
        return f"{flag} is not a flag of scoremode itself; a command comes first, as in scoremode ppl MODEL {flag}"
    near = _nearest(flag, chosen)
    if (instead := chosen.verb.instead(flag)) is not None and not near:
        return f"{flag} is no flag of {chosen.prog}; {instead}"
    if (meant := in_our_words(typed, chosen, verbs)) is not None:
        return meant
    owners = [f"scoremode {name}" for name, verb in verbs.items() if flag in verb.flags()]
    if owners:
        return f"{flag} belongs to {few(owners, 2) if len(owners) > 2 else listed(owners)}"
    return f"there is no flag {flag}" + (f"; did you mean {listed(near, 'or')}?" if near else "")


def _nearest(flag: str, chosen: Parser) -> list[str]:
    """At most two flags that begin like this one; if there are none, the one with the most similar spelling."""
    flags = [f for action in chosen._actions for f in action.option_strings if f.startswith("--")]
    word = "--" + flag.lower().replace("_", "-").lstrip("-")
    similar = difflib.get_close_matches(word, flags, n=1, cutoff=0.7)
    return [] if len(flag) == 2 else [f for f in flags if f.startswith(word)][:2] or similar


def in_our_words(typed: Iterable[str], chosen: Parser, verbs: Mapping[str, Parser]) -> str | None:
    """What to type instead of the arguments of a verb; None if they have no words of other tools."""
    from scoremode.cli.other_tools import FLAGS, NAMED

    flags, everything = chosen.flags(), {*verbs}.union(*(verb.flags() for verb in verbs.values()))
    flags |= {"MODEL" for action in chosen._actions if action.dest in ("model", "baseline")}
    meant, command, is_clear = list[str](), [chosen.prog], True
    for word in typed:
        flag, equals, value = word.partition("=")
        names = [ours for ours, theirs in FLAGS.items() if flag.replace("_", "-") in theirs.split()]
        names = [ours for ours in names if ours in flags or (" " in ours and {*NAMED.findall(ours)} <= everything)]
        if flag in flags or not names:
            command.append(word)
            is_clear &= flag in flags or re.match(r"-[^\d.]", word) is None
            continue
        if " " in names[0]:
            return f"there is no flag {flag}; {names[0]}"
        meant.append(f"{flag} is {' or '.join(names)}")
        command += [value] * bool(equals) if names == ["MODEL"] else [names[0] + equals + value]
    from scoremode.core.disk.manifests import command_without_secrets  # heavy

    line, meanings = shlex.join(command_without_secrets(command[1:])), f"{', '.join(meant)} here"
    if not is_clear or any(" or " in meaning for meaning in meant) or len(line) > MOST_REPEATED:
        return meanings if meant else None
    line = f"type {command[0]} {line}"
    return (f"{meanings}; {line}" if len(meanings) + len(line) < LONGEST - 50 else line) if meant else None


def _not_taken(word: str, typed: list[str], chosen: Parser) -> str:
    """What to type instead of an argument too many: most are a text, or another model."""
    from scoremode.core.text.corpus import TEXTS, corpora

    flags, line = chosen.flags(), f"nothing takes the argument '{word}'"
    before = typed[typed.index(word) - 1] if typed.index(word) else ""
    if any(before in action.option_strings and action.nargs == 0 for action in chosen._actions):
        return f"{line}: {before} has no value"
    if any(action.nargs == "+" and not action.option_strings for action in chosen._actions):
        return f"{line}; all candidates stand together, before the flags"
    if "--corpus" not in flags:
        return line + '; as in --prompt "1 + 1 =" --target " 2"' * ("--target" in flags)
    if {"-f", "--corpus", "--text", "--dataset"} & {part.partition("=")[0] for part in typed}:
        return f"{line}; several files are one corpus as a folder or a pattern, as in --corpus 'notes/*.txt'"
    if word in corpora().found or word.lower().endswith((*TEXTS, ".raw")):
        return f"{line}; a text is given as --corpus {shlex.quote(word)}"
    return f"{line}: one model is scored; scoremode compare BASELINE CANDIDATE … takes several"


# ── help: the flags of every day and two examples; --help-all prints every flag ──────────────────────────────────────
def add_help_flags(parser: Any) -> None:
    """Add ``--help`` and ``--help-all`` to a parser that was made without argparse's own help flag."""
    parser.add_argument("-h", "--help", action="help", help="show this page")
    about = "show every flag, those of each engine apart"
    nowhere = argparse.SUPPRESS
    parser.add_argument("--help-all", action=ShowEverything, nargs=0, dest=nowhere, default=nowhere, help=about)


class HelpFormatter(argparse.HelpFormatter):
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


def examples_help(commands: Sequence[str]) -> str:
    return "\nexamples:\n" + "".join(f"  {command}\n" for command in commands) if commands else ""
