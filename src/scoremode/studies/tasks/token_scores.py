"""Stores the score of every token, which the harness does not, and counts requests that were cut or split oddly.

FOLDER/model.json              the model, engine and settings that gave the scores
FOLDER/requests-0001.parquet   one row per request: its task, document and sums
FOLDER/tokens-0001.parquet     one row per scored token, with the number of its request

Each call of the harness writes its own pair of files. The files get their names when the call is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scoremode.core.disk.files import write_atomically, written_atomically
from scoremode.core.scores.packing import flat_columns
from scoremode.core.scores.schema import BUILT_IN
from scoremode.core.verbs.run_contents import Words
from scoremode.core.verbs.scoring import Continuation, Likelihood
from scoremode.errors import RunError, one_line, print_line
from scoremode.studies.tasks.encoding import Encoded

MODEL = "model.json"
REQUEST_TYPES = {
    "request": "int64",
    "kind": "string",  # loglikelihood or loglikelihood_rolling
    "task": "string",
    "doc_id": "int64",
    "idx": "int64",
    "continuation": "string",
    "context_sha256": "string",
    "context_tokens": "int64",
    "tokens": "int64",
    "log_prob": "double",
    "is_greedy": "bool",  # null: ranks were not measured
    "spanning": "bool",
    "truncated": "int64",
}
TOKEN_TYPES = {"request": "int64", "id": "int32", "text": "string", **{c.name: c.dtype for c in BUILT_IN.scores}}


class ScoredRequest(NamedTuple):
    """A request of the harness and the scores of its tokens."""

    request: Any  # in lm-eval's own form
    windows: Sequence[tuple[Continuation, Likelihood]]  # several if a text is longer than the context
    encoded: Encoded | None = None  # None: the request is a whole text, not a pair


class TokenScoreFolder:
    """A folder of per-token scores. It must be new or empty."""

    def __init__(self, path: Path) -> None:
        self.path, self.calls, self.requests = path, 0, 0
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f"{path} exists and is not an empty folder", fix="give another out")

    def describe(self, model: Mapping[str, Any]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(model, indent=1, ensure_ascii=False, default=str)
        write_atomically(self.path / MODEL, text.encode() + b"\n")

    @contextmanager
    def call(self, words: Words) -> Iterator[Callable[[Sequence[ScoredRequest]], None]]:
        """Writes the files of one harness call. Yields a function that adds requests. A failure leaves no file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path.mkdir(parents=True, exist_ok=True)
        self.calls += 1
        requests, tokens = (self.path / f"{name}-{self.calls:04}.parquet" for name in ("requests", "tokens"))
        request_schema, token_schema = (
            pa.schema({name: pa.type_for_alias(kind) for name, kind in types.items()})
            for types in (REQUEST_TYPES, TOKEN_TYPES)
        )
        with (
            written_atomically(requests) as requests_file,
            written_atomically(tokens) as tokens_file,
            pq.ParquetWriter(requests_file, request_schema, compression="zstd") as requests_writer,
            pq.ParquetWriter(tokens_file, token_schema, compression="zstd") as tokens_writer,
        ):

            def add(scored: Sequence[ScoredRequest]) -> None:
                numbered = list(enumerate(scored, self.requests))  # numbered from 0 over all calls
                self.requests += len(scored)
                rows = [_request_row(number, one) for number, one in numbered]
                if rows:
                    requests_writer.write_table(pa.Table.from_pylist(rows, schema=request_schema))
                windows = [(number, *window) for number, one in numbered for window in one.windows]
                if windows:
                    columns = _token_columns(windows, words)
                    arrays = [pa.array(columns[f.name]).cast(f.type) for f in token_schema]
                    tokens_writer.write_table(pa.table(arrays, schema=token_schema))

            yield add


def _token_columns(windows: Sequence[tuple[int, Continuation, Likelihood]], words: Words) -> dict[str, Any]:
    """Returns columns with one row per scored token of all windows."""
    import pyarrow as pa

    parts = [asked.ids[asked.first :] for _, asked, _ in windows]
    ids = np.concatenate(parts)
    columns: dict[str, Any] = {
        "request": np.repeat([number for number, _, _ in windows], [len(part) for part in parts]),
        "id": ids,
        "text": pa.array(words.of(ids), type=pa.string()),
    }
    answers = [likelihood.answers for _, _, likelihood in windows]
    for column in BUILT_IN.scores:
        is_measured = all(getattr(own, column.name) is not None for own in answers)
        columns |= flat_columns(answers, [column]) if is_measured else {column.name: pa.nulls(len(ids))}
    return columns


def _request_row(number: int, scored: ScoredRequest) -> dict[str, Any]:
    request, windows, encoded = scored
    context, continuation = ("", request.args[0]) if encoded is None else request.args
    return {
        "request": number,
        "kind": "loglikelihood_rolling" if encoded is None else "loglikelihood",
        "task": request.task_name,
        "doc_id": request.doc_id,
        "idx": request.idx,
        "continuation": continuation,
        "context_sha256": hashlib.sha256(context.encode()).hexdigest(),
        "context_tokens": 1 if encoded is None else encoded.asked.first,
        "tokens": sum(len(asked.ids) - asked.first for asked, _ in windows),
        "log_prob": math.fsum(likelihood.log_prob for _, likelihood in windows),
        "is_greedy": None if encoded is None else windows[0][1].is_greedy,
        "spanning": encoded is not None and encoded.spanning,
        "truncated": 0 if encoded is None else encoded.truncated,
    }


class Tally:
    """Counts all requests, and those that were cut or split oddly, since the model was made."""

    def __init__(self) -> None:
        self.requests = self.spanning = self.truncated = self.truncated_tokens = 0
        self._examples: dict[str, str] = {}
        self._told = (0, 0)

    def add(self, request: Any, encoded: Encoded) -> None:
        self.requests += 1
        if encoded.spanning:
            self.spanning += 1
            self._examples.setdefault("spanning", _example(request))
        if encoded.truncated:
            self.truncated += 1
            self.truncated_tokens += encoded.truncated
            self._examples.setdefault("truncated", _example(request))

    def tell(self) -> None:
        """Prints to standard error how many requests were cut or split oddly since the last call."""
        spanning, truncated = self.spanning - self._told[0], self.truncated - self._told[1]
        self._told = (self.spanning, self.truncated)
        if spanning:
            print_line(
                f"scoremode: in {spanning} of {self.requests} requests a token spans the end of the context, so that "
                f"the harness's rule scores other tokens than the text has; as in {self._examples['spanning']}"
            )
        if truncated:
            print_line(
                f"scoremode: {truncated} of {self.requests} requests were longer than the context and lost "
                f"{self.truncated_tokens} tokens on their left; as in {self._examples['truncated']}"
            )

    def as_json(self) -> dict[str, Any]:
        return {
            "loglikelihood": self.requests,
            "spanning": self.spanning,
            "truncated": self.truncated,
            "truncated_tokens": self.truncated_tokens,
            "examples": dict(self._examples),
        }


def _example(request: Any) -> str:
    context, continuation = request.args
    end = "…" + context[-30:] if len(context) > 30 else context
    begin = continuation[:30] + "…" if len(continuation) > 30 else continuation
    where = f"document {request.doc_id} of {request.task_name}: " if request.task_name else ""
    return one_line(f"{where}{end!r} + {begin!r}")
