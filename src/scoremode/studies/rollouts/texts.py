"""Texts that a model wrote, with the log-probability of every token when it was drawn: a folder, and its reader.

DIR/partial.rollouts   while texts are written: each finished text (core/disk/records.py)
DIR/texts.parquet      a row for each text, sorted by prompt and sample
DIR/rollouts.json      who wrote them and how, the sha256 of texts.parquet, and a seal; written last

Nothing in a folder is trusted: seal, hash, types, lengths and numbers are checked when it is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import numpy as np

from scoremode.core.disk.files import file_sha256, written_atomically
from scoremode.core.disk.folders import Mark
from scoremode.core.disk.manifests import Sha256, Text, read_sealed
from scoremode.core.disk.records import RecordFile
from scoremode.core.disk.uri import is_uri
from scoremode.core.reading import open_regular
from scoremode.core.scores.schema import ROUNDING
from scoremode.core.store.resumable import Resumable
from scoremode.core.text.corpus import Corpus
from scoremode.core.text.documents import RereadDocuments
from scoremode.core.text.slices import ANSWER, PROMPT, SliceRule, Slicing
from scoremode.core.text.tokenizer import TextTokenizer
from scoremode.core.text.tokens import SpelledIds, Tokens, lone_bytes, tokens_of_ids
from scoremode.core.typed import typed
from scoremode.errors import CorpusError, ModelError, RunError
from scoremode.values import Floats, Ids, Ints, frozen

if TYPE_CHECKING:
    import pyarrow as pa

ROLLOUTS, TEXTS, PARTIAL_TEXTS = "rollouts.json", "texts.parquet", "partial.rollouts"  # files of the folder
FORMAT = 1
PREFIX = "rollouts:"  # before the folder, where a corpus is named
FINISHES = ("stop", "length", "context")
"""How a text ended: with an end token, at the most tokens that were allowed, or where the model's context was full."""

