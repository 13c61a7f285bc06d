"""The verbs that hand flags on to another program: lm-eval and serve."""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Sequence

from scoremode.cli import streams
from scoremode.cli.parser import Verb
from scoremode.reports.command import flags, logs

logger = logging.getLogger(__name__)

LM_EVAL_HELP = """\
usage: scoremode lm-eval [run] --tasks TASK … --model_args model=MODEL,… [flags]
       scoremode lm-eval ls tasks | validate --tasks TASK …

lm-evaluation-harness's own command line, with its flags unchanged. --model is
scoremode unless another is given.

arguments of the model (--model_args NAME=VALUE,…):
  model            a folder, a name on the hub, a GGUF file, or what an engine
                   calls its models (also: pretrained)
  engine           as in scoremode ppl --engine (default: what fits the model)
  tokenizer        another tokenizer
  max_length       tokens fed at most (default: the model's context)
  add_bos_token    True or False (default: as the tokenizer does by itself)
  prefix_token_id  the token before texts without context (default: BOS or EOS)
  out              folder for the score of every token, as Parquet
  greedy           measured, or unknown-is-false for engines without ranks
  and every option of the engine by its name: dtype, device, batch_tokens, …

The flags of lm-eval itself: scoremode lm-eval run --help

examples:
  scoremode lm-eval --tasks arc_easy --model_args model=org/model
  scoremode lm-eval --tasks piqa --limit 100 --model_args model=Q4_K_M.gguf
"""


class LmEvalVerb(Verb):
    summary = "lm-evaluation-harness's own command line, with its tasks scored by any engine here"
    examples = (
        "scoremode lm-eval --tasks arc_easy --model_args model=org/model",
        "scoremode lm-eval ls tasks",
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("words", nargs=argparse.REMAINDER)

    def run(self, parsed: argparse.Namespace) -> int:
        return run_lm_eval(parsed.words)


def run_lm_eval(words: Sequence[str]) -> int:
    """Runs the harness with these command-line words, unchanged."""
    if not words or words[0] in ("-h", "--help", "--help-all"):
        print(LM_EVAL_HELP, end="")
        streams.check()
        return 0
    from scoremode.studies.tasks import registering

    try:
        registering.run(words)
    except SystemExit as ended:  # argparse of the harness has printed its help or its complaint
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


class ServeVerb(Verb):
    summary = "load a model once, and answer many clients over HTTP"
    examples = (
        "scoremode serve org/model-W4A16 --port 8000",
        "scoremode serve org/model --api-key-env SERVER_KEY",
    )
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
        most = {
            "--most-body-mib N": "size of one request (default: 256)",
            "--most-windows N": "windows in one request (default: 1024)",
        }
        flags.add(parser, most, type=int)
        key = "environment variable that holds the key clients must send; may be repeated"
        flags.add(parser, {"--api-key-env NAME …": key})
        flags.add(parser, {"--allow-untested": "start a server that scoremode was not tested with"})

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.remote.service.starting import ServiceOptions, become, command

        options = ServiceOptions(
            head=parsed.head,
            head_kernel=parsed.head_kernel,
            body_mib=parsed.most_body_mib,
            windows=parsed.most_windows,
            allow_untested=parsed.allow_untested,
            api_key_env=tuple(parsed.api_key_env or ()),
        )
        made = command(parsed.model, options, getattr(parsed, "passed_on", []))
        logger.info("starting %s", made.shown())
        asked = f"scoremode ppl {shlex.quote(made.model)} --engine {made.address} --corpus wikitext2"
        logger.info("the server loads its libraries and the weights, warms up and tests itself, which takes minutes")
        logger.info("it will answer at %s; then type: %s", made.address, asked)
        become(made, is_quiet=logs.is_quiet())
