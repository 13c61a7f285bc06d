"""``scoremode VERB …``: parse, run the verb, turn refusals into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scoremode import __version__
from scoremode.cli import comparing_verbs as comparing
from scoremode.cli import forwarding_verbs as forwarding
from scoremode.cli import listing_verbs as listing
from scoremode.cli import prob, signals, streams
from scoremode.cli import scoring_verbs as scoring
from scoremode.cli.parser import BAD_INPUT, Parser
from scoremode.errors import ScoremodeError, did_you_mean, harmless


@dataclass(frozen=True, slots=True)
class Verb:
    """A command: its summary and epilog in the help (docstrings are gone under python -OO), its flags, its work."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    epilog: str | None = None
    passes_on: bool = False  # are flags that are not ours those of another program?


VERBS = {
    "ppl": Verb("perplexity of a text by a named method", scoring.add_ppl, scoring.run_ppl, scoring.PPL_EPILOG),
    "prob": Verb("probability of targets after a prompt", prob.add_prob, prob.run_prob, prob.PROB_EPILOG),
    "compare": Verb(
        "what changed between a baseline and its candidates, with errors",
        *(comparing.add_compare, comparing.run_compare, comparing.COMPARE_EPILOG),
    ),
    "tasks": Verb(
        "candidates against a baseline on tasks of lm-eval: recovery and flips, with errors",
        *(comparing.add_tasks, comparing.run_tasks, comparing.TASKS_EPILOG),
    ),
    "reference": Verb(
        "score a text with a baseline and keep its hidden states for comparisons",
        *(scoring.add_reference, scoring.run_reference, scoring.REFERENCE_EPILOG),
    ),
    "report": Verb("runs and comparisons as one HTML page", comparing.add_report, comparing.run_report),
    "plan": Verb(
        "a dry run, windows, targets, work and memory, with no weight loaded", scoring.add_plan, scoring.run_plan
    ),
    "noise": Verb(
        "how far scores move when only the engine's settings do",
        *(scoring.add_noise, scoring.run_noise, scoring.NOISE_EPILOG),
    ),
    "lm-eval": Verb(
        "lm-evaluation-harness's own command line, with its tasks scored by any engine here",
        *(forwarding.add_lm_eval, lambda parsed: forwarding.run_lm_eval(parsed.words)),
    ),
    "serve": Verb(
        "load a model once, and answer many clients over HTTP",
        *(forwarding.add_serve, forwarding.run_serve, forwarding.SERVE_EPILOG),
        passes_on=True,
    ),
    "methods": Verb(
        "the named recipes, or one of them with its windows drawn", listing.add_methods, listing.run_methods
    ),
    "show": Verb("a run that was kept with --out", listing.add_show, listing.run_show),
    "cache": Verb(
        "what is kept in the cache folder; scoremode cache prune removes from it",
        *(listing.add_cache, listing.run_cache, listing.CACHE_EPILOG),
    ),
    "engines": Verb("what can turn a plan into scores here", listing.add_engines, listing.run_engines),
    "doctor": Verb(
        "versions, devices, and a self-test of every engine that is installed",
        *(listing.add_doctor, listing.run_doctor, listing.DOCTOR_EPILOG),
    ),
}
TAKES_OTHERS = ("lm-eval", "serve")  # these have no --json, and flags that are not ours go to another program
OUR_BUG = 70

EXAMPLES = """examples:
  scoremode ppl smollm2-135m --corpus python-docs --num-samples 5
  scoremode ppl MODEL --corpus wikitext2 --method exl3-2025 --context-length 2048 --stride 512 --out runs/base
  scoremode prob smollm2-135m --prompt "The capital of France is" --target " Paris" --target " London"
  scoremode compare BASELINE CANDIDATE --corpus wikitext2 --report report.html
  scoremode plan MODEL --corpus wikitext2 --method llamacpp
"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scoremode",
        description="Exactly what a language model, as it is served, thinks of a text.",
        usage="%(prog)s [-h] [--version] VERB …",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"scoremode {__version__}")
    # the column is as wide as the longest name here; argparse does not count the verbs themselves
    verbs = parser.add_subparsers(dest="verb", metavar="VERB          ", prog="scoremode", parser_class=Parser)
    for name, verb in VERBS.items():
        its = verbs.add_parser(name, help=verb.summary, description=verb.summary, epilog=verb.epilog)
        its.passes_on = verb.passes_on
        verb.add_arguments(its)
        its.set_defaults(run=verb.run)
    return parser


def run(arguments: Sequence[str]) -> int:
    """Run a command line; the exit code."""
    try:
        code = _run(list(arguments))
        streams.check()  # a full disk or a closed pipe shows here, where it can still be explained
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("SCOREMODE_DEBUG"):
            raise
        return _end_with(error)
    return code


def _end_with(error: Exception | KeyboardInterrupt) -> int:
    """Say what happened; the exit code."""
    stopped = signals.tell_if_stopped()
    if stopped is not None:
        return stopped
    explained = _explain(error)
    if isinstance(error, OSError):
        the_reader_left = isinstance(error, BrokenPipeError) and streams.is_output_failure(error)
        streams.silence_output()
        if the_reader_left:  # as in ``| head -1``: nothing more to say to it
            return 0
    return _complain(*explained)


def _run(given: list[str]) -> int:
    if given and given[0] == "lm-eval":  # all of its flags are another program's
        return forwarding.run_lm_eval(given[1:])
    parser = build_parser()
    if given and not given[0].startswith("-") and given[0] not in VERBS:
        return _complain(f"there is no command '{given[0]}'; {did_you_mean(given[0], VERBS)}")
    try:
        parsed = parser.parse_args(given)
    except SystemExit as ended:  # argparse has printed its help or its complaint
        return int(ended.code or 0)
    if parsed.verb is None:
        parser.print_help()
        streams.check()
        return _complain("no command was given; type scoremode VERB, as in scoremode ppl MODEL --corpus wikitext2")
    return int(parsed.run(parsed) or 0)


def _complain(line: str, code: int = BAD_INPUT) -> int:
    with contextlib.suppress(OSError):  # there is no stream left to write to
        print(f"scoremode: {harmless(' '.join(line.split()))}", file=sys.stderr, flush=True)
    return code


def _explain(error: BaseException) -> tuple[str, int]:
    """What happened and what to do, in one line, and the exit code."""
    match error:
        case ScoremodeError():
            return str(error), BAD_INPUT
        case KeyboardInterrupt():
            return signals.explain(error)
        case OSError():
            return _explain_os_error(error), BAD_INPUT
        case MemoryError():
            return "this machine's memory is used up; try a smaller --context-length or --num-samples", BAD_INPUT
    what = f"{type(error).__name__}: {error}".split("\n")[0][:300]
    return f"this is a bug in scoremode ({what}); set SCOREMODE_DEBUG=1 to see where", OUR_BUG


def _explain_os_error(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if streams.is_output_failure(error):
        why = "the disk is full" if full else "it is closed" if error.errno == errno.EBADF else error.strerror
        return f"standard output could not be written: {why}; send it to a file or a terminal that takes it"
    if full:
        return "the disk is full; free some space and run the same command again to resume"
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{where}; check the path and its permissions"
