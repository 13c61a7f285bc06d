"""``scoremode rollouts``: texts that a model writes. Its flags, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from scoremode.core import extensions
from scoremode.errors import InputError
from scoremode.reports.command import flags
from scoremode.reports.command.output import progress_bar, show
from scoremode.reports.command.verb import Verb

if TYPE_CHECKING:
    from scoremode.core.text.prompts import Prompts
    from scoremode.core.verbs.progress import Progress

ROWS = '.jsonl rows {"prompt": "…"} or {"messages": […]}, or lines of a .txt'
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
    epilog = (
        "The folder is a corpus: --corpus rollouts:DIR scores the written tokens, with the prompts as context. "
        "scoremode compare rollouts:DIR TRAINER compares a trainer with the engine that wrote them."
    )
    renamed: ClassVar[Mapping[str, tuple[str, str]]] = {"mismatch": ("compare rollouts:{}", "DIR TRAINER")}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add(parser, flags.MODEL)
        prompts, named = parser.add_argument_group("prompts"), extensions.offered("prompts")
        flags.add(prompts, {"--prompts FILE": "".join([ROWS, *(f"; or {kind.summary}" for kind in named)])})
        flags.add(prompts, {"--prompt TEXT …": "a prompt given here; may be given again"})
        for kind in named:
            flags.add(prompts, kind.flags)
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

    def instead(self, flag: str) -> str | None:
        return next((kind.gone[flag] for kind in extensions.offered("prompts") if flag in kind.gone), None)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.studies.rollouts.rollouts import rollouts
        from scoremode.studies.rollouts.tables import rollouts_blocks

        if (parsed.prompts is None) == (not parsed.prompt):
            what = "--prompts and --prompt were given together" if parsed.prompt else "no prompt was given"
            raise InputError(what, fix="give --prompts FILE, or --prompt TEXT")
        read = _reader(parsed)
        if parsed.out is None:
            raise InputError("the texts have no place to go", fix="give --out DIR")
        numbers = ("samples", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "sequences")
        given = {name: value for name in numbers if (value := getattr(parsed, name)) is not None}
        with progress_bar("writing") as progress:
            found = rollouts(
                parsed.model,
                read(progress) if read else parsed.prompts or parsed.prompt,
                out=parsed.out,
                fresh=parsed.fresh,
                progress=progress,
                **given,
                **flags.model_arguments(parsed),
            )
        show(parsed, lambda: found.manifest, lambda: rollouts_blocks(found, parsed.out))


def _reader(parsed: argparse.Namespace) -> Callable[[Progress | None], Prompts] | None:
    """Returns what reads prompts that are named with a prefix, with their flags; None for a file or texts."""
    reader = None
    for kind in extensions.offered("prompts"):
        each = {flag.split()[0]: getattr(parsed, _name(flag)) for flag in kind.flags}
        given = {flag: value for flag, value in each.items() if value is not None and value is not False}
        if parsed.prompts is not None and parsed.prompts.startswith(kind.prefix):
            named = {_name(flag): value for flag, value in given.items()}
            reader = partial(kind.read, parsed.prompts.removeprefix(kind.prefix), **named)
        elif given:
            what = f"{next(iter(given))} is about {kind.prefix.removesuffix(':')}s"
            raise InputError(what, fix=f"give --prompts {kind.prefix}NAME, or leave it out")
    return None if reader is None else lambda progress: reader(progress=progress)


def _name(flag: str) -> str:
    """The name of a flag's value, as argparse makes it."""
    return flag.split(maxsplit=1)[0].removeprefix("--").replace("-", "_")
