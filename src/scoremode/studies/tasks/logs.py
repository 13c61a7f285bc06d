"""Folders that lm-eval wrote with ``--output_path DIR --log_samples`` ─▶ documents of tasks, and one model's answers.

DIR/MODEL/samples_TASK_TIME.jsonl   one row per document and filter
DIR/MODEL/results_TIME.json         settings, versions, aggregates and groups; with --output_path X.json: X_TIME.json

Metrics are lm-eval's own values of each document. The files are not trusted, and what they do not say is not known.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from scoremode.core.arguments import user_path
from scoremode.core.disk.files import file_sha256
from scoremode.core.disk.manifests import is_line
from scoremode.core.reading import numbered_lines
from scoremode.core.strict_json import parse, read_object
from scoremode.errors import InputError, few
from scoremode.values import Floats

RUN = (
    "run scoremode lm-eval --tasks TASK,… --model_args model=MODEL --output_path DIR --log_samples for each model, "
    "then scoremode tasks DIR DIR"
)
AGAIN = "run lm-eval again with --log_samples"
SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<time>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.jsonl")
HASHES = ("doc_hash", "prompt_hash", "target_hash")
FIELDS = {*HASHES, "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"}
MEANS = ("acc_norm", "acc", "exact_match")  # means where larger is better, whether a results file says so or not


# ── results files: what is used of them ──────────────────────────────────────────────────────────────────────────────
class AdapterFacts(msgspec.Struct, frozen=True):
    """What our adapter says about its model; see ``ScoremodeLM.get_model_info``."""

    model_fingerprint: str | None = None
    model_revision: str | None = None
    model_format: str | None = None
    engine: str | None = None
    dtype: str | None = None
    device: str | None = None
    head: str | None = None
    weight_bytes: int | None = None
    bits_per_weight: float | None = None
    emulated_bytes: int | None = None
    sizes: dict[str, object] | None = None
    engine_settings: dict[str, object] | None = None
    versions: dict[str, object] | None = None
    requests: dict[str, int] = {}  # how many there were, and how many of them were cut or split oddly
    notes: tuple[str, ...] = ()


class RunConfig(msgspec.Struct, frozen=True):
    """How lm-eval was run."""

    model: str | None = None  # the back end
    model_sha: str | None = None
    model_dtype: str | None = None
    device: str | None = None
    limit: float | None = None
    random_seed: int | None = None
    numpy_seed: int | None = None
    fewshot_seed: int | None = None
    scoremode: AdapterFacts = AdapterFacts()


class LoggedResults(msgspec.Struct, frozen=True, rename={"n_samples": "n-samples", "n_shot": "n-shot"}):
    """A results file; by task or group where it is a dict."""

    results: dict[str, dict[str, object]] = {}
    n_samples: dict[str, dict[str, object]] = {}
    n_shot: dict[str, object] = {}
    versions: dict[str, object] = {}
    higher_is_better: dict[str, dict[str, object]] = {}
    group_subtasks: dict[str, tuple[str, ...]] = {}
    config: RunConfig = RunConfig()
    chat_template: str | None = None
    model_name: str | None = None
    lm_eval_version: str | None = None
    transformers_version: str | None = None

    def aggregates(self, name: str) -> dict[str, float]:
        """What lm-eval printed of a task or group, by metric; its filter stays in the name unless it is ``none``."""
        metrics = self.results.get(name, {}).items()
        numbers = {key.removesuffix(",none"): number(value) for key, value in metrics if "," in key}
        return {key: value for key, value in numbers.items() if value is not None and "_stderr" not in key}


def number(value: object) -> float | None:
    """A finite number of untrusted JSON; None if it is none."""
    try:
        real = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return real if math.isfinite(real) else None


# ── what was logged ──────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class TaskDocument:
    number: int  # index in its split
    pairs: tuple[tuple[str, str], ...]  # (context, continuation), as they were sent to a model
    gold: tuple[int, ...] | None = None  # right choices; None if they are not known
    hashes: tuple[str, ...] = ()  # of the document, its prompt and its target, by lm-eval

    @property
    def chosen_in_context(self) -> bool:
        """Do the choices stand in their contexts, before one continuation that all share?"""
        return len(self.pairs) > 1 and len({continuation for _, continuation in self.pairs}) == 1

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts of the choices, without lm-eval's usual delimiter; empty if there is only one continuation."""
        if len(self.pairs) < 2:
            return ()
        if self.chosen_in_context:
            return tuple(context + continuation for context, continuation in self.pairs)
        return tuple(continuation.removeprefix(" ") for _, continuation in self.pairs)


