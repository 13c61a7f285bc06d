"""Reads text and rows from untrusted files and from the hub; an error is one line that says what is wrong and where.

No file stays open longer than one pass over it. A file that changes between two passes is refused, because its sha256
and its tokens would belong to different texts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar, cast

import msgspec

from scoremode.core import strict_json
from scoremode.core.installation import pip_install
from scoremode.core.reading import numbered_lines, open_regular, read_text
from scoremode.errors import CorpusError, did_you_mean


class Message(TypedDict):
    """A message of a conversation. There may be more fields, which a chat template may read."""

    role: str
    content: str | list[dict[str, Any]] | None  # a text, parts of type "text", or null beside tool calls


class _Part(msgspec.Struct):
    type: Literal["text"]  # only text is scored
    text: str


class _Message(msgspec.Struct):
    role: Annotated[str, msgspec.Meta(pattern=r"\S")]
    content: str | list[_Part] | None


Row = str | list[Message]
RowsOf = Callable[[], Iterator[Row]]
RowKind = Literal["documents", "chat"]
T = TypeVar("T")

NAMED = ("wikitext2", "python-docs", "python-docs-short")
ROWS_LIKE = 'use rows like {"text": "…"} or {"messages": [{"role": "user", "content": "…"}]}; parts are of type text'
ROWS_AT_ONCE = 16  # of a Parquet file, which may be a few bytes for gigabytes of text
# the first bytes of compressed files, and how to unpack them
PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"PK\x03\x04": ("zip", "unzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"\xfd7zXZ\x00": ("xz", "unxz"),
    b"BZh91AY&SY": ("bzip2", "bunzip2"),
}


# ── any file ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def check_readable(path: Path) -> None:
    """Raises CorpusError unless this is a readable, non-empty file. A pipe is not waited for."""
    try:
        with open_regular(path) as file:
            begins = file.read(16)
    except (FileNotFoundError, NotADirectoryError):
        name = str(path)
        fix = did_you_mean(name, NAMED) if "/" not in name and "." not in name else "check the path"
        raise CorpusError(f"there is no corpus or file '{name}'", fix=fix) from None
    except (OSError, ValueError) as error:  # ValueError: the name contains NUL
        reason = error.strerror if isinstance(error, OSError) else error
        fix = "name a plain file that you may read; what is in a pipe is given as standard input, with --corpus -"
        raise CorpusError(f"{path} cannot be read ({reason})", fix=fix) from None
    if not begins:
        raise CorpusError(f"{path} is empty", fix="give a file with text in it")
    for magic, (kind, command) in PACKED.items():
        if begins.startswith(magic):
            raise CorpusError(f"{path} is compressed ({kind})", fix=f"unpack it first, with {command}")


def unchanged(path: Path, rows: Callable[[], Iterator[T]]) -> Callable[[], Iterator[T]]:
    """Wraps rows so that a pass over them raises CorpusError if the file has changed since this call."""

    def stamp() -> tuple[int, ...]:
        now = path.stat()
        return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns

    first = stamp()

    def check() -> None:
        if stamp() != first:
            raise CorpusError(f"{path} was changed while it was read", fix="run the same command again")

    def checked() -> Iterator[T]:
        check()
        yield from rows()
        check()

    return checked


# ── plain text ───────────────────────────────────────────────────────────────────────────────────────────────────────
def text_in_file(path: Path) -> Callable[[], Iterator[str]]:
    """Returns what reads the file's text, verbatim. It raises CorpusError if the file has changed since this call."""

    def text() -> Iterator[str]:
        with open_regular(path) as file:
            yield decoded(read_text(file, str(path), os.fstat(file.fileno()).st_size), str(path))

    return unchanged(path, text)


