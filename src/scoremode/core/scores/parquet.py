"""The columns of a run as a Parquet file: written block by block, read column by column, never all at once.

Every file has every column, with its type. A column that was not measured is null in every row and is read as None. A
column that is null in only some rows is refused. Only ``slice`` and the columns of a divergence are left out of a file
where there are none: most runs are compared with nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scoremode.core.scores.columns import CodedTexts, Divergences, Scores, TargetFacts
from scoremode.core.scores.schema import BUILT_IN, DIVERGENCE, FACTS, Column, chosen_divergences
from scoremode.errors import RunError, harmless
from scoremode.values import BLOCK, LONG, mapped_column

NEAR = 64  # columns of row groups that ``value`` keeps
TEXTS = frozenset(column.name for column in FACTS if column.dtype == "text")


class RunRows(NamedTuple):
    """Consecutive targets with everything that a run stores about them."""

    scores: Scores
    facts: TargetFacts
    divergences: Divergences


def to_arrow(scores: Scores, facts: TargetFacts, divergences: Divergences) -> Any:
    """A pyarrow Table with one row per target: its position, its token and its scores."""
    return _table({"": RunRows(scores, facts, divergences)})


def pair_to_arrow(baseline: RunRows, candidate: RunRows) -> Any:
    """A pyarrow Table of two runs of one plan: each score once as ``…_baseline`` and once as ``…_candidate``."""
    return _table({"_baseline": baseline, "_candidate": candidate})


def _table(sides: dict[str, RunRows]) -> Any:
    """A pyarrow Table of the same targets in one or two runs, by the endings of their columns' names."""
    import pyarrow as pa

    first, last = next(iter(sides.values())), next(reversed(sides.values()))
    facts, count = first.facts, len(first.scores)
    columns: dict[str, Any] = {c.name: _numbers(getattr(facts, c.name)) for c in FACTS if c.name not in TEXTS}
    text, *top_texts = _one_dictionary(facts.text, *(rows.facts.top_text for rows in sides.values()))
    columns["text"] = _strings(text, count)
    known = {ending: dict(rows.scores.columns()) for ending, rows in sides.items()}
    for column in BUILT_IN.scores:
        columns |= {column.name + ending: _measured(column, own, count) for ending, own in known.items()}
    columns |= {f"top_text{end}": _strings(texts, count) for end, texts in zip(sides, top_texts, strict=True)}
    if sliced := next((its for its in (last.facts, facts) if its.has("slice")), None):
        columns["slice"] = _strings(_one_dictionary(sliced.slice)[0], count)
    return pa.table(columns | {name: _numbers(column) for name, column in last.divergences.columns()})


def _measured(column: Column, known: Mapping[str, npt.NDArray[Any]], count: int) -> Any:
    """A column of scores; nulls if it was not measured."""
    import pyarrow as pa

    if column.name in known:
        return _numbers(known[column.name])
    return pa.nulls(count, pa.from_numpy_dtype(column.numpy_type))


def _numbers(array: npt.NDArray[Any]) -> Any:
    """A pyarrow Array of the same numbers. ``pa.array`` would import pandas, if that is installed: half a second."""
    import pyarrow as pa

    packed = np.packbits(array, bitorder="little") if array.dtype == np.bool_ else np.ascontiguousarray(array)
    return pa.Array.from_buffers(pa.from_numpy_dtype(array.dtype), len(array), [None, pa.py_buffer(packed)])


def _one_dictionary(*columns: Any) -> list[CodedTexts | None]:
    """Columns of texts, coded with one list of words, so that they can be compared; coded columns stay as they are.

    A column that was not measured gets the words too: pandas compares only columns with the same categories.
    """
    if isinstance(columns[0], CodedTexts):
        return list(columns)
    places: dict[str, int] = {}
    codes = [
        None if texts is None else np.fromiter((places.setdefault(t, len(places)) for t in texts), np.int32, len(texts))
        for texts in columns
    ]
    return [CodedTexts(found, list(places)) for found in codes]


def _strings(texts: CodedTexts | None, count: int) -> Any:
    """A pyarrow Array in which every text is stored once; made without pandas, as in ``_numbers``.

    The method ``dictionary_encode`` of pyarrow would import ``pyarrow.compute``: a tenth of a second.
    """
    import pyarrow as pa
    from pyarrow.lib import StringBuilder

    if texts is None:
        return pa.nulls(count, pa.dictionary(pa.int32(), pa.string()))
    builder = StringBuilder()
    builder.append_values(texts.words)
    codes = pa.nulls(count, pa.int32()) if texts.codes is None else _numbers(texts.codes)
    return pa.DictionaryArray.from_arrays(codes, builder.finish())


