"""What the harness does not keep: the score of every token, beside its results.

FOLDER/model.json              which model, engine and settings the scores come from
FOLDER/requests-0001.parquet   a row for each request: its task, document and sums
FOLDER/tokens-0001.parquet     a row for each scored token, by the number of its request

Each call of the harness has a pair of files of its own. They take their names when the call is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scoremode.disk.files import write_atomically, written_atomically
from scoremode.errors import RunError
from scoremode.harness.encoding import Encoded
from scoremode.plan.windows import Answers
from scoremode.scores.packing import flat_columns
from scoremode.scores.schema import BUILT_IN
from scoremode.values import Ids
from scoremode.verbs.likelihoods import Continuation, Likelihood
from scoremode.verbs.rows import Words

MODEL = "model.json"


class Scored(NamedTuple):
    """One request and its answers: several windows where a text is longer than the context."""

    number: int
    kind: str  # loglikelihood or loglikelihood_rolling
    task: str | None
    document: int | None
    choice: int | None
    context: str
    continuation: str
    windows: Sequence[tuple[Ids, Answers]]  # the scored ids of each, and their answers
    context_tokens: int
    log_prob: float
    is_greedy: bool | None
    spanning: bool
    truncated: int

    @staticmethod
    def pair(number: int, request: Any, encoded: Encoded, likelihood: Likelihood) -> Scored:
        """A request of the harness for one continuation."""
        context, continuation = request.args
        return Scored(
            number,
            "loglikelihood",
            request.task_name,
            request.doc_id,
            request.idx,
            context,
            continuation,
            [(encoded.asked.ids[encoded.asked.first :], likelihood.answers)],
            encoded.asked.first,
            likelihood.log_prob,
            likelihood.is_greedy,
            encoded.spanning,
            encoded.truncated,
        )

    @staticmethod
    def text(number: int, request: Any, windows: Sequence[tuple[Continuation, Likelihood]]) -> Scored:
        """A request of the harness for a whole text."""
        return Scored(
            number,
            "loglikelihood_rolling",
            request.task_name,
            request.doc_id,
            request.idx,
            "",
            request.args[0],
            [(window.ids[window.first :], likelihood.answers) for window, likelihood in windows],
            1,
            math.fsum(likelihood.log_prob for _, likelihood in windows),
            None,
            False,
            0,
        )


class Folder:
    """A folder of per-token scores. It must be new or empty."""

    def __init__(self, path: Path) -> None:
        self.path, self.calls = path, 0
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f"{path} exists and is not an empty folder", fix="give another out")

    def describe(self, model: Mapping[str, Any]) -> None:
        """Keep what the scores come from."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(model, indent=1, ensure_ascii=False, default=str)
        write_atomically(self.path / MODEL, text.encode() + b"\n")

    @contextmanager
    def call(self, words: Words) -> Iterator[Writer]:
        """The files of one call of the harness; they stay only if it ends well."""
        import pyarrow.parquet as pq

        self.path.mkdir(parents=True, exist_ok=True)
        self.calls += 1
        requests, tokens = (self.path / f"{name}-{self.calls:04}.parquet" for name in ("requests", "tokens"))
        with (
            written_atomically(requests) as requests_file,
            written_atomically(tokens) as tokens_file,
            pq.ParquetWriter(requests_file, _requests_schema(), compression="zstd") as requests_writer,
            pq.ParquetWriter(tokens_file, _tokens_schema(), compression="zstd") as tokens_writer,
        ):
            yield Writer(requests_writer, tokens_writer, words)


class Writer:
    """Writes a chunk of requests at a time."""

    def __init__(self, requests: Any, tokens: Any, words: Words) -> None:
        self._requests, self._tokens, self._words = requests, tokens, words

    def add(self, scored: Sequence[Scored]) -> None:
        import pyarrow as pa

        if not scored:
            return
        rows = [_request_row(one) for one in scored]
        self._requests.write_table(pa.Table.from_pylist(rows, schema=_requests_schema()))
        parts = [(one.number, ids, answers) for one in scored for ids, answers in one.windows]
        if parts:
            self._tokens.write_table(self._token_table(parts))

    def _token_table(self, parts: list[tuple[int, Ids, Answers]]) -> Any:
        import pyarrow as pa

        ids = np.concatenate([part for _, part, _ in parts])
        columns: dict[str, Any] = {
            "request": np.concatenate([np.full(len(part), number) for number, part, _ in parts]),
            "id": ids,
            "text": pa.array(self._words.of(ids), type=pa.string()),
        }
        found, schema = [answers for _, _, answers in parts], _tokens_schema()
        for column in BUILT_IN.scores:
            if any(getattr(answers, column.name) is None for answers in found):
                columns[column.name] = pa.nulls(len(ids), schema.field(column.name).type)
            else:
                columns |= flat_columns(found, [column])
        return pa.table([pa.array(columns[name]).cast(schema.field(name).type) for name in schema.names], schema=schema)


def _request_row(one: Scored) -> dict[str, Any]:
    return {
        "request": one.number,
        "kind": one.kind,
        "task": one.task,
        "doc_id": one.document,
        "idx": one.choice,
        "continuation": one.continuation,
        "context_sha256": hashlib.sha256(one.context.encode()).hexdigest(),
        "context_tokens": one.context_tokens,
        "tokens": sum(len(ids) for ids, _ in one.windows),
        "log_prob": one.log_prob,
        "is_greedy": one.is_greedy,
        "spanning": one.spanning,
        "truncated": one.truncated,
    }


def _requests_schema() -> Any:
    import pyarrow as pa

    text, number = pa.string(), pa.int64()
    return pa.schema(
        {
            "request": number,
            "kind": text,
            "task": text,
            "doc_id": number,
            "idx": number,
            "continuation": text,
            "context_sha256": text,
            "context_tokens": number,
            "tokens": number,
            "log_prob": pa.float64(),
            "is_greedy": pa.bool_(),  # null: ranks were not measured
            "spanning": pa.bool_(),
            "truncated": number,
        }
    )


def _tokens_schema() -> Any:
    import pyarrow as pa

    scores = {column.name: pa.from_numpy_dtype(column.numpy_type) for column in BUILT_IN.scores}
    return pa.schema({"request": pa.int64(), "id": pa.int32(), "text": pa.string(), **scores})
