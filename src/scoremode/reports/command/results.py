"""What verbs do with their results: the page of ``--report``, the command that made them, rules that hold."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from scoremode.core import extensions
from scoremode.reports.command import flags

logger = logging.getLogger(__name__)

RULE_HOLDS = 1  # the exit code


def checked_report(parsed: argparse.Namespace) -> Any:
    """The file that ``--report`` names, checked before anything is scored; None without ``--report``."""
    from scoremode.core.verbs.outputs import check_report

    if getattr(parsed, "report", None) is None:
        return None
    return check_report(parsed.report, "--report", made_later=getattr(parsed, "out", None))


def write_report(parsed: argparse.Namespace, output: Any, page: str) -> None:
    (write,) = extensions.offered(flags.PAGE_WRITER)
    write(parsed.report, page, "--report")
    for_machines = any(getattr(parsed, flag, False) for flag in ("json", "markdown", "model_index"))
    output.announce(f"\nreport written to {output}", quiet=for_machines)


def command_line() -> str:
    """The command line as the user typed it, without secrets."""
    from scoremode.core.disk.manifests import command_without_secrets

    return " ".join(["scoremode", *map(shlex.quote, command_without_secrets(sys.argv[1:]))])


def verdict(checked: Sequence[str | None]) -> int:
    """Prints which rules hold, and returns the exit code."""
    failures = [why for why in checked if why]
    for why in failures:
        logger.error(why)
    return RULE_HOLDS if failures else 0
