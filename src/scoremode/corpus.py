"""Named or local text -> Corpus: rows that can be read again and again, with a sha256.

A corpus never holds its text: each pass reads the source anew, so a long file is in memory once, in the step that
needs it. What the rows *are* to each other is the corpus's layout, because recipes treat them differently:

layout      rows                                       example
text        one document, verbatim                     notes.txt, --text, stdin
lines       the lines of one long text                 wikitext2
documents   texts that have nothing to do with         python-docs, several files, .jsonl, .parquet, --dataset
            each other
chat        conversations (lists of messages)          .jsonl rows with "messages"
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from scoremode.errors import CorpusError, did_you_mean

Layout = Literal["text", "lines", "documents", "chat"]
Message = dict[str, Any]
Row = str | list[Message]

NAMED = ("wikitext2", "python-docs")
WIKITEXT2_BLANK = " \n"  # a blank line of wiki.test.raw; the hub's rows have "" there


@dataclass(frozen=True)
class Corpus:
    """Text with a name and a sha256. ``rows()`` starts a new pass over the source."""

    name: str
    layout: Layout
    rows: Callable[[], Iterator[Row]]
    sha256: str  # of the text itself where the layout is "text", else of its rows as JSON lines
    row_count: int
    byte_count: int

    def texts(self) -> Iterator[str]:
        """The rows of a corpus that is not a chat."""
        assert self.layout != "chat", "chat rows become text through a chat template"
        return cast(Iterator[str], self.rows())


def load(
    spec: str | Sequence[str] | None = None,
    *,
    text: str | None = None,
    field: str | None = None,
    num_samples: int | None = None,
    dataset: str | None = None,
    dataset_config: str | None = None,
    split: str | None = None,
) -> Corpus:
    """The corpus that a user named: one of ``spec`` (names, files, ``-``), ``text`` or ``dataset``.

    >>> load(text="The quick brown fox").sha256[:12]
    '5cac4f980fed'
    """
    specs = [spec] if isinstance(spec, str) else list(spec or [])
    given = [name for name, value in (("--corpus", specs), ("--text", text), ("--dataset", dataset)) if value]
    if text is not None and not text:
        raise CorpusError("--text is empty", fix='give it some text, as in --text "The quick brown fox"')
    if len(given) != 1:
        what = " and ".join(given) + " were given together" if given else "no text was given"
        raise CorpusError(what, fix="give one of --corpus NAME-or-FILE…, --text TEXT, --dataset NAME")
    if text is not None and not is_text(text):
        raise CorpusError("--text is not UTF-8", fix="give text in UTF-8, or a file with --corpus")
    if not dataset and (dataset_config or split):
        flag = "--dataset-config" if dataset_config else "--split"
        raise CorpusError(f"{flag} was given without --dataset", fix=f"name a dataset, or leave {flag} out")
    if num_samples is not None and num_samples < 1:
        raise CorpusError(f"--num-samples {num_samples} leaves no text", fix="give 1 or more")
    if dataset:
        name, layout, rows = _hub_dataset(dataset, dataset_config, split, field)
    elif specs:
        name, layout, rows = _one(specs[0], field) if len(specs) == 1 else _several(specs, field)
    else:
        name, layout, rows = "text", "text", lambda: iter([text or ""])
    return _measured(name, layout, _first(rows, layout, num_samples))


RowsOf = Callable[[], Iterator[Row]]
Source = tuple[str, Layout, RowsOf]


def _first(rows: RowsOf, layout: Layout, count: int | None) -> RowsOf:
    """The first ``count`` rows; of a plain text its first lines, newlines kept, still one document."""
    if count is None:
        return rows
    if layout == "text":
        return lambda: iter(["".join(islice(_lines(cast(str, next(rows()))), count))])
    return lambda: islice(rows(), count)


def is_text(value: str) -> bool:
    """Can this be written as UTF-8? Half a surrogate pair, as a shell or JSON may bring it, cannot."""
    return not any("\ud800" <= c <= "\udfff" for c in value) if not value.isascii() else True


def _lines(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        yield text[start:end]
        start = end


def _measured(name: str, layout: Layout, rows: RowsOf) -> Corpus:
    hasher, row_count, byte_count = hashlib.sha256(), 0, 0
    for row in rows():
        data = row.encode() if isinstance(row, str) else json.dumps(row, ensure_ascii=False, sort_keys=True).encode()
        hasher.update(data if layout == "text" else json.dumps(row, ensure_ascii=False).encode() + b"\n")
        row_count, byte_count = row_count + 1, byte_count + len(data)
    if byte_count == 0:
        raise CorpusError(f"{name} holds no text", fix="give a file with at least two tokens of text")
    return Corpus(name, layout, rows, hasher.hexdigest(), row_count, byte_count)


def _one(spec: str, field: str | None) -> Source:
    if spec == "wikitext2":
        return "wikitext2", "lines", _wikitext2_from_hub()
    if spec.startswith("wikitext2:"):
        return "wikitext2", "lines", _wikitext2_from_file(Path(spec.removeprefix("wikitext2:")))
    if spec == "python-docs":
        return "python-docs", "documents", _python_docs
    if spec == "-":
        data = sys.stdin.buffer.read()  # cannot be read twice, so it is kept
        text = _decode(data, "standard input")
        return "stdin", "text", lambda: iter([text])
    return _file(Path(spec), field)


def _several(specs: Sequence[str], field: str | None) -> Source:
    sources = [_one(spec, field) for spec in specs]
    if any(layout == "chat" for _, layout, _ in sources) and not all(layout == "chat" for _, layout, _ in sources):
        raise CorpusError("chat files and text files were given together", fix="score them in separate runs")

    def rows() -> Iterator[Row]:
        for _, _, part in sources:
            yield from part()

    layout: Layout = "chat" if sources[0][1] == "chat" else "documents"
    return "+".join(name for name, _, _ in sources), layout, rows


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _file(path: Path, field: str | None) -> Source:
    _check_readable(path)
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return path.name, *_layout_of_rows(lambda: _jsonl_rows(path, field), str(path))
    if suffix == ".parquet":
        column = _parquet_column(path, field)
        return path.name, *_layout_of_rows(lambda: _parquet_rows(path, column), str(path))
    return path.name, "text", lambda: iter([_read_text(path)])


def _check_readable(path: Path) -> None:
    if path.is_dir():
        raise CorpusError(f"{path} is a folder", fix="name the files in it")
    if not path.exists():
        name = str(path)
        fix = did_you_mean(name, NAMED) if "/" not in name and "." not in name else "check the path"
        raise CorpusError(f"there is no corpus or file '{name}'", fix=fix)
    if not os.access(path, os.R_OK):
        raise CorpusError(f"{path} cannot be read", fix="check its permissions")
    if path.stat().st_size == 0:
        raise CorpusError(f"{path} is empty", fix="give a file with at least two tokens of text")


def _read_text(path: Path) -> str:
    """The file's text, verbatim. Mapped, not read, so that bytes and text are not both held in memory."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _decode(memoryview(data), str(path))