def decoded(data: bytes | bytearray, name: str) -> str:
    """Decodes UTF-8 without NUL; raises a CorpusError that names the position of the first bad byte."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        message = f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at {_place(data, error.start)}"
        fix = f"convert it first, as in: iconv -f latin1 -t utf-8 {name} > fixed.txt"
        raise CorpusError(message, fix=fix) from None
    if (at := data.find(b"\0")) >= 0:  # the only sign of English in UTF-16 without a byte order mark
        message = f"{name} contains a NUL byte at {_place(data, at)}: it is UTF-16, or not text"
        raise CorpusError(message, fix=f"convert it first, as in: iconv -f utf-16 -t utf-8 {name} > fixed.txt")
    return text


def _place(data: bytes | bytearray, offset: int) -> str:
    return f"offset {offset}, line {data.count(10, 0, offset) + 1}"


def lines_of(text: str) -> Iterator[str]:
    """Yields the lines of a text with their newlines; only "\\n" ends a line."""
    return (line[0] for line in re.finditer(r"[^\n]*\n|[^\n]+", text))


def is_text(value: str) -> bool:
    """Can this be encoded as UTF-8? Half a surrogate pair, which may come from a shell or JSON, cannot."""
    return not any("\ud800" <= c <= "\udfff" for c in value) if not value.isascii() else True


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def rows_of_file(path: Path, field: str | None) -> tuple[RowKind, RowsOf]:
    """Returns the rows of a .jsonl, .ndjson or .parquet file, and whether they are texts or conversations."""
    if path.suffix.lower() == ".parquet":
        column = parquet_column(path, field)
        return kind_of_rows(unchanged(path, lambda: parquet_rows(path, column)), str(path))
    return kind_of_rows(unchanged(path, lambda: _jsonl_rows(path, field)), str(path))


def kind_of_rows(rows: RowsOf, name: str) -> tuple[RowKind, RowsOf]:
    """Returns the kind of the first row, and all rows; a later row of another kind raises CorpusError."""
    first = next(rows(), None)
    if first is None:
        raise CorpusError(f"{name} contains no rows", fix="give a file with at least one row")
    kind, expected = type(first), "text" if isinstance(first, str) else "a list of messages"

    def checked() -> Iterator[Row]:
        for number, row in enumerate(rows(), 1):
            if type(row) is not kind:
                problem = f"{name}: row {number} is not {expected} as the first is"
                raise CorpusError(problem, fix="separate the two kinds")
            yield row

    return "documents" if kind is str else "chat", checked


def _jsonl_rows(path: Path, field: str | None) -> Iterator[Row]:
    for number, line in numbered_lines(path):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            value = strict_json.parse(line, constants=True)
        except ValueError as error:
            raise CorpusError(f"{where} is not JSON ({error})", fix="fix or remove the line") from None
        if not isinstance(value, dict):
            raise CorpusError(f"{where} is not a JSON object", fix=ROWS_LIKE)
        yield checked_row(value, field or text_field(value, where), where)


def text_field(names: Collection[str], where: str) -> str:
    """Returns the field of a row that contains its text or conversation, for a user who chose no field."""
    for name in ("messages", "text", "content", "page"):
        if name in names:
            return name
    raise CorpusError(f"{where} has no field 'text'", fix=_choose(names))


def checked_row(row: Mapping[str, object], field: str, where: str) -> Row:
    """Returns the text or conversation in a field of a row; raises CorpusError if there is neither.

    A conversation that a chat template would print wrongly is refused: most templates print null as "None".
    """
    if field not in row:
        raise CorpusError(f"{where} has no field '{field}'", fix=_choose(row))
    value = cast(Row, row[field])
    try:
        msgspec.convert(value, list[_Message] if field == "messages" else str | list[_Message])
        if not is_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)):
            raise CorpusError(f"{where} is not UTF-8 (it contains half a surrogate pair)", fix="fix or remove the row")
    except (TypeError, ValueError) as error:  # a Parquet file may contain dates and bytes
        wanted = "a conversation" if field == "messages" or isinstance(value, list) else "text or a conversation"
        raise CorpusError(f"{where}: field '{field}' is not {wanted} ({error})", fix=ROWS_LIKE) from None
    if not value and isinstance(value, list):
        raise CorpusError(f"{where}: field '{field}' is an empty list of messages", fix="fix or remove the row")
    for number, message in enumerate(value if isinstance(value, list) else (), 1):
        if message["content"] is None and not message.get("tool_calls"):
            problem = f"{where}: content of message {number} is null, and there are no tool_calls"
            raise CorpusError(problem, fix='remove the row, or give "content": ""')
    return value


def _choose(names: Iterable[str]) -> str:
    fields = list(names)
    if not fields:
        return ROWS_LIKE
    shown = ", ".join(str(name)[:40] for name in fields[:20])
    return f"choose one with --field ({shown}{', …' if len(fields) > 20 else ''})"


# ── Parquet ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def parquet_column(path: Path, field: str | None) -> str:
    """Returns the column that contains the text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(open_regular(path)).names
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorpusError(f"{path} is not a Parquet file ({error})", fix="check the file") from None
    if field is None:
        field = text_field(names, str(path))
    if field not in names:
        raise CorpusError(f"{path} has no column '{field}'", fix=_choose(names))
    return field


