"""``scoremode serve``: its flags, and what it says."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import subprocess
import sys

from scoremode.console import flags, signals
from scoremode.console.flags import Verb
from scoremode.core.disk.manifests import command_without_secrets
from scoremode.core.typed import typed

logger = logging.getLogger(__name__)


class ServeVerb(Verb):
    examples = ("scoremode serve org/model-W4A16 --port 8000", "scoremode serve org/model --api-key-env SERVER_KEY")
    epilog = (
        "Every other flag after MODEL is passed on to the server: --port 8000, --max-model-len 8192, "
        "--data-parallel-size 2, … Ctrl-C stops it."
    )
    passes_on = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add(parser, {"model MODEL": "a folder, a name on the hub, or smollm2-135m"})
        logits = "logits in float32, or as they are served"
        parser.add_argument("--head", choices=("exact", "as-served"), default="exact", help=logits)
        flags.add(parser, {"--head-kernel NAME": "default: the fastest one that passes its self-test"})
        key = "environment variable that holds the key clients must send; may be repeated"
        flags.add(parser, {"--api-key-env NAME …": key})
        flags.add(parser, {"--allow-untested": "start a server that scoremode was not tested with"})

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.engines.vllm.processes import VllmLog
        from scoremode.remote.service.running import run_server
        from scoremode.remote.service.starting import WORDS, ServiceOptions, become, command

        signals.nothing_is_kept("start it again")
        if argv := os.environ.pop(WORDS, None):
            run_server(json.loads(argv))
            return
        options = ServiceOptions(
            head=parsed.head,
            head_kernel=parsed.head_kernel,
            allow_untested=parsed.allow_untested,
            api_key_env=tuple(parsed.api_key_env or ()),
        )
        log = VllmLog()
        try:
            with log.taking_output():  # vLLM's own, while it reads the flags
                made = command(parsed.model, options, getattr(parsed, "passed_on", []))
        finally:
            log.discard()
        logger.info("starting %s", shlex.join(command_without_secrets(made.words)))
        example = f"scoremode ppl {shlex.quote(made.model)} --engine {made.address} --corpus wikitext2"
        logger.info("the server loads its libraries and the weights, warms up and tests itself, which takes minutes")
        logger.info("it will answer at %s; then type: %s", made.address, example)
        become(made)


@typed
def serve(model: str, *words: str) -> subprocess.Popen[bytes]:
    """Starts ``scoremode serve`` with these words as a process of its own, which ``terminate()`` ends.

    >>> import scoremode as sm
    >>> server = sm.serve("org/model-W4A16", "--port", "8000")     # doctest: +SKIP
    """
    return subprocess.Popen([sys.executable, "-m", "scoremode", "serve", model, *words])
