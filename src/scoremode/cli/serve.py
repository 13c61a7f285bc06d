"""The flags of ``scoremode serve``, and what it prints."""

from __future__ import annotations

import argparse
import logging
import shlex

logger = logging.getLogger(__name__)

PASSES_ON = True  # flags that are not listed here belong to the server
EPILOG = (
    "Every other flag after MODEL is passed on to the server: --port 8000, --max-model-len 8192, --api-key KEY, "
    "--data-parallel-size 2, … Ctrl-C stops it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a name on the hub, or smollm2-135m")
    parser.add_argument(
        "--head", choices=("exact", "as-served"), default="exact", help="logits in float32, or as they are served"
    )
    parser.add_argument("--head-kernel", metavar="NAME", help="default: the fastest one that passes its self-test")
    parser.add_argument("--most-body-mib", type=int, metavar="N", help="size of one request (default: 256)")
    parser.add_argument("--most-windows", type=int, metavar="N", help="windows in one request (default: 1024)")
    parser.add_argument(
        "--most-heads-mib", type=int, metavar="N", help="heads of baselines that clients may leave here (default: 8192)"
    )
    parser.add_argument(
        "--allow-untested", action="store_true", help="start a server that scoremode was not tested with"
    )


def run(parsed: argparse.Namespace) -> None:
    from scoremode.service.starting import ServiceOptions, become, command

    options = ServiceOptions(
        head=parsed.head,
        head_kernel=parsed.head_kernel,
        body_mib=parsed.most_body_mib,
        windows=parsed.most_windows,
        heads_mib=parsed.most_heads_mib,
        allow_untested=parsed.allow_untested,
    )
    made = command(parsed.model, options, getattr(parsed, "passed_on", []))
    logger.info("starting %s", made.shown())
    asked = f"scoremode ppl {shlex.quote(made.model)} --engine {made.address} --corpus wikitext2"
    logger.info("it will answer at %s; then type: %s", made.address, asked)
    become(made)