AGAIN = "write them again with --fresh"
MOST_IDS = 1 << 22  # more than any vocabulary has: a table of larger ids would fill the memory


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """Texts that a model wrote: every list has one entry per text, in the order of prompts and samples.

    >>> import scoremode as sm
    >>> written = sm.Rollouts.open("runs/written")                                                # doctest: +SKIP
    >>> written.written[0], written.raw_logprob[0]                                                 # doctest: +SKIP
    """

    prompt: Ints  # (n,) index of the prompt
    sample: Ints  # (n,) number of the text among those of its prompt
    prompt_text: list[str]  # as the model saw it
    prompt_ids: list[Ids]
    written: list[Ids]  # with the end token if there is one
    logprob: list[Floats]  # in the distribution that a token was drawn from; 0 for greedy choices; NaN: not known
    raw_logprob: list[Floats]  # in the model's own distribution, before temperature and filters
    finish: list[str]  # one of FINISHES
    text: list[str]
    answer: list[str | None]  # a text that is known to be right
    manifest: dict[str, Any]
    path: str | None = None
    prefix: ClassVar[str] = PREFIX

    @staticmethod
    @typed
    def open(folder: str | os.PathLike[str]) -> Rollouts:
        """Reads a folder of ``scoremode rollouts``; RunError if it is not one, is not finished, or was changed."""
        path = require_folder(folder)
        manifest = read_sealed(path / ROLLOUTS, RolloutsManifest, format=FORMAT, fix=AGAIN)
        if file_sha256(path / TEXTS) != manifest["texts_sha256"]:
            raise RunError(f"{path / TEXTS} was changed after it was written", fix=AGAIN)
        try:
            rollouts = _read_texts(path, manifest)
            rollouts._check()
        except (ValueError, OSError) as error:  # Arrow's errors are of both kinds
            raise RunError(f"{path / TEXTS} cannot be used: {str(error).splitlines()[0][:120]}", fix=AGAIN) from None
        return rollouts

    def _check(self) -> None:
        """Raises ValueError if the columns contradict each other, or have a value that cannot be."""
        places = list(zip(self.prompt.tolist(), self.sample.tolist(), strict=True))
        if places != sorted(set(places)) or (places and min(map(min, places)) < 0):
            raise ValueError("its rows are not sorted by prompt and sample")
        for row, finish in enumerate(self.finish):
            ids, numbers = self.written[row], [self.logprob[row], self.raw_logprob[row]]
            if finish not in FINISHES or not len(self.prompt_ids[row]) or {*map(len, numbers)} != {len(ids)}:
                raise ValueError(f"row {row} has another finish or other lengths than a text can have")
            if any(((sequence < 0) | (sequence >= MOST_IDS)).any() for sequence in (ids, self.prompt_ids[row])):
                raise ValueError(f"row {row} has an id that no model has")
            columns = numbers[1:] if "logprob" in self.manifest.get("missing", ()) else numbers
            if not all((np.isfinite(column) & (column <= ROUNDING)).all() for column in columns):
                raise ValueError(f"row {row} has a log-probability that cannot be")

    def __len__(self) -> int:
        return len(self.prompt)

    def __repr__(self) -> str:
        return f"Rollouts({len(self):,} texts of {self.prompts:,} prompts, {self.tokens:,} tokens written)"

    @property
    def prompts(self) -> int:
        return len(np.unique(self.prompt))

    @property
    def tokens(self) -> int:
        return sum(map(len, self.written))

    @typed
    def first(self, count: int) -> Rollouts:
        columns = {name: getattr(self, name)[:count] for name in COLUMNS}
        return replace(self, **columns)

    @typed
    def as_corpus(self, count: int | None = None) -> Corpus:
        """The texts as a corpus, each with its prompt. ``count``: only the first of them."""
        sha256, taken = str(self.manifest["texts_sha256"]), self
        if count is not None and count < len(self):
            taken, sha256 = self.first(count), hashlib.sha256(f"{sha256}, the first {count}".encode()).hexdigest()
        if not len(taken):
            raise CorpusError(f"{self.path} has no texts", fix="write some with scoremode rollouts")
        texts = [prompt + text for prompt, text in zip(taken.prompt_text, taken.text, strict=True)]
        size = sum(len(text.encode()) for text in texts)
        name = PREFIX + (Path(self.path).resolve().name if self.path else str(self.manifest["model"]))
        return Corpus(name, "documents", lambda: iter(texts), sha256, len(texts), size, own_tokens=taken._tokens)

    def _tokens(self, tokenizer: TextTokenizer, rules: Sequence[SliceRule]) -> tuple[RereadDocuments, Tokens]:
        notes = self.tokenizer_notes(tokenizer)
        return tokens_of_texts(self.prompt, self.prompt_ids, self.written, tokenizer, rules=rules, notes=notes)

    @typed
    def tokenizer_notes(self, tokenizer: TextTokenizer) -> list[str]:
        """Refuses a tokenizer that has other tokens for these ids; returns a note if it only has another name."""
        if self.manifest["tokenizer"] == tokenizer.facts.fingerprint:
            return []
        if tokens_digest(tokenizer.pieces(), [*self.prompt_ids, *self.written]) != self.manifest["tokens_sha256"]:
            raise ModelError(
                f"the texts were written by {self.manifest['model']}, and this model has another tokenizer",
                fix="choose a model with the same tokenizer, or write texts with this one",
            )
        return ["another tokenizer than the one of the texts, with the same tokens for all of their ids"]


COLUMNS = tuple(field.name for field in fields(Rollouts) if field.name not in ("manifest", "path"))


class RolloutsManifest(msgspec.Struct):
    """The fields of rollouts.json that are used."""

    format: Literal[1]
    model: Text
    engine: Text
    tokenizer: Sha256
    tokens_sha256: Sha256  # of the bytes of all tokens in the texts: another tokenizer may have the same
    texts_sha256: Sha256
    sampling: dict[str, float | list[int]]
    notes: list[str]
    identity: dict[str, object]
    missing: list[Literal["logprob"]] = []  # columns that the engine could not give: NaN


def require_folder(folder: str | os.PathLike[str]) -> Path:
    """Returns the folder; RunError if it is not a finished folder of rollouts."""
    name = os.fspath(folder)
    if is_uri(name):
        raise RunError(f"{name}: rollouts are read from folders of this machine", fix="copy the folder first")
    path = Path(name)
    try:
        is_there = (path / ROLLOUTS).is_file() and (path / TEXTS).is_file()
    except (OSError, ValueError):  # the name is too long, or contains NUL
        is_there = False
    if is_there:
        return path
    fix = "give a folder that scoremode rollouts wrote"
    if name and os.path.lexists(path / PARTIAL_TEXTS):
        fix = "run the scoremode rollouts command again to finish it"
    raise RunError(f"{name or 'an empty name'} has no finished rollouts", fix=fix)


class RolloutsReader:
    """Reads ``--corpus rollouts:DIR``."""

    check = staticmethod(require_folder)
    open = staticmethod(Rollouts.open)


READER = RolloutsReader()


