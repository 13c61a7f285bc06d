"""``scoremode VERB …``: parse, run the verb, turn refusals into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import cache

from scoremode import errors
from scoremode.cli.parser import BAD_INPUT, MOST_REPEATED, Parser, add_help_flags, examples_help, in_our_words
from scoremode.console import signals, streams
from scoremode.console.flags import HAS_PAGES, Verb
from scoremode.core import extensions
from scoremode.core.extensions import FormatOffer, VerbEntry, offered
from scoremode.core.reading import text_waits
from scoremode.errors import ScoremodeError, did_you_mean, harmless, print_line
from scoremode.version import __version__


def _about_report() -> str:
    """The help of ``report``: files of wings that it shows, and the page if there is one."""
    files = [kind.report.partition(",")[0] for kind in offered(FormatOffer) if kind.report]
    page = " or as one HTML page" if HAS_PAGES else ""
    return f"{' or '.join(['runs that were kept with --out', *files])}, in the terminal{page}"


GROUPS: dict[str, dict[str, VerbEntry]] = {
    "score one model": {
        "ppl": VerbEntry("perplexity of a text by a named method", "cli.scoring_verbs:PplVerb"),
        "prob": VerbEntry("probability of targets after a prompt", "cli.scoring_verbs:ProbVerb"),
        "plan": VerbEntry(
            "a dry run: windows, targets, work and memory; loads no weights", "cli.scoring_verbs:PlanVerb"
        ),
    },
    "compare models": {
        "compare": VerbEntry(
            "what changed between a baseline and its candidates, with error bars", "cli.comparing_verbs:CompareVerb"
        ),
        "reference": VerbEntry(
            "score a text with a baseline and keep its hidden states for comparisons", "cli.scoring_verbs:ReferenceVerb"
        ),
    },
    "results": {
        "report": VerbEntry(_about_report(), "cli.comparing_verbs:ReportVerb"),
        "card": VerbEntry(
            "comparisons for a model card, in the dialects of publishers", "cli.comparing_verbs:CardVerb"
        ),
        "cache": VerbEntry(
            "what is kept in the cache folder; scoremode cache prune removes from it", "cli.listing_verbs:CacheVerb"
        ),
    },
    "with other programs": {},
    "this installation": {
        "info": VerbEntry("versions, devices, engines and methods of this installation", "cli.listing_verbs:InfoVerb"),
        "completion": VerbEntry(
            "print the script for tab completion in bash, zsh or fish", "cli.completion:CompletionVerb"
        ),
    },
}  # those of the core; wings add theirs
for group, added in extensions.verbs().items():
    GROUPS.setdefault(group, {}).update(added)
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}


@cache
def verb_of(name: str) -> Verb:
    """A verb by its name; its file is imported now."""
    verb: Verb = extensions.load(COMMANDS[name].code)()
    return verb


OUR_BUG = 70
STDIN = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")

EXAMPLES = (
    "scoremode ppl smollm2-135m --corpus python-docs --num-samples 5",
    "scoremode compare org/model model-Q4_K_M.gguf --corpus wikitext2",
)


class MainParser(Parser):
    """The parser of scoremode itself, whose help lists the verbs in groups."""

    def format_help(self) -> str:
        (verbs,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, [])
        formatter.add_text(self.description)
        for title, names in GROUPS.items():
            formatter.start_section(title)
            formatter.add_arguments([choice for choice in verbs._choices_actions if choice.dest in names])
            formatter.end_section()
        formatter.start_section("more")
        formatter.add_arguments([action for action in self._actions if action.option_strings])
        formatter.end_section()
        return formatter.format_help() + examples_help(EXAMPLES)


def build_parser(wanted: str | None = None) -> Parser:
    """Returns the parser of all verbs, or of the wanted one alone, which takes a tenth of the time."""
    parser = MainParser(
        prog="scoremode",
        description="Exactly what a language model, as it is served, thinks of a text.",
        usage="%(prog)s [-h] [--version] VERB …",
    )
    if wanted in COMMANDS:
        parser.all_verbs = lambda: build_parser().verbs()
    parser.add_argument("--version", action="version", version=f"scoremode {__version__}", help="show the version")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", prog="scoremode", parser_class=Parser)
    for name in [wanted] if wanted in COMMANDS else COMMANDS:
        verb, about = verb_of(name), COMMANDS[name].summary
        sub = verbs.add_parser(name, help=about, description=about, epilog=verb.epilog, add_help=False)
        sub.verb = verb
        verb.add_arguments(sub)
        if not verb.passes_all_on:
            streams.add_arguments(sub, short=not verb.passes_on)  # -q is another flag of what it passes on to
        add_help_flags(sub)
        sub.set_defaults(run=verb.run)
    return parser


def run(arguments: Sequence[str]) -> int:
    errors.names_flags = True
    streams.show_log()
    signals.everything_is_kept()
    try:
        _drop_unusable_threads()
        code = _run(list(arguments))
        sys.stdout.flush()  # a full disk shows here, where it can still be explained
    except SystemExit:  # nobody reads standard output any more
        return 0
    except BaseException as error:
        stopped = signals.exit_code()  # which has said so
        is_ours_to_tell = isinstance(error, Exception | KeyboardInterrupt) or _is_panic(error)
        if stopped is None and (os.environ.get("SCOREMODE_DEBUG") or not is_ours_to_tell):
            raise
        return _complain(*_explain(error)) if stopped is None else stopped
    return code


def _drop_unusable_threads() -> None:
    """Ignores an OMP_NUM_THREADS that torch's libraries would ignore too, each with a raw line of its own."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and not re.fullmatch(r"\s*0*[1-9]\d{0,5}\s*(,\s*\d{1,6}\s*)*", threads):
        del os.environ["OMP_NUM_THREADS"]
        if threads:
            print_line(f"scoremode: OMP_NUM_THREADS={threads[:40]} is not a number of threads, and is ignored")