def load_library() -> None:
    """Import the library that writes the file before it is needed, while an engine computes."""
    import pyarrow.parquet  # noqa: F401


def write(file: IO[bytes], blocks: Iterable[RunRows]) -> None:
    """Write blocks into an open file; each becomes a row group and is not kept in memory.

    While one block is compressed, which needs no Python, the next is made.
    """
    import pyarrow.parquet as pq

    tables = (to_arrow(*block) for block in blocks)
    first = next(tables)
    with (
        ThreadPoolExecutor(1, "scoremode-columns") as ahead,
        pq.ParquetWriter(file, first.schema, compression="zstd") as writer,
    ):
        table = first
        del first
        while table is not None:
            coming = ahead.submit(next, tables, None)
            writer.write_table(table)
            table = coming.result()


def columns_problem(path: Path) -> str | None:
    """Why a Parquet file cannot be the columns of a run, in words; None if it can."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pa.OSFile(os.fsencode(path)) as file:  # a name need not be UTF-8
            found = pq.read_schema(file)
        types = {name: str(found.field(name).type) for name in found.names}
    except (pa.ArrowException, KeyError, OSError, ValueError) as error:
        return f"it is not Parquet: {harmless(' '.join(str(error).split()))[:100]}"
    for column in (*FACTS, *BUILT_IN.scores, *chosen_divergences(types)):
        if column.name not in types and not column.always:
            continue
        kind = types.get(column.name, "absent")
        if column.dtype == "text" and "string" not in kind:
            return f"its column {column.name} is {kind}"
        if column.dtype != "text" and kind != str(pa.from_numpy_dtype(column.numpy_type)):
            return f"its column {column.name} is {kind}"
    return None


class ColumnFile:
    """A stored run's columns. The file stays open, so that the run can be read even after its folder is removed."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            self._file = pq.ParquetFile(pa.OSFile(os.fsencode(path)))
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from None
        self.rows: int = self._file.metadata.num_rows
        self._near: dict[tuple[str, int], npt.NDArray[Any]] = {}  # columns of row groups, for ``value``
        self.names: list[str] = self._file.schema_arrow.names
        columns = (*FACTS, *BUILT_IN.scores)
        absent = [column for column in columns if column.name not in self.names]
        for column in absent:
            if column.always:
                raise self._unreadable(f"it has no column {column.name}")
        left_out = {column.name for column in (*columns, *DIVERGENCE) if column.name not in self.names}
        empty = {c.name for c in columns if c.optional and c not in absent and self._is_null(c.name)}
        self.not_measured = frozenset(left_out | empty)
        for word in {column.together for column in columns if column.together}:
            joint = [column.name for column in (*BUILT_IN.scores, *FACTS) if column.together == word]
            if 0 < len(self.not_measured.intersection(joint)) < len(joint):
                raise self._unreadable(f"only some of {', '.join(joint)} were measured")

    def _is_null(self, name: str) -> bool:
        """Is the column null in every row? RunError if only in some rows. ``_as_numpy`` checks the counts again."""
        import pyarrow as pa

        metadata, nulls = self._file.metadata, 0
        index = next((i for i in range(metadata.num_columns) if metadata.schema.column(i).path == name), None)
        if index is None:
            raise self._unreadable(f"its column {name} is nested")
        for group in range(metadata.num_row_groups):
            try:
                counts = metadata.row_group(group).column(index).statistics
                if counts is not None and counts.has_null_count:
                    nulls += counts.null_count
                else:
                    nulls += self._file.read_row_group(group, columns=[name]).column(name).null_count
            except (pa.ArrowException, KeyError, OSError) as error:
                raise self._unreadable(error) from None
        if nulls not in (0, self.rows):
            raise self._unreadable(f"its column {name} is null in {nulls} of {self.rows} rows")
        return nulls > 0

    def extremes(self, name: str) -> npt.NDArray[Any]:
        """The least and the largest number of each row group, as far as the file's own statistics know them."""
        metadata, index = self._file.metadata, self._file.schema_arrow.names.index(name)
        groups = (metadata.row_group(group).column(index).statistics for group in range(metadata.num_row_groups))
        return np.array(
            [x for found in groups if found is not None and found.has_min_max for x in (found.min, found.max)]
        )

    def read(self, name: str) -> npt.NDArray[Any] | None:
        """A whole column; a long column of numbers is mapped from a temporary file. None: it was not measured."""
        if name not in self.names:
            return None
        if self.rows >= LONG and name not in self.not_measured and name not in TEXTS:
            with suppress(OSError):  # no room for the file: then in memory
                return mapped_column((part for (part,) in self._batches([name])), self.rows)
        parts = [part for (part,) in self._batches([name])]
        return None if name in self.not_measured else _joined(parts)

    def value(self, name: str, row: int) -> Any:
        """One value of a column that was measured. The rows around it are kept for the next call."""
        group = int(np.searchsorted(self._group_starts, row, side="right")) - 1
        if (name, group) not in self._near:
            if len(self._near) >= NEAR:
                self._near.clear()
            self._near[name, group] = _joined([part for (part,) in self._batches([name], [group])])
        return self._near[name, group][row - self._group_starts[group]]

    @cached_property
    def _group_starts(self) -> list[int]:
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return [0, *np.cumsum(sizes).tolist()][:-1]

    def blocks(self, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Some columns side by side, BLOCK rows at a time, whatever the sizes of the file's row groups."""
        there = [name for name in names if name not in self.not_measured]
        assert there, "none of these columns was measured"
        waiting: list[tuple[npt.NDArray[Any], ...]] = []
        for batch in self._batches(there):
            waiting.append(batch)
            while sum(len(part[0]) for part in waiting) >= BLOCK:
                joined = [_joined([part[i] for part in waiting]) for i in range(len(there))]
                yield _in_places(names, there, [column[:BLOCK] for column in joined])
                waiting = [tuple(column[BLOCK:] for column in joined)]
        if sum(len(part[0]) for part in waiting):
            yield _in_places(names, there, [_joined([part[i] for part in waiting]) for i in range(len(there))])

    def _batches(
        self, names: Sequence[str], groups: Iterable[int] | None = None
    ) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        import pyarrow as pa

        try:
            # one call for all groups would keep what all of them need
            for group in range(self._file.metadata.num_row_groups) if groups is None else groups:
                for batch in self._file.iter_batches(BLOCK, row_groups=[group], columns=list(names), use_threads=False):
                    yield tuple(self._as_numpy(batch.column(name), name) for name in names)
        except (pa.ArrowException, KeyError, OSError) as error:
            raise self._unreadable(error) from None

    def _as_numpy(self, column: Any, name: str) -> npt.NDArray[Any]:
        if column.null_count != (len(column) if name in self.not_measured else 0):
            raise self._unreadable(f"its column {name} is null in some rows")
        if name in self.not_measured:
            return np.empty(len(column))
        if name in TEXTS:
            return self._texts(column)
        return _from_arrow(column)

    def _texts(self, column: Any) -> npt.NDArray[Any]:
        """The texts of a column, with one object per different text; ``to_pylist`` would make one object per row."""
        import pyarrow as pa

        if not pa.types.is_dictionary(column.type):
            return _objects(column.to_pylist())
        known, places = _objects(column.dictionary.to_pylist()), _from_arrow(column.indices)
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(known):
            raise self._unreadable("a text has no place in its dictionary")
        found: npt.NDArray[Any] = known[places]
        return found

    def _unreadable(self, why: object) -> RunError:
        return RunError(f"{self.path} cannot be read ({why})", fix="score again with --fresh")


def _objects(values: list[Any]) -> npt.NDArray[Any]:
    found = np.empty(len(values), object)
    found[:] = values
    return found


def _from_arrow(column: Any) -> npt.NDArray[Any]:
    """A copy of the numbers of a column without nulls. The column's own ``to_numpy`` would import pandas."""
    dtype, first, count = np.dtype(column.type.to_pandas_dtype()), column.offset, len(column)
    if dtype == np.bool_:
        bits = np.frombuffer(column.buffers()[1], np.uint8)
        return np.unpackbits(bits, bitorder="little")[first : first + count].astype(np.bool_)
    if not count:
        return np.empty(0, dtype)
    return np.frombuffer(column.buffers()[1], dtype, count, first * dtype.itemsize).copy()


def _in_places(names: Sequence[str], there: Sequence[str], parts: Sequence[npt.NDArray[Any]]) -> tuple[Any, ...]:
    """The measured columns in the order of ``names``, with None in place of the others."""
    known = dict(zip(there, parts, strict=True))
    return tuple(known.get(name) for name in names)


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