def parquet_rows(path: Path, column: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with open_regular(path) as source, pq.ParquetFile(source) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=[column]):
                if batch.num_columns != 1:
                    raise CorpusError(f"{path} has more than one column '{column}'", fix="rename one of them")
                for value in batch.column(0):
                    yield checked_row({column: value.as_py()}, column, f"{path} row {number + 1}")
                    number += 1
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path} row {number + 1} is not UTF-8 ({error})", fix="fix or remove the row") from None
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(f"{path} is damaged after row {number} ({error})", fix="get the file again") from None


# ── the hub ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def wikitext2_from_hub() -> RowsOf:
    """The rows of the test part of WikiText-2."""
    from huggingface_hub import hf_hub_download

    from scoremode.core.hub import explain_hub_error, offline_if_unreachable, quiet

    file = ("Salesforce/wikitext", "wikitext-2-raw-v1/test-00000-of-00001.parquet")
    try:
        with quiet(), offline_if_unreachable():
            path = hf_hub_download(*file, repo_type="dataset")
    except Exception as error:  # the hub client raises many types; all of them mean "no file"
        reason, _ = explain_hub_error(error)
        fix = "give a local copy: --corpus wikitext2:FILE, where FILE is wiki.test.raw or the hub's parquet"
        raise CorpusError(f"wikitext2 could not be fetched from the Hugging Face hub: {reason}", fix=fix) from None
    return lambda: parquet_rows(Path(path), "text")


def require_datasets() -> None:
    """Refuses if the package that reads datasets of the hub is not installed; it is not imported."""
    package = sys.modules["datasets"] if "datasets" in sys.modules else importlib.util.find_spec("datasets")
    if package is None:
        raise CorpusError("--dataset needs the package 'datasets'", fix=pip_install("datasets"))


def hub_dataset(name: str, config: str | None, split: str | None, field: str | None) -> tuple[str, RowKind, RowsOf]:
    """The label, kind and rows of a dataset."""
    from scoremode.core.hub import offline_if_unreachable

    try:
        with offline_if_unreachable() as reachable:
            from datasets import load_dataset

            rows: Any = load_dataset(name, config, split=split or "test")
    except Exception as error:
        reason = f"{type(error).__name__}: " + str(error).split("\n")[0][:200]
        hint = "--dataset, --dataset-config and --split"
        if not reachable:
            reason = "it is not on this machine, and the Hugging Face hub cannot be reached"
            hint = "the network and HF_ENDPOINT"
        fix = f"check {hint}, or save its rows as .jsonl and give --corpus FILE"
        raise CorpusError(f"dataset {name} could not be loaded ({reason})", fix=fix) from None
    if not len(rows):
        raise CorpusError(f"dataset {name} has no rows", fix="choose another --split")
    column = field or text_field(rows[0].keys(), f"dataset {name}")

    def read() -> Iterator[Row]:
        for number, row in enumerate(rows, 1):
            yield checked_row(row, column, f"{name} row {number}")

    label = ":".join(part for part in (name, config, split or "test") if part)
    return label, *kind_of_rows(read, name)