def _run(arguments: list[str]) -> int:
    if arguments[:1] in (["help"], ["version"]):
        arguments = [*arguments[1:2], "--help"] if arguments[0] == "help" else ["--version"]
    if arguments and arguments[0] in COMMANDS and (verb := verb_of(arguments[0])).passes_all_on:
        return int(verb.run(argparse.Namespace(words=arguments[1:])) or 0)
    parser = build_parser(arguments[0] if arguments else None)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        return _complain(_no_command(*arguments))
    try:
        parsed = parser.parse_args(arguments)
    except SystemExit as ended:  # argparse has printed its help or its complaint
        return int(ended.code or 0)
    if parsed.verb is None:
        parser.print_help()
        return _complain("no command was given; type scoremode VERB, as in scoremode ppl MODEL --corpus wikitext2")
    if parsed.verbose and parsed.quiet:
        return _complain("--verbose and --quiet exclude each other; give one of them")
    streams.show_log(verbose=parsed.verbose, quiet=parsed.quiet)
    signals.everything_is_kept(fresh=bool(getattr(parsed, "fresh", False)))
    code = int(parsed.run(parsed) or 0)
    is_read = any(word.rpartition("=")[2] in STDIN for word in arguments)  # a file opened again has a place of its own
    if {"corpus", "prompt"} & vars(parsed).keys() and not is_read and text_waits():
        print_line("scoremode: nothing read the text on standard input; scoremode ppl MODEL --corpus - scores it")
    return code


def _no_command(name: str, *arguments: str) -> str:
    """What to type instead of a command that there is not, or no longer."""
    from scoremode.cli import other_tools
    from scoremode.core.disk.manifests import command_without_secrets  # heavy

    typed = shlex.join(command_without_secrets(list(arguments)))
    typed = typed if len(typed) <= MOST_REPEATED else ""
    if renamed := [verb.renamed[name] for verb in map(verb_of, COMMANDS) if name in verb.renamed]:
        now, usual = renamed[0]
        return f"{name} is part of another command now; type scoremode {now.format(typed or usual).rstrip()}"
    meant = [verb for verb in other_tools.VERBS.get(name, "").split() if verb in COMMANDS]
    instead = f"did you mean {' or '.join(meant)}?" if meant else did_you_mean(name, COMMANDS)
    if len(meant) == 1:
        chosen = (verbs := build_parser().verbs())[meant[0]]
        command = f"{chosen.prog} {typed}" if typed else verb_of(meant[0]).examples[0]
        meanings = in_our_words(arguments, chosen, verbs)
        instead = f"type {command}" if meanings is None else meanings
        instead = instead if "type " in instead else f"type {chosen.prog}; {meanings}"
    return f"there is no command '{name}'; {instead}"


def _complain(line: str, code: int = BAD_INPUT) -> int:
    with contextlib.suppress(OSError):  # there is no stream left to write to
        print(streams.for_terminal(f"scoremode: {harmless(' '.join(line.split()))}"), file=sys.stderr, flush=True)
    return code


def _explain(error: BaseException) -> tuple[str, int]:
    """One line that says what happened and what to do, and the exit code."""
    cause = f"{type(error).__name__}: {error}".split("\n")[0][:300]
    match error:
        case KeyboardInterrupt():
            return signals.line(), 130
        case ScoremodeError():
            line = str(error)
        case OSError():
            line = _explain_os_error(error)
        case MemoryError():
            line = "this machine's memory is used up; try a smaller --context-length or --num-samples"
        case _ if _is_panic(error):
            line = f"a library failed ({cause}); check the model's tokenizer.json and the text"
        case _:
            return f"this is a bug in scoremode ({cause}); set SCOREMODE_DEBUG=1 to see where", OUR_BUG
    return line, BAD_INPUT


def _is_panic(error: BaseException) -> bool:
    """Did a Rust library, such as tokenizers, panic? PanicException is no Exception, and it cannot be imported."""
    return type(error).__name__ == "PanicException"


def _explain_os_error(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space and run the same command again to resume"
    if error.errno == errno.ENAMETOOLONG:
        return f"a name is longer than a file's may be ({str(error.filename)[:40]}…); give a shorter one"
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}; check the path and its permissions"
