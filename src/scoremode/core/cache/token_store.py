"""Stores the tokens of long texts on disk, as columns that are mapped into memory, once per text and tokenizer.

texts/DIGEST/ids.bin, char_end.bin, …    one column each, little endian
texts/DIGEST/tokens.json                 the facts about the columns, their checksums, a seal; written last
texts/DIGEST/.lock                       exists while a process writes the columns

DIGEST is computed from everything that decides the tokens: the text, its arrangement, the tokenizer. A process that is
killed leaves a folder without tokens.json, and the next process starts again. Files are never overwritten, because
another process may have mapped them. Instead they are removed and created again.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import msgspec
import numpy as np

from scoremode.core.cache.entries import mark_used
from scoremode.core.cache.eviction import make_room
from scoremode.core.disk import manifests
from scoremode.core.disk.files import write_atomically
from scoremode.core.disk.folders import LOCK, TOKENS_MARK, entry_folder
from scoremode.core.disk.locks import hold_lock
from scoremode.core.strict_json import read_object
from scoremode.core.text.tokenizer import TokenizerFacts
from scoremode.core.text.tokens import Tokens, TokenStream
from scoremode.errors import CorpusError, RunError, print_line
from scoremode.values import frozen, mapped_array

FORMAT = 1
STORED_FROM = 1 << 20  # bytes of text; a shorter text is tokenized each time
BLOCK = 1 << 20  # bytes per read
MAPPED = ("ids", "char_end", "byte_len", "word_starts", "slices", "mask")
KINDS = {"ids": "<i4", "byte_len": "<i4", "word_starts": "<i4", "slices": "<i4", "mask": "u1"}  # others: "<i8"
WHOLE = ("doc_starts", "doc_bytes", "doc_words", "joined_at")  # short columns, which are read into memory
OPTIONAL = ("slices", "mask", "joined_at")
WAITING = "waiting for another process that cuts the same text into tokens"


class ColumnFacts(msgspec.Struct):
    """The facts about a column's file."""

    type: Literal["<i4", "u1", "<u2", "<u4", "<i8"]  # earlier versions chose the smallest type
    count: manifests.Count
    crc32: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class TokensManifest(msgspec.Struct):
    """The content of tokens.json."""

    format: manifests.Count
    key: dict[str, Any]
    files: dict[str, ColumnFacts]
    notes: list[manifests.Text]
    slice_names: list[manifests.Text] = []


class CannotKeepError(Exception):
    """The tokens cannot be written. The message gives the reason."""


def kept_tokens(key: Mapping[str, Any] | None, stream: TokenStream) -> Tokens:
    """Returns the tokens of a text from the cache. If they are not in the cache, makes and stores them first.

    ``key`` has everything that decides the tokens. Without a key or a writable cache, only this process has the tokens.
    """
    if key is not None:
        key = {**key, "format": FORMAT, "byte_order": "little"}
        folder = entry_folder("texts", key)
        try:
            return _from_cache(folder, key, stream)
        except CannotKeepError as error:
            print_line(f"cache: tokens cannot be kept in {folder} ({error}); they are kept for this command alone")
    try:
        with _writing():
            place = tempfile.TemporaryDirectory(prefix="scoremode-tokens-")
        with place as temporary:  # the mapped files survive the removal of their folder
            return write_tokens(Path(temporary), {}, stream)
    except CannotKeepError as error:
        raise CorpusError(
            f"the tokens of the text cannot be written ({error})",
            fix="free some space, or set SCOREMODE_CACHE and TMPDIR to folders with more room",
        ) from None


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotKeepError(error.strerror or str(error)) from None


def _from_cache(folder: Path, key: Mapping[str, Any], stream: TokenStream) -> Tokens:
    facts = stream.tokenizer.facts
    found = _open(folder, key, facts)
    if found is not None:
        return found
    with _writing():
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(hold_lock(folder / LOCK, waiting=WAITING))
        except RunError as error:
            raise CannotKeepError(error.message) from None
        found = _open(folder, key, facts)  # another process may have made them in the meantime
        if found is None:
            found = write_tokens(folder, key, stream)
    make_room(folder)
    return found


# ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _open(folder: Path, key: Mapping[str, Any], facts: TokenizerFacts) -> Tokens | None:
    """Returns the stored tokens, or None if they are missing or damaged. Prints a line if they are damaged."""
    if not (folder / TOKENS_MARK).exists():
        return None
    try:
        tokens = read_tokens(folder, key, facts)
    except (OSError, ValueError) as error:
        print_line(f"cache: {folder / TOKENS_MARK} or a file beside it is damaged ({error}); the tokens are made again")
        return None
    mark_used(folder)
    return tokens


