"""``scoremode rollouts``: its flags, and what it prints; and what rollouts add to ``scoremode compare``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from scoremode.console import flags
from scoremode.console.flags import Verb
from scoremode.console.output import checked_report, progress_bar, show, verdict, write_report
from scoremode.core.extensions import FormatOffer, ResultPart, offered
from scoremode.errors import InputError, OptionError

if TYPE_CHECKING:
    from scoremode.core.statistics.comparison import Comparison
    from scoremode.studies.rollouts.texts import Rollouts

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
        flags.add(parser, flags.model_flag())
        prompts = parser.add_argument_group("prompts")
        flags.add(prompts, {"--prompts FILE": ROWS, "--prompt TEXT …": "a prompt given here; may be given again"})
        texts = parser.add_argument_group("texts")
        flags.add(texts, WRITING)
        flags.add(texts, DRAWING, type=flags.amount)
        flags.add(texts, {"--top-k N": "draw from the N likeliest tokens"})
        folder_flags = {
            "--out DIR": "keep them there; interrupted ones resume",
            "--fresh": "write again, and replace what is there",
        }
        flags.add(parser.add_argument_group("folder"), folder_flags)
        flags.add_engine(parser)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.studies.rollouts.rollouts import rollouts
        from scoremode.studies.rollouts.tables import rollouts_blocks

        if (parsed.prompts is None) == (not parsed.prompt):
            message = "--prompts and --prompt were given together" if parsed.prompt else "no prompt was given"
            raise InputError(message, fix="give --prompts FILE, or --prompt TEXT")
        if parsed.out is None:
            raise InputError("the texts have no place to go", fix="give --out DIR")
        numbers = ("samples", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "sequences")
        options = {name: value for name in numbers if (value := getattr(parsed, name)) is not None}
        with progress_bar("writing") as progress:
            texts = rollouts(
                parsed.model,
                parsed.prompts or parsed.prompt,
                out=parsed.out,
                fresh=parsed.fresh,
                progress=progress,
                **options,
                **flags.model_arguments(parsed),
            )
        show(parsed, lambda: texts.manifest, lambda: rollouts_blocks(texts, parsed.out))


# ── compare ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def asked(parsed: argparse.Namespace) -> dict[str, object]:
    """The rollouts on which models are compared, read once for all; {} for other texts."""
    from scoremode.studies.rollouts.texts import PREFIX, Rollouts

    corpora = parsed.corpus or []
    if len(corpora) != 1 or not corpora[0].startswith(PREFIX):
        return {}
    rollouts = Rollouts.open(corpora[0].removeprefix(PREFIX))
    parsed.corpus = [rollouts]
    return {"rollouts": rollouts, "count": parsed.num_samples}


def readings_part(comparisons: Sequence[Comparison], rollouts: Rollouts, count: int | None = None) -> ResultPart:
    from scoremode.studies.rollouts.readings import readings

    results = readings(comparisons, rollouts, count)

    def blocks() -> list[Any]:
        from scoremode.studies.rollouts.tables import readings_blocks

        return readings_blocks(results)

    def section() -> str:
        from scoremode.studies.rollouts.page import readings_section

        return readings_section(results)

    return ResultPart("own_words", lambda: [reading.as_json() for reading in results], blocks, "Own words", section)


# ── a trainer against rollouts ───────────────────────────────────────────────────────────────────────────────────────
def compare_trainer(parsed: argparse.Namespace) -> int | None:
    """Answers ``compare rollouts:DIR TRAINER``; None for every other baseline."""
    from scoremode.studies.rollouts.texts import PREFIX

    if parsed.baseline.startswith(PREFIX):
        _require_trainer_alone(parsed)
        return _show_mismatch(parsed, parsed.baseline.removeprefix(PREFIX))
    if (parsed.clip_low, parsed.clip_high) != (None, None):
        raise OptionError("--clip-low and --clip-high are about rollouts", fix=f"give {PREFIX}DIR as the BASELINE")
    return None


def _show_mismatch(parsed: argparse.Namespace, folder: str) -> int:
    from scoremode.core.store.runs import is_run, load
    from scoremode.reports import gate
    from scoremode.studies.rollouts.mismatch import CLIP, EXAMPLE, FIELDS, mismatch
    from scoremode.studies.rollouts.tables import mismatch_blocks

    for text in parsed.fail_if or ():
        gate.parse(text, FIELDS, EXAMPLE)  # refuses a wrong rule before an hour of scoring
    output, (trainer,) = checked_report(parsed), parsed.candidates
    low, high = (CLIP[i] if bound is None else bound for i, bound in enumerate((parsed.clip_low, parsed.clip_high)))
    with progress_bar("scoring") as progress:
        token_mismatch = mismatch(
            folder,
            load(trainer) if is_run(trainer) else trainer,
            clip=(low, high),
            progress=progress,
            **flags.model_arguments(parsed),
        )

    def facts() -> dict[str, object]:
        parts = {"by_position": token_mismatch.by_position(), "by_slice": token_mismatch.by_slice()}
        return {**token_mismatch.statistics(), **parts}

    show(parsed, facts, lambda: mismatch_blocks(token_mismatch))
    if output:
        from scoremode.studies.rollouts.page import render_mismatch

        write_report(parsed, output, render_mismatch(token_mismatch))
    return verdict(token_mismatch.failures(*(parsed.fail_if or ())))


def _require_trainer_alone(parsed: argparse.Namespace) -> None:
    from scoremode.core.plan.question import Question
    from scoremode.core.verbs.baselines import require_none

    if len(parsed.candidates or ()) != 1:
        raise InputError(f"{parsed.baseline} is compared with one trainer", fix="name one model, or a run that read it")
    layouts = (kind.name for kind in offered(FormatOffer) if kind.layout)
    unused = (*Question.options(), *NOT_OF_TRAINERS, *layouts)
    options = {name: getattr(parsed, name) for name in unused}
    require_none(options, f"{parsed.baseline} has its own text, and statistics of its own")


NOT_OF_TRAINERS = (
    *("baseline_engine", "baseline_dtype", "out", "fresh", "keep", "by_depth", "columns", "no_worse_than"),
    *("markdown", "model_index", "few_documents"),
)


class ReadingsPart:
    """What rollouts add to ``scoremode compare``."""

    asked = staticmethod(asked)
    make = staticmethod(readings_part)
    instead = staticmethod(compare_trainer)


PART = ReadingsPart()
