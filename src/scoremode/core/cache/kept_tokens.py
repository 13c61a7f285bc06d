"""Stores the tokens of long texts on disk, as columns that are mapped into memory, once per text and tokenizer.

texts/DIGEST/ids.bin, char_end.bin, …    one column each, little endian
texts/DIGEST/tokens.json                 the length and checksum of each column, a seal; written last
texts/DIGEST/.lock                       exists while a process writes the columns

DIGEST is computed from everything that decides the tokens: the text, its arrangement, the tokenizer. A process that is
killed leaves a folder without tokens.json, and the next process starts again. Files are never overwritten, because
another process may have mapped them. Instead they are removed and created again.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import msgspec
import numpy as np

from scoremode.core.cache.entries import make_room, mark_used
from scoremode.core.disk.folders import LOCK, TOKENS_MARK, entry_folder
from scoremode.core.disk.locks import hold_lock
from scoremode.core.disk.manifests import Count, Text, read_sealed, write_sealed
from scoremode.core.text.tokenizer import TokenizerFacts
from scoremode.core.text.tokens import Tokens, TokenStream
from scoremode.errors import CorpusError, RunError, print_line

FORMAT = 2
STORED_FROM = 1 << 20  # bytes of text; a shorter text is tokenized each time
MAPPED = {"ids": "<i4", "char_end": "<i8", "byte_len": "<i4", "word_starts": "<i4", "slices": "<i4", "mask": "u1"}
WHOLE = dict.fromkeys(("doc_starts", "doc_bytes", "doc_words", "joined_at"), "<i8")
TYPES = MAPPED | WHOLE
REQUIRED = TYPES.keys() - {"slices", "mask", "joined_at"}
WAITING = "waiting for another process that cuts the same text into tokens"


class ColumnFacts(msgspec.Struct):
    count: Count = 0
    crc32: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0


class TokensManifest(msgspec.Struct):
    format: Literal[2]
    key: dict[str, Any]
    files: dict[str, ColumnFacts]
    notes: list[Text]
    slice_names: list[Text]


def kept_tokens(key: Mapping[str, Any] | None, stream: TokenStream) -> Tokens:
    """Returns the tokens of a text from the cache. If they are not in the cache, makes and stores them first.

    ``key`` has everything that decides the tokens. Without a key or a writable cache, only this process has the tokens.
    """
    if key is not None:
        key = {**key, "format": FORMAT, "byte_order": "little"}
        folder = entry_folder("texts", key)
        try:
            return _from_cache(folder, key, stream)
        except (OSError, RunError) as error:
            why = error.message if isinstance(error, RunError) else error.strerror
            print_line(f"cache: tokens cannot be kept in {folder} ({why}); they are kept for this command alone")
    try:
        with tempfile.TemporaryDirectory(prefix="scoremode-tokens-") as temporary:
            return _write(Path(temporary), {}, stream)
    except OSError as error:
        raise CorpusError(
            f"the tokens of the text cannot be written ({error.strerror})",
            fix="free some space, or set SCOREMODE_CACHE and TMPDIR to folders with more room",
        ) from None


def _from_cache(folder: Path, key: Mapping[str, Any], stream: TokenStream) -> Tokens:
    facts = stream.tokenizer.facts
    found = _open(folder, key, facts)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder / LOCK, waiting=WAITING):  # another process may have made them in the meantime
            found = _open(folder, key, facts) or _write(folder, key, stream)
        make_room(folder)
    return found


# ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _open(folder: Path, key: Mapping[str, Any], facts: TokenizerFacts) -> Tokens | None:
    """Returns the stored tokens, or None if they are missing or damaged. Prints a line if they are damaged."""
    if not (folder / TOKENS_MARK).exists():
        return None
    try:
        tokens = _read(folder, key, facts)
    except (OSError, ValueError, RunError) as error:
        why = error.message if isinstance(error, RunError) else error
        print_line(f"cache: {folder / TOKENS_MARK} or a file beside it is damaged ({why}); the tokens are made again")
        return None
    mark_used(folder)
    return tokens


def _read(folder: Path, key: Mapping[str, Any], facts: TokenizerFacts) -> Tokens:
    """Checks the manifest and checksums of a folder, and reads its columns. Raises ValueError if anything is wrong."""
    stored = read_sealed(folder / TOKENS_MARK, TokensManifest, format=FORMAT, fix="")
    manifest = msgspec.convert(stored, TokensManifest)
    if manifest.key != dict(key) or not REQUIRED <= manifest.files.keys() <= TYPES.keys():
        raise ValueError("it belongs to another text")
    columns = {name: _column(folder / f"{name}.bin", name, about) for name, about in manifest.files.items()}
    starts, count = columns["doc_starts"], len(columns["ids"])
    if any(len(columns[name]) != count for name in MAPPED if name in columns) or starts[-1:].tolist() != [count]:
        raise ValueError("its columns differ in length")
    mask = columns.pop("mask", None)
    return Tokens(
        **columns,
        tokenizer=facts,
        target_mask=None if mask is None else mask.view(np.bool_),
        slice_names=tuple(manifest.slice_names),
        notes=tuple(manifest.notes),
    )


def _column(path: Path, name: str, about: ColumnFacts) -> Any:
    kind, data = np.dtype(TYPES[name]), path.read_bytes()
    if (len(data), zlib.crc32(data)) != (about.count * kind.itemsize, about.crc32):
        raise ValueError(f"{path.name} has another size or checksum")
    return np.frombuffer(data, kind)


# ── write ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _write(folder: Path, key: Mapping[str, Any], stream: TokenStream) -> Tokens:
    """Writes all tokens while their text is read, writes the manifest, and maps the files."""
    files: dict[str, IO[bytes]] = {}
    facts: dict[str, ColumnFacts] = {}
    try:
        with ExitStack() as opened:

            def add(name: str, numbers: Any) -> None:
                if name not in files:
                    files[name] = opened.enter_context((folder / f"{name}.bin").open("xb"))
                    facts[name] = ColumnFacts()
                data = np.ascontiguousarray(numbers, TYPES[name]).tobytes()
                files[name].write(data)
                facts[name].count += len(numbers)
                facts[name].crc32 = zlib.crc32(data, facts[name].crc32)

            _remove_columns(folder)
            for name in REQUIRED:
                add(name, ())
            for part in stream:
                for name in MAPPED:
                    if (numbers := getattr(part, name)) is not None:
                        add(name, numbers)
            index = stream.index
            for name in WHOLE:
                if (numbers := index[name]) is not None:
                    add(name, numbers)
        about = {"files": msgspec.to_builtins(facts), "notes": index["notes"], "slice_names": index["slice_names"]}
        write_sealed(folder / TOKENS_MARK, {"format": FORMAT, "key": dict(key), **about}, TokensManifest)
        return _read(folder, key, stream.tokenizer.facts)
    except BaseException:
        with suppress(OSError):
            _remove_columns(folder)
        raise


def _remove_columns(folder: Path) -> None:
    for name in (TOKENS_MARK, *(f"{name}.bin" for name in TYPES)):
        (folder / name).unlink(missing_ok=True)