def read_tokens(folder: Path, key: Mapping[str, Any], facts: TokenizerFacts) -> Tokens:
    """Checks the manifest and checksums of a folder, and maps its columns. Raises ValueError if anything is wrong."""
    manifest = read_object(folder / TOKENS_MARK)
    bad = manifests.unusable_field(manifest, TokensManifest)
    if bad is not None or not manifests.is_sealed(manifest):
        raise ValueError(f"its {bad or 'seal'} is wrong")
    if manifest["key"] != dict(key):
        raise ValueError("it belongs to another text")
    files = manifest["files"]
    if set(MAPPED + WHOLE) - set(OPTIONAL) - files.keys() or files.keys() - set(MAPPED + WHOLE):
        raise ValueError("it lists other columns")
    columns = {name: _column(folder / f"{name}.bin", name, about) for name, about in files.items()}
    count = len(columns["ids"])
    if any(len(columns[name]) != count for name in MAPPED if name in columns):
        raise ValueError("its columns differ in length")
    starts = columns["doc_starts"]
    if not (len(starts) and starts[0] == 0 and starts[-1] == count and np.all(np.diff(starts) >= 0)):
        raise ValueError("its documents do not add up")
    mask = columns.pop("mask", None)
    return Tokens(
        **columns,
        tokenizer=facts,
        target_mask=None if mask is None else mask.view(np.bool_),
        slice_names=tuple(manifest.get("slice_names", ())),
        notes=tuple(manifest["notes"]),
    )


def _column(path: Path, name: str, about: Mapping[str, Any]) -> Any:
    kind = np.dtype(about["type"])
    with path.open("rb") as file:
        if path.stat().st_size != about["count"] * kind.itemsize:
            raise ValueError(f"{path.name} has another size")
        checksum = 0
        while block := file.read(BLOCK):
            checksum = zlib.crc32(block, checksum)
        if checksum != about["crc32"]:
            raise ValueError(f"{path.name} has another checksum")
        if not about["count"]:
            return np.zeros(0, kind)
        if name in WHOLE:
            file.seek(0)
            return frozen(np.fromfile(file, kind).astype(np.int64))
        return mapped_array(file, kind)


# ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def write_tokens(folder: Path, key: Mapping[str, Any], stream: TokenStream) -> Tokens:
    """Writes all tokens while their text is read, writes the manifest, and maps the files."""
    columns: dict[str, _Column] = {}
    try:
        with ExitStack() as files:

            def add(name: str, numbers: Any) -> None:
                with _writing():
                    if name not in columns:
                        file = files.enter_context((folder / f"{name}.bin").open("xb"))
                        columns[name] = _Column(file, KINDS.get(name, "<i8"))
                    columns[name].add(numbers)

            with _writing():
                _remove_columns(folder)
            for name in set(MAPPED) - set(OPTIONAL):
                add(name, ())
            for part in stream:
                for name in MAPPED:
                    if (numbers := getattr(part, name)) is not None:
                        add(name, numbers)
            for name in WHOLE:
                if (numbers := getattr(stream.index, name)) is not None:
                    add(name, numbers)
        with _writing():
            about = {name: column.facts() for name, column in columns.items()}
            manifest = {"format": FORMAT, "key": dict(key), "files": about, "notes": list(stream.index.notes)}
            manifest |= {"slice_names": list(names)} if (names := stream.index.slice_names) else {}
            write_atomically(folder / TOKENS_MARK, json.dumps(manifests.sealed(manifest), indent=1).encode())
            return read_tokens(folder, key, stream.tokenizer.facts)
    except BaseException:
        with suppress(OSError):
            _remove_columns(folder)
        raise


def _remove_columns(folder: Path) -> None:
    for name in (TOKENS_MARK, *(f"{name}.bin" for name in MAPPED + WHOLE)):
        (folder / name).unlink(missing_ok=True)


class _Column:
    """A file of numbers that grows."""

    def __init__(self, file: IO[bytes], kind: str) -> None:
        self._file, self._kind, self._count, self._crc = file, kind, 0, 0

    def add(self, numbers: Any) -> None:
        data = np.ascontiguousarray(numbers, dtype=self._kind).tobytes()
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)
        self._count += len(numbers)

    def facts(self) -> dict[str, Any]:
        return {"type": self._kind, "count": self._count, "crc32": self._crc}
