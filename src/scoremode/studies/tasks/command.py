"""``scoremode tasks`` and ``scoremode lm-eval``: their flags, and what they print."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from scoremode.reports.command import flags, streams
from scoremode.reports.command.output import checked_report, command_line, show, verdict, write_report
from scoremode.reports.command.verb import Verb

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
    passes_all_on = True
    prints_json = False

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


class TasksVerb(Verb):
    summary = "candidates against a baseline on tasks, from what lm-eval logged"
    examples = (
        "scoremode tasks logs/model logs/model-W4A16",
        "scoremode tasks logs/model logs/Q4_K_M --tasks mmlu --report tasks.html",
    )
    epilog = (
        "lm-eval runs the models, as in scoremode lm-eval --tasks arc_easy --model_args model=MODEL "
        "--output_path DIR --log_samples. Exit code 1: a --fail-if rule holds."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        folder = "lm-eval wrote with --output_path DIR --log_samples"
        flags.add(parser, {"baseline BASELINE": f"a folder that {folder}"})
        flags.add(parser, {"candidates CANDIDATE …": f"folders that {folder}"})
        kept = {
            "--tasks NAMES": "only these tasks and groups, as in arc_easy,piqa (default: all)",
            "--metric NAME": "of recovery and flips (default: acc_norm, else acc)",
            "--fail-if RULE …": 'as in "recovery < 0.99 surely" or "arc_easy.flips > 0.05"',
            **flags.REPORT,
        }
        flags.add(parser.add_argument_group("comparison"), kept)
        flags.add(parser.add_mutually_exclusive_group(), {**flags.CARDS, **flags.JSON})

    def instead(self, flag: str) -> str:
        from scoremode.studies.tasks.logs import RUN

        return RUN

    def run(self, parsed: argparse.Namespace) -> int:
        from scoremode.studies.tasks.rules import parse
        from scoremode.studies.tasks.tasks import tasks

        rules = [parse(text) for text in parsed.fail_if or ()]
        output = checked_report(parsed)
        rows = [rule.task for rule in rules if rule.task is not None]
        found = tasks(parsed.baseline, *parsed.candidates, tasks=parsed.tasks, metric=parsed.metric, rows=rows)
        from scoremode.studies.tasks.card import tasks_markdown, tasks_model_index
        from scoremode.studies.tasks.tables import tasks_blocks, tasks_json

        found = [replace(c, manifest={"command": command_line()}) for c in found]
        if parsed.markdown:
            print(tasks_markdown(found))
        elif parsed.model_index:
            print("\n".join(map(tasks_model_index, found)))
        else:
            show(parsed, lambda: tasks_json(found), lambda: tasks_blocks(found))
        if output:
            from scoremode.studies.tasks.page import render_tasks

            write_report(parsed, output, render_tasks(found))
        return verdict([rule.check(c) for rule in rules for c in found])
