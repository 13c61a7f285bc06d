"""The columns of a run as a Parquet file: written block by block, read column by column, never whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scoremode.errors import RunError
from scoremode.store.files import written_atomically
from scoremode.store.scores import Scores, TargetFacts
from scoremode.values import BLOCK, Floats

OF_SCORES = ("logprob", "rank", "entropy", "top", "top_logprob")
OF_FACTS = ("window", "document", "token", "id", "byte_len", "word_starts", "group", "weight", "text", "top_text")


class Rows(NamedTuple):
    """Some consecutive targets with all that a run knows of them."""

    scores: Scores
    facts: TargetFacts
    kl: Floats | None


def to_arrow(scores: Scores, facts: TargetFacts, kl: Floats | None = None) -> Any:
    """One row a target: where it stands, what it is, what the model thought of it."""
    import pyarrow as pa

    columns: dict[str, Any] = {name: pa.array(getattr(facts, name)) for name in OF_FACTS if not name.endswith("text")}
    columns["text"] = pa.array(facts.text, type=pa.string()).dictionary_encode()
    for name, column in scores.columns():
        columns[name] = pa.array(column)
    columns["top_text"] = pa.array(facts.top_text, type=pa.string()).dictionary_encode()
    if kl is not None:
        columns["kl"] = pa.array(kl)
    return pa.table(columns)


def write(path: Path, blocks: Iterable[Rows]) -> None:
    """The whole file or none of it; a block is a row group, and is forgotten once it is written."""
    import pyarrow.parquet as pq

    tables = (to_arrow(*block) for block in blocks)
    first = next(tables)
    with written_atomically(path) as file, pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
        writer.write_table(first)
        del first
        for table in tables:
            writer.write_table(table)


class ColumnFile:
    """A stored run's columns. The file stays open, so that a run outlives the removal of its folder."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            self._file = pq.ParquetFile(pa.OSFile(str(path)))
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from None
        self.rows: int = self._file.metadata.num_rows
        self.names: list[str] = self._file.schema_arrow.names
        missing = [name for name in (*OF_FACTS, *OF_SCORES) if name not in self.names]
        if missing:
            raise self._unreadable(f"it has no column {missing[0]}")

    def read(self, name: str) -> npt.NDArray[Any]:
        return _joined([part for (part,) in self._batches([name])])

    def blocks(self, names: Sequence[str]) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        """Batches end where row groups do, which differ from file to file: they are cut again to BLOCK rows."""
        waiting: list[tuple[npt.NDArray[Any], ...]] = []
        for batch in self._batches(names):
            waiting.append(batch)
            while sum(len(part[0]) for part in waiting) >= BLOCK:
                joined = [_joined([part[i] for part in waiting]) for i in range(len(names))]
                yield tuple(column[:BLOCK] for column in joined)
                waiting = [tuple(column[BLOCK:] for column in joined)]
        if sum(len(part[0]) for part in waiting):
            yield tuple(_joined([part[i] for part in waiting]) for i in range(len(names)))

    def _batches(self, names: Sequence[str]) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        import pyarrow as pa

        try:
            for batch in self._file.iter_batches(BLOCK, columns=list(names), use_threads=False):
                yield tuple(_as_numpy(batch.column(name), name) for name in names)
        except (pa.ArrowException, KeyError, OSError) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, why: object) -> RunError:
        return RunError(f"{self.path} cannot be read ({why})", fix="score again with --fresh")


def _as_numpy(column: Any, name: str) -> npt.NDArray[Any]:
    values = column.to_numpy(zero_copy_only=False)
    return values.astype(object) if name.endswith("text") else np.array(values)


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