# ── texts.parquet ────────────────────────────────────────────────────────────────────────────────────────────────────
def schema() -> pa.Schema:
    import pyarrow as pa

    ids, numbers = pa.list_(pa.int32()), pa.list_(pa.float64())
    kinds = {"prompt": pa.int64(), "sample": pa.int64(), "prompt_text": pa.string(), "prompt_ids": ids, "ids": ids}
    kinds |= {"logprob": numbers, "raw_logprob": numbers, "finish": pa.string(), "text": pa.string()}
    return pa.schema([pa.field(n, k, nullable=False) for n, k in kinds.items()] + [pa.field("answer", pa.string())])


def has_texts(path: Path) -> bool:
    """Is this a Parquet file with the columns of ``schema``?"""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular(path) as file:
            return bool(pq.read_schema(file).names == schema().names)
    except (pa.ArrowException, OSError):
        return False


def _read_texts(folder: Path, manifest: dict[str, Any]) -> Rollouts:
    import pyarrow.parquet as pq

    with open_regular(folder / TEXTS) as file:
        table = pq.read_table(file).rename_columns({"ids": "written"})
    form = schema()
    if table.schema.types != form.types or table.schema.names != ["written" if n == "ids" else n for n in form.names]:
        raise ValueError("its columns are not those of rollouts")
    if any(table[name].null_count for name in table.schema.names if name != "answer"):
        raise ValueError("a column has gaps")
    columns = {name: _values(table[name].combine_chunks()) for name in table.schema.names}
    return Rollouts(**columns, manifest=manifest, path=str(folder))


def _values(column: Any) -> Any:
    """A column as numbers, as texts, or as an array of numbers for each row."""
    import pyarrow as pa

    if not pa.types.is_list(column.type):
        return frozen(column.to_numpy()) if pa.types.is_integer(column.type) else column.to_pylist()
    edges = np.concatenate([[0], np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))]).tolist()
    flat = frozen(column.flatten().to_numpy())
    return [flat[begin:end] for begin, end in pairwise(edges)]


# ── the folder while texts are written ───────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class WrittenTokens:
    """A text: its ids, their log-probabilities as ``Rollouts`` has them, and how it ended."""

    ids: Ids
    logprob: Floats
    raw_logprob: Floats
    finish: str = ""  # one of FINISHES; of a text that is written now, "stop" if the engine says so, else ''


def pack(text: WrittenTokens) -> bytes:
    """The body of a record: how the text ended, ids, and log-probabilities."""
    columns = (text.ids.astype("<i4"), text.logprob.astype("<f8"), text.raw_logprob.astype("<f8"))
    return bytes([FINISHES.index(text.finish)]) + b"".join(column.tobytes() for column in columns)


def unpack(body: bytes) -> WrittenTokens:
    """Reads a record's body."""
    count = len(body) // 20
    ids = np.frombuffer(body, "<i4", count, 1)
    logprob, raw = np.frombuffer(body, "<f8", 2 * count, 1 + 4 * count).reshape(2, count)
    return WrittenTokens(ids, logprob, raw, FINISHES[body[0]])


def prompts_digest(prompts: Iterable[Ids], answers: Iterable[str | None]) -> str:
    """A hash of what is asked: the ids of all prompts, and the answers that are kept beside the texts."""
    hasher = hashlib.sha256()
    for ids, answer in zip(prompts, answers, strict=True):
        hasher.update(json.dumps([ids.tolist(), answer]).encode() + b"\n")
    return hasher.hexdigest()


