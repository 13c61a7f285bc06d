"""Documents ─▶ answers of one model. Each document is scored once, its answers are stored at once and used again.

documents ──encode──▶ ids ──not stored yet──▶ engine ──▶ answers.records

Stored answers are found by the ids of a document. A kill loses only the documents that were being computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from scoremode.cache.task_answers import Answer, AnswerFile, digest_of, opened_answers
from scoremode.disk.folders import entry_folder
from scoremode.engines.base import Engine
from scoremode.engines.plugin import Work
from scoremode.errors import EngineError
from scoremode.harness.documents import TaskDocument
from scoremode.harness.encoding import HarnessEncoder
from scoremode.values import Bools, Ints
from scoremode.verbs.model import LazyModel
from scoremode.verbs.progress import Progress, part_of
from scoremode.verbs.question import identify
from scoremode.verbs.run_contents import describe_engine, describe_model
from scoremode.verbs.scoring import Continuation, likelihoods

TaskDocuments = Mapping[str, Sequence[TaskDocument]]
"""Documents by the name of their task."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelAnswers:
    """The answers of one model, and the facts about the model."""

    answers: Mapping[str, list[list[Answer]]]  # by task; one list per document, in the order of its pairs
    facts: dict[str, Any]  # the model, the engine and its settings, as in a manifest
    notes: tuple[str, ...]  # what the reader of the numbers must know
    asked: int  # documents that were computed by this call
    kept: int  # documents whose answers were already stored


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """The documents of one task as token ids."""

    name: str
    asked: list[Continuation]  # continuations of all documents, in document order
    begin: Ints  # (documents + 1,) the index of the first continuation of each document
    groups: Ints  # continuations with equal numbers start with the same tokens: a context, or the part of it that fits
    digests: list[str]
    spanning: int  # documents with a token that spans the border between context and continuation
    truncated: int  # documents that were cut to fit the model's context

    @property
    def fed(self) -> int:
        """The number of tokens that are fed to a model."""
        return sum(one.fed for one in self.asked)


def answer_documents(
    held: LazyModel,
    tasks: TaskDocuments,
    *,
    out: Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> ModelAnswers:
    """Returns the model's answers to all documents. Opens the engine only if some answers are not stored yet."""
    encoder = HarnessEncoder(held.subject.tokenizer, max_length=held.longest_window)
    prepared = [_prepared(encoder, name, documents) for name, documents in tasks.items()]
    # beyond this identity, the answers depend only on the ids of a document
    identity = identify(held.subject, held.engine_name, {**held.settings(), "shares_prompts": True})
    with ExitStack() as stack:
        if out is None and held.is_given:  # only the caller knows which model this is, so nothing is stored
            out = Path(stack.enter_context(TemporaryDirectory(prefix="scoremode-")))
        kept = stack.enter_context(opened_answers(out or entry_folder("tasks", identity), identity))
        done = {p.name: _done(p, kept, fresh=fresh) for p in prepared}
        missing = sum(int((~some).sum()) for some in done.values())
        if missing:
            longest = max(one.fed for p in prepared for one in p.asked)
            engine = held.engine(Work(longest, shares_prompts=True), progress)
            facts = describe_engine(engine.facts)
            settings = facts["engine_settings"].items()
            finite = {k: v for k, v in settings if not isinstance(v, float) or math.isfinite(v)}
            kept.set_engine({**facts, "engine_settings": finite, "notes": list(engine.facts.notes)})
            fed, total = 0, sum(p.fed for p in prepared)
            for p in prepared:
                _ask(engine, p, kept, done[p.name], part_of(progress, fed, total))
                fed += p.fed
        found = {p.name: [_found(kept, p, i) for i in range(len(p.digests))] for p in prepared}
        about = {**describe_model(held.subject), "tokenizer": held.subject.tokenizer.facts.fingerprint}
        about = {name: value for name, value in about.items() if value is not None and name != "model_files"}
        about |= kept.engine or {"engine": held.engine_name}
    total = sum(len(p.digests) for p in prepared)
    return ModelAnswers(found, about, tuple(_notes(prepared, about)), missing, total - missing)


# ── ids ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _prepared(encoder: HarnessEncoder, name: str, documents: Sequence[TaskDocument]) -> _Prepared:
    asked: list[Continuation] = []
    begin, groups, digests = [0], [], []
    spanning = truncated = group = 0
    for document in documents:
        found = [encoder.pair_of_task(pair, name, document.number) for pair in document.pairs]
        asked += [one.asked for one in found]
        begin.append(len(asked))
        starts = [(context, one.truncated) for (context, _), one in zip(document.pairs, found, strict=True)]
        numbers = {start: group + i for i, start in enumerate(dict.fromkeys(starts))}
        groups += [numbers[start] for start in starts]
        group += len(numbers)
        digests.append(digest_of([(one.asked.ids, one.asked.first) for one in found]))
        spanning += any(one.spanning for one in found)
        truncated += any(one.truncated for one in found)
    return _Prepared(name, asked, np.array(begin), np.array(groups, np.int64), digests, spanning, truncated)


def _notes(prepared: Sequence[_Prepared], facts: Mapping[str, Any]) -> Iterator[str]:
    for p in prepared:
        of = f"of {len(p.digests):,} documents"
        if p.truncated:
            yield f"{p.name}: {p.truncated:,} {of} were cut on the left to fit the model's context, as lm-eval does"
        if p.spanning:
            yield f"{p.name}: {p.spanning:,} {of} have a token across the border of a choice, split as lm-eval does"
    yield from facts.get("notes", ())


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _done(p: _Prepared, kept: AnswerFile, *, fresh: bool) -> Bools:
    """Returns which documents need no scoring, because their answers are stored."""
    if fresh:
        return np.zeros(len(p.digests), dtype=np.bool_)
    counts = np.diff(p.begin).tolist()
    found = [kept.get(digest, count) is not None for digest, count in zip(p.digests, counts, strict=True)]
    return np.array(found, dtype=np.bool_)


def _found(kept: AnswerFile, p: _Prepared, index: int) -> list[Answer]:
    found = kept.get(p.digests[index], int(p.begin[index + 1] - p.begin[index]))
    assert found is not None, "asked before"
    return found


def _ask(engine: Engine, p: _Prepared, kept: AnswerFile, done: Bools, progress: Progress | None) -> None:
    """Scores documents of a task that are not done. The engine gets all, so that a resumed run has the same batches."""
    document = np.repeat(np.arange(len(p.digests)), np.diff(p.begin))
    waiting = [int(n) for n in np.diff(p.begin)]
    answers: list[Answer | None] = [None] * len(p.asked)
    for index, found in likelihoods(engine, p.asked, p.groups, done[document], progress):
        answers[index] = (found.log_prob, found.is_greedy)
        own = int(document[index])
        waiting[own] -= 1
        if not waiting[own]:
            its = answers[int(p.begin[own]) : int(p.begin[own + 1])]
            kept.add(p.digests[own], [one for one in its if one is not None])


def require_greedy(name: str, task: Any, answers: Sequence[Sequence[Answer]], engine: str) -> None:
    """Raises an error if the metric of a task needs ranks that the engine did not measure."""
    needs = task.OUTPUT_TYPE == "loglikelihood" or "exact_match" in task.aggregation()
    if needs and any(greedy is None for its in answers for _, greedy in its):
        raise EngineError(
            f"the task {name} asks whether an answer is the model's first choice, which {engine} does not measure",
            fix="leave the task out, or use another --engine",
        )
