"""The columns of a run as a Parquet file: written as a table, read column by column.

Every file has every column, with its type. A column that was not measured is null in every row and is read as None. A
column that is null in only some rows is refused. Only ``slice`` and the columns of a divergence are left out of a file
where there are none: most runs are compared with nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scoremode.core.reading import open_regular
from scoremode.core.scores.columns import CodedTexts, Divergences, Scores, TargetFacts
from scoremode.core.scores.schema import BUILT_IN, DIVERGENCE, FACTS, KL, MOST_IDS, ColumnSpec
from scoremode.errors import RunError

LEAST_KL = -1.0  # the KL from a baseline in 16 bits may be a little below 0
TEXTS = frozenset(column.name for column in FACTS if column.dtype == "text")


class RunRows(NamedTuple):
    """The targets of a run with everything that is stored about them."""

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
    scores = {ending: dict(rows.scores.columns()) for ending, rows in sides.items()}
    for column in BUILT_IN.scores:
        columns |= {column.name + ending: _measured(column, arrays, count) for ending, arrays in scores.items()}
    columns |= {f"top_text{end}": _strings(texts, count) for end, texts in zip(sides, top_texts, strict=True)}
    if sliced := next((side_facts for side_facts in (last.facts, facts) if side_facts.has("slice")), None):
        columns["slice"] = _strings(_one_dictionary(sliced.slice)[0], count)
    return pa.table(columns | {name: _numbers(column) for name, column in last.divergences.columns()})


def _measured(column: ColumnSpec, arrays: Mapping[str, npt.NDArray[Any]], count: int) -> Any:
    """A column of scores; nulls if it was not measured."""
    import pyarrow as pa

    if column.name in arrays:
        return _numbers(arrays[column.name])
    return pa.nulls(count, pa.from_numpy_dtype(column.numpy_type))


def _numbers(array: npt.NDArray[Any]) -> Any:
    """A pyarrow Array of the same numbers. ``pa.array`` would import pandas, if that is installed: half a second."""
    import pyarrow as pa

    buffer = pa.py_buffer(np.ascontiguousarray(array))
    return pa.Array.from_buffers(pa.from_numpy_dtype(array.dtype), len(array), [None, buffer])


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
    return [CodedTexts(column_codes, list(places)) for column_codes in codes]


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


def write(file: IO[bytes], rows: RunRows) -> None:
    """Writes the columns of a run into an open file."""
    import pyarrow.parquet as pq

    pq.write_table(to_arrow(*rows), file, compression="zstd")


def is_column_file(path: Path) -> bool:
    """Are these the columns of a run?"""
    try:
        ColumnFile(path)
    except RunError:
        return False
    return True


class ColumnFile:
    """A stored run's columns. The file stays open, so that the run can be read even after its folder is removed."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            with open_regular(path):
                self._file = pq.ParquetFile(pa.OSFile(os.fsencode(path)))
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from None
        self.rows: int = self._file.metadata.num_rows
        self.names: list[str] = self._file.schema_arrow.names
        columns = (*FACTS, *BUILT_IN.scores, *DIVERGENCE)
        absent = {column.name for column in columns if column.name not in self.names}
        for column in (*FACTS, *BUILT_IN.scores):
            if column.always and column.name in absent:
                raise self._unreadable(f"it has no column {column.name}")
        empty = {c.name for c in columns if c.optional and c.name not in absent and self._is_null(c.name)}
        self.not_measured = frozenset(absent | empty)

    def _is_null(self, name: str) -> bool:
        """Is the column null in every row? The file itself says it for each of its row groups."""
        metadata, place = self._file.metadata, self._file.schema_arrow.get_field_index(name)
        groups = (metadata.row_group(group).column(place) for group in range(metadata.num_row_groups))
        return self.rows > 0 and all(
            (stats := chunk.statistics) is not None and stats.null_count == chunk.num_values for chunk in groups
        )

    def require_possible(self) -> None:
        """Raise RunError for a column of another type, or with a value that no model can give; reads one at a time."""
        import pyarrow as pa

        for column in (*FACTS, *BUILT_IN.scores, *DIVERGENCE):
            if column.name in self.not_measured or column.name in TEXTS:
                continue
            kind = self._file.schema_arrow.field(column.name).type
            if kind != pa.from_numpy_dtype(column.numpy_type):
                raise self._unreadable(f"its column {column.name} is {kind}")
            values = self.read(column.name)
            wrong = values is not None and column.impossible_value(values, MOST_IDS, LEAST_KL if column is KL else None)
            if wrong:
                raise self._unreadable(wrong)

    def read(self, name: str) -> npt.NDArray[Any] | None:
        """A whole column; None: it was not measured."""
        if name in self.not_measured:
            return None
        chunks = self._table(name).chunks
        if any(chunk.null_count for chunk in chunks):
            raise self._unreadable(f"its column {name} is null in some rows")
        parts = [self._texts(chunk) if name in TEXTS else _from_arrow(chunk) for chunk in chunks]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _table(self, name: str) -> Any:
        """A column as pyarrow has it, in chunks."""
        import pyarrow as pa

        try:
            return self._file.read([name], use_threads=False).column(name)
        except (pa.ArrowException, KeyError, OSError) as error:
            raise self._unreadable(error) from None

    def _texts(self, column: Any) -> npt.NDArray[Any]:
        """The texts of a column, with one object per different text; ``to_pylist`` would make one object per row."""
        import pyarrow as pa

        if not pa.types.is_dictionary(column.type):
            return _objects(column.to_pylist())
        dictionary, places = _objects(column.dictionary.to_pylist()), _from_arrow(column.indices)
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(dictionary):
            raise self._unreadable("a text has no place in its dictionary")
        texts: npt.NDArray[Any] = dictionary[places]
        return texts

    def _unreadable(self, why: object) -> RunError:
        return RunError(f"{self.path} cannot be read ({why})", fix="score again with --fresh")


def _objects(values: list[Any]) -> npt.NDArray[Any]:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _from_arrow(column: Any) -> npt.NDArray[Any]:
    """A copy of the numbers of a column without nulls. The column's own ``to_numpy`` would import pandas."""
    dtype, first, count = np.dtype(column.type.to_pandas_dtype()), column.offset, len(column)
    if not count:
        return np.empty(0, dtype)
    return np.frombuffer(column.buffers()[1], dtype, count, first * dtype.itemsize).copy()