def _decode(data: bytes | memoryview, name: str) -> str:
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        before = bytes(data[: error.start])
        line, byte = before.count(b"\n") + 1, error.start
        bad = error.object[error.start]
        del error.object  # holds the mapped file open
        message = f"{name} is not UTF-8: byte 0x{bad:02x} at offset {byte}, line {line}"
    else:
        return text
    finally:
        if isinstance(data, memoryview):
            data.release()
    raise CorpusError(message, fix=f"convert it first, as in: iconv -f latin1 -t utf-8 {name} > fixed.txt")


def _layout_of_rows(rows: RowsOf, name: str) -> tuple[Layout, RowsOf]:
    """Chat or text, by what the first row holds; a row of the other kind is refused when it comes."""
    first = next(rows(), None)
    if first is None:
        raise CorpusError(f"{name} holds no rows", fix="give a file with one JSON object a line")
    kind, expected = type(first), "text" if isinstance(first, str) else "a list of messages"

    def checked() -> Iterator[Row]:
        for number, row in enumerate(rows(), 1):
            if type(row) is not kind:
                raise CorpusError(
                    f"{name}: row {number} is not {expected} as the first is", fix="separate the two kinds"
                )
            yield row

    return "documents" if kind is str else "chat", checked


def _jsonl_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:  # UnicodeDecodeError is one too
                raise CorpusError(
                    f"{path} line {number} is not JSON ({error})", fix="mend or remove the line"
                ) from None
            if not isinstance(value, dict):
                raise CorpusError(f"{path} line {number} is not a JSON object", fix='use rows like {"text": "…"}')
            yield number, value