class RolloutsFolder(Resumable[Rollouts]):
    """A folder for rollouts: inside a ``with`` block, its finished rollouts, or else the right to write there."""

    what, other = "a folder of rollouts", "other rollouts (they differ in: {})"
    replace = "give another --out, or --fresh to replace them"
    again = "write them again with --fresh"
    manifest, form, format = ROLLOUTS, RolloutsManifest, FORMAT
    journal, header = PARTIAL_TEXTS, {"for": "rollouts"}

    def _data(self) -> dict[str, Mark]:
        return {TEXTS: has_texts}

    def _open(self, manifest: Mapping[str, Any]) -> Rollouts:
        return Rollouts.open(self.folder)

    def begin_texts(self) -> dict[int, WrittenTokens]:
        """Takes the folder over when the model is ready to write; returns the finished texts by their numbers."""
        self.begin()
        self.records: RecordFile = self.open_journal()
        return {number: unpack(body) for number, _, body in self.records.replay()}

    def save(self, rows: Sequence[Mapping[str, object]], manifest: Mapping[str, object]) -> Rollouts:
        """Writes all texts and the manifest, removes the journal, and returns the rollouts."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        with written_atomically(self.folder / TEXTS) as file:
            pq.write_table(pa.Table.from_pylist(rows, schema=schema()), file, compression="zstd")
        self.finish({"format": FORMAT, **manifest, "texts_sha256": file_sha256(self.folder / TEXTS)})
        return Rollouts.open(self.folder)


# ── texts after prompts as tokens: a document for each, its prompt as context, and the tokens after it as targets ────
def tokens_of_texts(
    prompt: Ints,
    prompt_ids: Sequence[Ids],
    written: Sequence[Ids],
    tokenizer: TextTokenizer,
    *,
    rules: Sequence[SliceRule],
    notes: Sequence[str],
) -> tuple[RereadDocuments, Tokens]:
    """Makes documents and tokens with exactly the given ids.

    ``prompt`` numbers the prompt of each text: texts of one prompt are not independent. ``rules`` are slices.
    """
    pieces = tokenizer.pieces()
    ids = [np.concatenate(pair) for pair in zip(prompt_ids, written, strict=True)]
    spelled = [SpelledIds.of(sequence, pieces) for sequence in ids]
    empty, lone = sum(not len(sequence) for sequence in written), sum(spelling.lone for spelling in spelled)
    text_notes = [f"{empty:,} of {len(ids):,} texts have no written token, and so no target"] if empty else []
    text_notes += [lone_bytes(lone)] if lone else []
    texts = [spelling.text for spelling in spelled]
    size = sum(len(spelling.raw) for spelling in spelled)
    corpus = Corpus("texts after prompts", "documents", lambda: iter(texts), "", len(ids), size)  # never hashed
    tokens, slicing = tokens_of_ids(ids, spelled, tokenizer), Slicing(rules)
    lengths = np.diff(tokens.doc_starts)
    place = np.arange(len(tokens)) - np.repeat(tokens.doc_starts[:-1], lengths)
    tokens = replace(
        tokens,
        target_mask=frozen(place >= np.repeat([len(sequence) for sequence in prompt_ids], lengths)),
        doc_group=frozen(prompt),
        slices=frozen(_slices(slicing, prompt_ids, ids, tokenizer, pieces)),
        slice_names=slicing.names,
        notes=(*notes, *text_notes, *slicing.finish()),
    )
    return RereadDocuments(corpus, "texts", tokenizer, rules=tuple(rules)), tokens


def _slices(
    slicing: Slicing, prompts: Sequence[Ids], ids: Sequence[Ids], tokenizer: TextTokenizer, pieces: list[bytes]
) -> Ids:
    """Returns the slice of every token. Markers may be special tokens, which have names and no text."""
    used = np.unique(np.concatenate(ids))
    names = [*pieces, *[b""] * (int(used.max(initial=-1)) + 1 - len(pieces))]
    for token in used.tolist():
        names[token] = names[token] or tokenizer.token_text(token).encode()
    codes = []
    for prompt, sequence in zip(prompts, ids, strict=True):
        text = SpelledIds.of(sequence, names)
        begin = int(text.ends[len(prompt) - 1]) if len(prompt) else 0
        codes.append(written_slices(slicing, text.text, text.ends, begin))
    return np.concatenate(codes)


def written_slices(slicing: Slicing, text: str, char_end: Ints, written_from: int) -> Ids:
    """The codes of the tokens of a prompt and what a model wrote after it.

    ``text`` is both, ``char_end`` where each token ends in it, and ``written_from`` the first character that the model
    wrote. The prompt is the slice "prompt"; the rest is divided like a turn of an assistant in a chat.

    >>> slicing = Slicing()
    >>> codes = written_slices(slicing, "Hi<think>a</think>b", np.array([2, 10, 18, 19]), 2)
    >>> [slicing.names[code] for code in codes]
    ['prompt', 'thinking', 'thinking', 'answer']
    """
    prompt = [(0, written_from, PROMPT)] if written_from else []
    sliced = slicing.document(text, [*prompt, *slicing.turn(text, written_from, len(text))], outside=ANSWER)
    return sliced.label(np.concatenate([[0], char_end[:-1]]).astype(np.int64), char_end)


def tokens_digest(pieces: Sequence[bytes], ids: Iterable[Ids]) -> str:
    """A hash of the bytes that all used ids stand for. Equal hashes: two tokenizers agree on all of these tokens."""
    used = np.unique(np.concatenate([np.zeros(0, np.int32), *ids]))
    hasher = hashlib.sha256()
    for token in used.tolist():
        piece = pieces[token] if token < len(pieces) else b""
        hasher.update(f"{token}:{len(piece)}:".encode() + piece)
    return hasher.hexdigest()
