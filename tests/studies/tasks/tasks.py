"""Tasks of lm-evaluation-harness that need no network: rows in a file, and a task that reads them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scoremode.cli.main import main

CHOICES: list[dict[str, Any]] = [
    {"question": "Lily went to the", "choices": ["park to play with her friends.", "moon.", "old"], "answer": 0},
    {"question": "The cat sat on", "choices": ["the mat and was happy", "a dog", "naïve 東京", "x"], "answer": 0},
    {"question": "Tom was sad. He  ", "choices": ["cried", "laughed and ran home to his mom"], "answer": 1},
    {"question": "One day, a big bear saw a", "choices": ["fish", "house", "tree", "car"], "answer": 2},
]
LAST_WORDS = [
    {"text": "Once upon a time there was a little girl named Lily"},
    {"text": "She saw a big dog and the dog was very big"},
    {"text": "They played all day and then they went home"},
    {"text": "The quick brown fox jumps over the lazy dog"},
    {"text": "One day the sun was hot and the sky was blue"},
]
PAGES = [{"page": "Once upon a time, there was a boy. " * 40}, {"page": "A short one."}, {"page": "naïve 東京 " * 30}]

CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
LAST_WORD = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
    "doc_to_target": "{{' '+text.split(' ')[-1]}}",
    "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{page}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}
WRITING = {
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": ".",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 24},
    "metric_list": [{"metric": "exact_match"}],
}
KINDS: dict[str, tuple[dict[str, Any], Sequence[dict[str, Any]]]] = {
    "own_choice": (CHOICE, CHOICES),
    "own_last_word": (LAST_WORD, LAST_WORDS),
    "own_rolling": (ROLLING, PAGES),
    "own_writing": (WRITING, LAST_WORDS),
}


def write_tasks(folder: Path, names: Sequence[str] = tuple(KINDS)) -> Path:
    """A folder for ``--include_path`` with these tasks and their rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        write_task(folder, name, *KINDS[name])
    return folder


def write_task(folder: Path, name: str, kind: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **kind}))  # JSON is YAML


@contextmanager
def only_own_tasks() -> Iterator[None]:
    """lm-eval reads thousands of task files at every start; here only those that are named.

    It also adds log handlers for the standard error of the moment, which is another one in the next test, and its
    bootstrap forks this process, which has threads of other tests by now: a child may never end. Its 100,000 draws
    would take a minute.
    """
    metrics = pytest.importorskip("lm_eval.api.metrics", reason="needs lm-eval")
    from lm_eval.tasks import TaskManager

    plain, bootstrap = TaskManager.__init__, metrics.bootstrap_stderr

    def without_defaults(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **{**kwargs, "include_defaults": False})

    loggers = [logging.getLogger(), logging.getLogger("lm_eval")]
    before = [(logger, list(logger.handlers)) for logger in loggers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskManager, "__init__", without_defaults)
        patch.setenv("DISABLE_MULTIPROC", "1")
        patch.setattr(metrics, "bootstrap_stderr", lambda f, xs, iters: bootstrap(f, xs, 100))
        yield
    for logger, handlers in before:
        logger.handlers[:] = handlers


def log_of(out: Path, model: str, names: Sequence[str], definitions: Path, *more: str) -> Path:
    """The folder that ``scoremode lm-eval --log_samples`` writes for a model."""
    words = ["lm-eval", "--tasks", ",".join(names), "--include-path", str(definitions), "--model-args", model, *more]
    with only_own_tasks():
        assert main([*words, "--output_path", str(out), "--log_samples"]) == 0
    return out