@dataclass(frozen=True, slots=True, eq=False)
class LoggedTask:
    """One model's answers to the documents of one task."""

    name: str
    documents: list[TaskDocument]  # by number
    log_probs: list[Floats] | None  # of the choices of each document, nats; None: texts were generated
    metrics: dict[str, Floats]  # (n,) by name: those that are means over documents, larger is better
    others: tuple[str, ...]  # metrics that are logged and are none of these
    shots: int | None
    version: str


@dataclass(slots=True, eq=False)
class LoggedModel:
    source: str  # as the user named it
    tasks: dict[str, LoggedTask] = field(default_factory=dict)
    results: dict[str, LoggedResults] = field(default_factory=dict)  # of each task, if it has a results file
    files: dict[str, str] = field(default_factory=dict)  # name -> sha256
    notes: list[str] = field(default_factory=list)

    @property
    def last(self) -> LoggedResults:
        """The results file of the last task that has one."""
        return next(reversed(self.results.values()), LoggedResults())

    @property
    def name(self) -> str:
        name = self.last.model_name
        return name if name is not None and is_line(name) and 0 < len(name) < 256 else Path(self.source).name


def read_log(source: str | Path) -> LoggedModel:
    """Reads the newest samples of each task in a folder, or one samples file."""
    name = os.fspath(source)
    model, read = LoggedModel(name), dict[Path, LoggedResults]()
    for task, (time, path) in sorted(_newest(name, model.notes).items()):
        beside = [file for file in sorted(path.parent.glob(f"*_{time}.json")) if file.is_file()]
        if len(beside) > 1:
            raise InputError(f"{path.parent} has several results files of {time}", fix="leave one of them there")
        for file in beside:
            model.results[task] = read[file] = read.get(file) or _results(file)
        if not beside:
            model.notes.append(f"{task}: its results file is missing, so groups and few-shot examples are not known")
        model.tasks[task] = _task(task, path, model.results.get(task, LoggedResults()))
        model.files[path.name] = file_sha256(path)
    return model


def _newest(name: str, notes: list[str]) -> dict[str, tuple[str, Path]]:
    """The newest samples file of each task, with its time."""
    folder = user_path(name)
    if folder.is_file():
        files = [folder]
    elif folder.is_dir():
        files = sorted(folder.glob("samples_*.jsonl")) or sorted(folder.glob("*/samples_*.jsonl"))
    else:
        raise InputError(f"{name} is not a folder that lm-eval wrote", fix=RUN)
    if not files:
        raise InputError(f"{name} has no samples_TASK_TIME.jsonl of lm-eval", fix=RUN)
    models = sorted({path.parent.name for path in files})
    if len(models) > 1:
        raise InputError(f"{name} has samples of several models: {few(models)}", fix=f"name one: {name}/{models[0]}")
    newest: dict[str, tuple[str, Path]] = {}
    for path in files:
        match = SAMPLES.fullmatch(path.name)
        if match is None or not path.is_file():  # reading a pipe would wait forever
            raise InputError(f"{path} is not named samples_TASK_TIME.jsonl, as lm-eval names it", fix=RUN)
        if match["task"] in newest:
            notes.append(f"{name}: older samples of {match['task']} were not read")
        newest[match["task"]] = max(newest.get(match["task"], ("", path)), (match["time"], path))
    return newest


def _results(path: Path) -> LoggedResults:
    try:
        return msgspec.convert(read_object(path, constants=True), LoggedResults)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error})", fix=AGAIN) from None


