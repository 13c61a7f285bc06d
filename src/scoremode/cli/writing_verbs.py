"""The verb that lets a model write: rollouts. Its flags, and what it prints."""

from __future__ import annotations

import argparse

from scoremode.cli import flags
from scoremode.cli.output import progress_bar, show
from scoremode.cli.parser import Verb
from scoremode.errors import InputError

PROMPTS: flags.Flags = {
    "--prompts FILE": 'rows of a .jsonl ({"prompt": "…"} or {"messages": […]}, perhaps "answer"), or lines of a .txt',
    "--prompt TEXT …": "a prompt given here; may be given again",
}
WRITING: flags.Flags = {
    "--samples N": "texts for each prompt (default: 1)",
    "--max-tokens N": "most tokens of a text (default: 256)",
    "--seed N": "of all draws (default: 0)",
    "--sequences N": "texts that are written side by side (default: the engine's)",
}
DRAWING: flags.Flags = {
    "--temperature T": "0 for the model's first choice (default), 1 for its own distribution",
    "--top-p P": "draw from the likeliest tokens that have this probability together",
    "--min-p P": "draw from tokens with this share of the largest probability",
}


class RolloutsVerb(Verb):
    summary = "texts that a model writes, and how likely each token was"
    examples = (
        "scoremode rollouts org/model --prompts prompts.jsonl --out written",
        "scoremode rollouts model-Q4_K_M.gguf --prompt 'Once upon a time' --out written",
    )
    everyday = (
        *("--prompts", "--prompt", "--samples", "--max-tokens", "--seed", "--temperature", "--top-p"),
        *(*flags.EVERYDAY_ENGINE, "--out", "--fresh", "--json"),
    )
    epilog = "The folder is a corpus: --corpus rollouts:DIR scores the written tokens, with the prompts as context."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add(parser, flags.MODEL)
        flags.add(parser.add_argument_group("prompts"), PROMPTS)
        texts = parser.add_argument_group("texts")
        flags.add(texts, WRITING)
        flags.add(texts, DRAWING, type=flags.amount)
        flags.add(texts, {"--top-k N": "draw from the N likeliest tokens"})
        kept = {
            "--out DIR": "keep them there; interrupted ones resume",
            "--fresh": "write again, and replace what is there",
        }
        flags.add(parser.add_argument_group("folder"), kept)
        flags.add_engine(parser)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.report.terminal.own_words_tables import rollouts_table
        from scoremode.verbs.rollouts import rollouts

        if (parsed.prompts is None) == (not parsed.prompt):
            what = "--prompts and --prompt were given together" if parsed.prompt else "no prompt was given"
            raise InputError(what, fix="give --prompts FILE, or --prompt TEXT")
        if parsed.out is None:
            raise InputError("the texts have no place to go", fix="give --out DIR")
        numbers = ("samples", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "sequences")
        given = {name: value for name in numbers if (value := getattr(parsed, name)) is not None}
        with progress_bar("writing") as progress:
            found = rollouts(
                parsed.model,
                parsed.prompts or parsed.prompt,
                out=parsed.out,
                fresh=parsed.fresh,
                progress=progress,
                **given,
                **flags.model_arguments(parsed),
            )
        show(parsed, lambda: found.manifest, lambda: rollouts_table(found, parsed.out))
