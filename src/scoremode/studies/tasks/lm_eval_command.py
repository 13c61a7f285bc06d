"""``scoremode lm-eval``: lm-evaluation-harness's own command line, with ``scoremode`` as one of its models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from typing import Any

from scoremode.console.flags import Verb
from scoremode.core.installation import pip_install
from scoremode.core.typed import typed
from scoremode.errors import InputError, ScoremodeError

NAME = "scoremode"
TARGET = "scoremode.studies.tasks.model:ScoremodeLM"
LM_EVAL_HELP = """\
usage: scoremode lm-eval [run] --tasks TASK … --model_args model=MODEL,… [flags]
       scoremode lm-eval ls tasks | validate --tasks TASK …

lm-evaluation-harness's own command line, with its flags unchanged (scoremode
lm-eval run --help). --model is scoremode unless another is given. Its
--model_args NAME=VALUE,…: model, engine, tokenizer, max_length, add_bos_token,
prefix_token_id, greedy (measured, or unknown-is-false for engines without
ranks), and every option of the engine: dtype, device, batch_tokens, …

examples:
  scoremode lm-eval --tasks arc_easy --model_args model=org/model
  scoremode lm-eval --tasks piqa --limit 100 --model_args model=Q4_K_M.gguf
"""


class LmEvalVerb(Verb):
    examples = (
        "scoremode lm-eval --tasks arc_easy --model_args model=org/model",
        "scoremode lm-eval ls tasks",
    )
    passes_all_on = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("words", nargs=argparse.REMAINDER)

    def run(self, parsed: argparse.Namespace) -> int:
        return lm_eval(*parsed.words)


@typed
def lm_eval(*words: str) -> int:
    """Runs lm-evaluation-harness's own command line with these words, and returns its exit code.

    ``--model`` is scoremode unless another is given.

    >>> import scoremode as sm
    >>> sm.lm_eval("--tasks", "arc_easy", "--model_args", "model=org/model")     # doctest: +SKIP
    0
    """
    if not words or words[0] in ("-h", "--help", "--help-all"):
        print(LM_EVAL_HELP, end="")
        return 0
    register()
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    before, sys.argv = sys.argv, ["scoremode lm-eval", *with_model([_underscored(word) for word in words])]
    try:
        setup_logging()
        harness = HarnessCLI()
        parsed = harness.parse_args()
        if getattr(parsed, "command", None) == "run" and parsed.model == NAME and parsed.config is None:
            from scoremode.studies.tasks.model import ScoremodeLM

            ScoremodeLM(**(parsed.model_args or {}))  # is refused before the harness reads its thousands of tasks
        with checked_before_scoring():
            harness.execute(parsed)
        return 0
    except SystemExit as ended:  # argparse of the harness has printed its help or its complaint
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except (ValueError, KeyError, FileNotFoundError) as error:  # what the harness says of tasks and files
        if isinstance(error, ScoremodeError):
            raise
        reason = str(error.args[0] if error.args else error).strip().split("\n")[0][:300]
        raise InputError(f"lm-eval: {reason}", fix="see scoremode lm-eval --help") from error
    finally:
        sys.argv = before


def register() -> None:
    """Makes ``--model scoremode`` known to the harness in this process."""
    if find_spec("lm_eval") is None:
        raise InputError("lm-evaluation-harness is not installed", fix=pip_install("lm-eval"))
    import lm_eval.models  # noqa: F401 - first: the harness loads its own models only while none is registered
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)


def with_model(argv: list[str]) -> list[str]:
    """The arguments of a run, with ``--model scoremode`` where no model and no configuration is named."""
    flags = {argument.split("=")[0] for argument in argv} & {"--model", "-M", "--config", "-C"}
    return argv if flags or argv[0] in ("ls", "validate") else [*argv, "--model", NAME]


def _underscored(word: str) -> str:
    """Spells a flag as the harness does: ``--model-args`` becomes ``--model_args``."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value


@contextmanager
def checked_before_scoring() -> Iterator[None]:
    """Inside the block, tasks that our model cannot answer are refused before weights are loaded, and it is closed."""
    from lm_eval import evaluator

    evaluate = evaluator.evaluate

    def checking(lm: Any, task_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(lm, "check_tasks"):  # of the harness itself
            return evaluate(lm, task_dict, *args, **kwargs)
        lm.check_tasks({name: str(task.OUTPUT_TYPE) for name, task in task_dict.get("tasks", {}).items()})
        with closing(lm):
            return evaluate(lm, task_dict, *args, **kwargs)

    evaluator.evaluate = checking
    try:
        yield
    finally:
        evaluator.evaluate = evaluate