# ── one task ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _task(name: str, path: Path, results: LoggedResults) -> LoggedTask:
    documents: dict[int, TaskDocument] = {}
    log_probs: dict[int, Floats | None] = {}
    values: dict[str, dict[int, object]] = {}
    for where, row in _rows(path):
        try:
            number, key = row["doc_id"], row.get("filter", "none")
            if type(number) is not int or number < 0 or not isinstance(key, str):
                raise ValueError("its doc_id or its filter is not one of lm-eval")
            if number not in documents:
                documents[number], log_probs[number] = _document(row)
            for metric in row["metrics"] if "metrics" in row else row.keys() - FIELDS:
                column = values.setdefault(metric if key == "none" else f"{metric},{key}", {})
                if number in column:
                    raise ValueError(f"document {number} is there twice")
                column[number] = row[metric]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise InputError(f"{where} is not a sample of lm-eval ({why})", fix=AGAIN) from None
    if not documents:
        raise InputError(f"{path} is empty", fix=AGAIN)
    count = results.n_samples.get(name, {}).get("effective")
    if count not in (None, len(documents)):
        raise InputError(f"{path} has {len(documents)} documents, and its results file says {count}", fix=AGAIN)
    numbers = sorted(documents)
    probs = [array for n in numbers if (array := log_probs[n]) is not None]
    if probs and len(probs) < len(numbers):
        raise InputError(f"{path} has log-likelihoods for some documents alone", fix=AGAIN)
    metrics = _means(values, numbers, results.aggregates(name), results.higher_is_better.get(name, {}))
    shots, version = results.n_shot.get(name), results.versions.get(name)
    return LoggedTask(
        name,
        [documents[n] for n in numbers],
        probs or None,
        metrics,
        tuple(sorted(values.keys() - metrics.keys())),
        shots if isinstance(shots, int) else None,
        str(version) if isinstance(version, str | int | float) else "",
    )


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in numbered_lines(path, kept=True):
        where = f"{path} line {number}"
        try:
            row = parse(line, constants=True)
            if not isinstance(row, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise InputError(f"{where} is not JSON ({error})", fix=AGAIN) from None
        yield where, row


def _document(row: Mapping[str, Any]) -> tuple[TaskDocument, Floats | None]:
    """A document, and the log-probabilities of its choices; None if the model was asked for a text."""
    args = row["arguments"]
    args = [[arg[f"arg_{i}"] for i in range(len(arg))] for arg in args.values()] if isinstance(args, dict) else args
    hashes = tuple(row[name] for name in HASHES)
    if not args or not all(isinstance(text, str) for text in (*hashes, *(arg[0] for arg in args))):
        raise ValueError("its arguments or hashes are not texts")
    if len(args[0]) < 2 or not isinstance(args[0][1], str):
        return TaskDocument(row["doc_id"], ((args[0][0], ""),), hashes=hashes), None
    resps = row["resps"]
    if len(resps) != len(args) or not all(isinstance(arg[1], str) for arg in args):
        raise ValueError("its answers are not those to its arguments")
    count = len(args) // 2 if "acc_mutual_info" in row else len(args)  # the rest are choices without a context
    log_probs = np.array([float(resps[i][0][0]) for i in range(count)], dtype=np.float64)
    if np.isnan(log_probs).any() or (log_probs == math.inf).any():
        raise ValueError("a log-likelihood is not a number")
    pairs = tuple((args[0][0] if arg[0] == args[0][0] else arg[0], arg[1]) for arg in args[:count])
    document = TaskDocument(row["doc_id"], pairs, hashes=hashes)
    gold = (0,) if count == 1 else _gold(row, document, int(log_probs.argmax()))
    return replace(document, gold=gold), log_probs


def _gold(row: Mapping[str, Any], document: TaskDocument, chosen: int) -> tuple[int, ...] | None:
    """The right choices: as the row names them, unless lm-eval's own ``acc`` says otherwise; None if not known."""
    right, count = row.get("acc"), len(document.pairs)
    if document.chosen_in_context:  # the row does not name the right context, but lm-eval knew it
        if right == 1:
            return (chosen,)
        return (1 - chosen,) if right == 0 and count == 2 else None
    target, texts = row["target"], [text.strip() for text in document.choices]
    try:
        gold = parse(target) if isinstance(target, str) else target
    except ValueError:
        text = target.strip()
        gold = texts.index(text) if text in texts else {"True": 1, "False": 0}.get(text)
    numbers = gold if isinstance(gold, list) else [gold]
    choices = tuple(int(n) for n in numbers if isinstance(n, int) and 0 <= n < count)
    agrees = right not in (0, 1) or (chosen in choices) == bool(right)
    return choices if choices and agrees else None


def _means(
    values: Mapping[str, Mapping[int, object]],
    numbers: Sequence[int],
    aggregates: Mapping[str, float],
    larger_is_better: Mapping[str, object],
) -> dict[str, Floats]:
    """Metrics with a number for each document whose mean lm-eval prints, and of which more is better."""
    means = {}
    for name, column in values.items():
        each = [value for n in numbers if (value := number(column.get(n))) is not None]
        metric = name.split(",")[0]
        if len(each) < len(numbers) or not larger_is_better.get(metric, metric in MEANS):
            continue
        array = np.array(each, dtype=np.float64)
        if not aggregates or math.isclose(array.mean(), aggregates.get(name, math.nan), rel_tol=1e-9, abs_tol=1e-12):
            means[name] = array
    return means
