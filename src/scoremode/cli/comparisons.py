"""What compare and tasks have in common: flags of the baseline and of cards, the command itself, and the verdict."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from typing import Any

logger = logging.getLogger(__name__)

GATE_FAILED = 1


def add_baseline(parser: argparse.ArgumentParser) -> None:
    its = parser.add_argument_group("baseline", "if it is scored in a different way than the candidates")
    its.add_argument("--baseline-engine", metavar="NAME", help="default: --engine")
    its.add_argument("--baseline-dtype", metavar="DTYPE", help="default: --dtype")


def baseline_options(parsed: argparse.Namespace) -> Any:
    return {"dtype": parsed.baseline_dtype} if parsed.baseline_dtype else None


def add_cards(shown: Any) -> None:
    """Of these and others in the group, one may be given."""
    shown.add_argument("--markdown", action="store_true", help="print the table for a model card")
    shown.add_argument("--model-index", action="store_true", help="print the metadata block for the Hugging Face hub")


def is_for_machines(parsed: argparse.Namespace) -> bool:
    return bool(parsed.json or parsed.markdown or parsed.model_index)


def command_line() -> str:
    """What was typed, without secrets."""
    from scoremode.store.redaction import command_without_secrets

    return " ".join(["scoremode", *map(shlex.quote, command_without_secrets(sys.argv[1:]))])


def verdict(failures: list[str]) -> int:
    """Say which rules hold; the exit code."""
    for why in failures:
        logger.error(why)
    return GATE_FAILED if failures else 0