def _jsonl_rows(path: Path, field: str | None) -> Iterator[Row]:
    for number, value in _jsonl_objects(path):
        where = f"{path} line {number}"
        yield _checked_row(value, field or _text_field(value, where), where)


def _text_field(row: dict[str, Any], where: str) -> str:
    for name in ("messages", "text", "content", "page"):
        if name in row:
            return name
    raise CorpusError(f"{where} has no field 'text'", fix=f"choose one with --field ({', '.join(row)})")


def _checked_row(row: dict[str, Any], field: str, where: str) -> Row:
    if field not in row:
        raise CorpusError(f"{where} has no field '{field}'", fix=f"choose one with --field ({', '.join(row)})")
    value = row[field]
    if isinstance(value, str) and field != "messages":
        if not is_text(value):
            raise CorpusError(f"{where} is not UTF-8 (it holds half a surrogate pair)", fix="mend or remove the row")
        return value
    if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
        return value
    raise CorpusError(f"{where}: field '{field}' is neither text nor a list of messages", fix="choose another --field")


def _parquet_column(path: Path, field: str | None) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(f"{path} is not a Parquet file ({error})", fix="check the file") from None
    if field is None:
        return _text_field(dict.fromkeys(names), str(path))
    if field not in names:
        raise CorpusError(f"{path} has no column '{field}'", fix=f"choose one with --field ({', '.join(names)})")
    return field


def _parquet_rows(path: Path, column: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield _checked_row({column: value}, column, f"{path} row {number}")
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(f"{path} is damaged after row {number} ({error})", fix="get the file again") from None


# ── named corpora ────────────────────────────────────────────────────────────────────────────────────────────────────
def _python_docs() -> Iterator[Row]:
    """The prose of Python's own reference topics: on every machine that can run scoremode."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def _wikitext2_from_file(path: Path) -> RowsOf:
    """A local wiki.test.raw (or the hub's parquet) as the rows that the hub gives."""
    _check_readable(path)
    if path.suffix.lower() == ".parquet":
        column = _parquet_column(path, "text")
        return lambda: _parquet_rows(path, column)

    def rows() -> Iterator[Row]:
        for line in _lines(_read_text(path)):
            yield line if line.strip() else ""

    return rows


def _wikitext2_from_hub() -> RowsOf:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    file = ("Salesforce/wikitext", "wikitext-2-raw-v1/test-00000-of-00001.parquet")
    try:
        path = hf_hub_download(*file, repo_type="dataset")
    except Exception as error:  # the hub client raises many kinds; all of them mean "no file"
        raise CorpusError(
            f"wikitext2 could not be fetched from the Hugging Face hub ({type(error).__name__})",
            fix="give a local copy: --corpus wikitext2:FILE, where FILE is wiki.test.raw or the hub's parquet",
        ) from None
    return lambda: _parquet_rows(Path(path), "text")


def _hub_dataset(name: str, config: str | None, split: str | None, field: str | None) -> Source:
    try:
        from datasets import load_dataset
    except ImportError:
        raise CorpusError("--dataset needs the package 'datasets'", fix="pip install 'scoremode[datasets]'") from None
    try:
        rows: Any = load_dataset(name, config, split=split or "test")
    except Exception as error:
        reason = str(error).split("\n")[0][:200]
        raise CorpusError(
            f"dataset {name} could not be loaded ({type(error).__name__}: {reason})",
            fix="check --dataset, --dataset-config and --split, or save its rows as .jsonl and give --corpus FILE",
        ) from None
    if not len(rows):
        raise CorpusError(f"dataset {name} has no rows", fix="choose another --split")
    column = field or _text_field(dict(rows[0]), f"dataset {name}")

    def read() -> Iterator[Row]:
        for number, row in enumerate(rows, 1):
            yield _checked_row(row, column, f"{name} row {number}")

    label = ":".join(part for part in (name, config, split or "test") if part)
    return label, *_layout_of_rows(read, name)
