"""The flags of ``scoremode lm-eval``, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from scoremode.cli import streams

HELP = """usage: scoremode lm-eval [run] --tasks TASK … --model_args model=MODEL,engine=ENGINE,… [flags of lm-eval]
       scoremode lm-eval ls tasks | validate --tasks TASK …

lm-evaluation-harness's own command line. Its flags are unchanged; --model is scoremode unless another is given.

arguments of the model (--model_args NAME=VALUE,…):
  model            a folder, a name on the hub, a GGUF file, or what an engine calls its models (also: pretrained)
  engine           as in scoremode ppl --engine (default: the one that the model belongs to)
  tokenizer        another tokenizer
  max_length       tokens fed at most (default: the model's context)
  add_bos_token    True or False (default: as the tokenizer does by itself)
  prefix_token_id  the token before texts without context (default: BOS, else EOS)
  out              folder for the score of every token, as Parquet
  greedy           measured, or unknown-is-false for engines without ranks
  and every option of the engine by its name: dtype, device, batch_tokens, gpu_memory_utilization, …

The flags of lm-eval itself: scoremode lm-eval run --help
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs=argparse.REMAINDER)


def pass_on(words: Sequence[str]) -> int:
    """Run the harness with these words, as they are."""
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        streams.check()
        return 0
    from scoremode.harness import registering

    try:
        registering.run(words)
    except SystemExit as ended:  # argparse of the harness has printed its help or its complaint
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def run(parsed: argparse.Namespace) -> int:
    return pass_on(parsed.words)
