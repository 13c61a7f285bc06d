"""``scoremode VERB …``: parse, run the verb, turn refusals into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from scoremode import __version__
from scoremode.cli import compare, doctor, engines, methods, noise, plan, ppl, prob, reference, report, show
from scoremode.cli.parser import BAD_INPUT, Parser
from scoremode.errors import ScoremodeError, did_you_mean, harmless

VERBS = {
    "ppl": ppl,
    "prob": prob,
    "compare": compare,
    "reference": reference,
    "report": report,
    "plan": plan,
    "noise": noise,
    "methods": methods,
    "show": show,
    "engines": engines,
    "doctor": doctor,
}
INTERRUPTED, OUR_BUG = 130, 70

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
    for name, module in VERBS.items():
        summary = (module.__doc__ or "").split("\n")[0].split(": ", 1)[1]
        verb = verbs.add_parser(name, help=summary, description=summary, epilog=getattr(module, "EPILOG", None))
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser()
    if given and not given[0].startswith("-") and given[0] not in VERBS:
        return _complain(f"there is no command '{given[0]}'; {did_you_mean(given[0], VERBS)}")
    parsed = parser.parse_args(given)
    if parsed.verb is None:
        parser.print_help()
        return _complain("no command was given; type scoremode VERB, as in scoremode ppl MODEL --corpus wikitext2")
    try:
        code = int(parsed.run(parsed) or 0)
        sys.stdout.flush()  # a full disk or a closed pipe shows here, where it can still be explained
    except BrokenPipeError:
        code = 0
        _silence_stdout()  # the reader left: nothing more to say to it
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("SCOREMODE_DEBUG"):
            raise
        if isinstance(error, OSError):
            _silence_stdout()
        return _complain(*_explain(error))
    return code


def _silence_stdout() -> None:
    """What is still buffered cannot be written, and Python would complain of it once more at the end."""
    with contextlib.suppress(OSError, ValueError):  # not a real file, as under a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(line: str, code: int = BAD_INPUT) -> int:
    print(f"scoremode: {harmless(' '.join(line.split()))}", file=sys.stderr)
    return code


def _explain(error: BaseException) -> tuple[str, int]:
    """What happened and what to do, in one line, and the exit code."""
    match error:
        case ScoremodeError():
            return str(error), BAD_INPUT
        case KeyboardInterrupt():
            return "interrupted; what was scored is kept: repeat the command to go on", INTERRUPTED
        case OSError(errno=errno.ENOSPC | errno.EDQUOT | errno.EFBIG):
            return "the disk is full; free some space and repeat the command: it goes on where it stopped", BAD_INPUT
        case OSError():
            where = f" ({error.filename})" if error.filename else ""
            return f"{error.strerror or error}{where}; check the path and its permissions", BAD_INPUT
        case MemoryError():
            return "this machine's memory is used up; try a smaller --context-length or --num-samples", BAD_INPUT
    what = f"{type(error).__name__}: {error}".split("\n")[0][:300]
    return f"this is a bug in scoremode ({what}); set SCOREMODE_DEBUG=1 to see where", OUR_BUG


def entry() -> NoReturn:
    """The console script."""
    code = main()
    if code and "vllm" in sys.modules:
        # vLLM's sockets may wait at exit for an engine that died; everything of ours is closed and written
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
