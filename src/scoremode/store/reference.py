"""Read a finished reference: a baseline's final hidden states for every target, bit for bit, and its head."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.errors import InputError, RunError, harmless
from scoremode.places.uri import Place
from scoremode.plan.comparable import ComparableFacts, Where, difference
from scoremode.store.cache import hold_entry, mark_used, remembered_sha256
from scoremode.store.reference_format import (
    DATA_START,
    HEAD,
    RAW_DTYPES,
    ShardLayout,
    file_problem,
    head_header,
    head_size,
    read_reference_manifest,
    remake_fix,
    shard_name,
)
from scoremode.store.remote_copies import copy_of, stored_at
from scoremode.values import Raw

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""

ReadElsewhere = Callable[[str, int, memoryview], None]
"""Fills memory with bytes of a file that is not here: its name, and the offset of the first byte."""

CHUNK = 1 << 20


def bytes_of(rows: Raw) -> memoryview:
    """The memory of an array as bytes; copied only if the array is not contiguous."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data


def read_rows(
    folder: Path,
    layout: ShardLayout,
    first: int,
    count: int,
    elsewhere: ReadElsewhere | None = None,
    *,
    into: Raw | None = None,
) -> Raw:
    """Rows as a new array, or in the one given. They are read, not mapped: truncating a mapped file would kill us."""
    rows = np.empty((count, layout.width), RAW_DTYPES[layout.dtype]) if into is None else into
    for shard, offset, before, n in layout.pieces(first, count):
        path = folder / shard_name(shard)
        if elsewhere is not None and not path.exists():
            elsewhere(path.name, offset, bytes_of(rows[before : before + n]))
            continue
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                whole = fill(file, bytes_of(rows[before : before + n]))
        except OSError as error:
            raise RunError(f"{path} cannot be read ({error.strerror})", fix=remake_fix(folder)) from None
        if not whole:
            raise RunError(f"{path} was truncated", fix=remake_fix(folder))
    return rows


def fill(file: Any, place: memoryview) -> bool:
    """Read until ``place`` is full; False if the file ends before."""
    at = 0
    while at < len(place):
        got = file.readinto(place[at:])
        if not got:
            return False
        at += got
    return True


# ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, eq=False)
class Reference:
    """A finished reference. Rows are read on demand, never all at once.

    >>> reference = Reference.open("ref")            # doctest: +SKIP
    >>> reference.rows(0, 512).shape                 # doctest: +SKIP
    (512, 4096)
    """

    folder: Path
    manifest: Mapping[str, Any]
    layout: ShardLayout
    place: Place | None = None  # where it lies, if the folder is a copy
    read_elsewhere: ReadElsewhere | None = None  # for shards that are no longer here, while it is made

    @staticmethod
    def open(folder: str | Path | Place, verify: bool = True, progress: Progress | None = None) -> Reference:
        """The reference in this folder, or behind this URI, of which a copy is then read.

        Sizes and headers are always checked; hashes only if a file has changed.
        """
        where = stored_at(folder)
        if isinstance(where, Place):
            found = Reference._open(copy_of(where), verify, progress)
            placed = replace(found, place=where)
            hold_entry(found.folder, placed)
            return placed
        return Reference._open(where, verify, progress)

    @staticmethod
    def _open(folder: Path, verify: bool, progress: Progress | None) -> Reference:
        manifest = read_reference_manifest(folder)
        mark_used(folder)
        layout = ShardLayout(*(manifest[name] for name in ("targets", "width", "dtype", "rows_per_shard")))
        head = manifest["head"]
        files = [
            (entry["file"], entry["sha256"], layout.shard_size(shard), layout.shard_header(shard))
            for shard, entry in enumerate(manifest["shards"])
        ]
        files.append((HEAD, head["sha256"], head_size(head, layout.width), head_header(head, layout.width)))
        for name, _, size, header in files:
            reason = file_problem(folder / name, size, header)
            if reason:
                raise RunError(f"{folder / name} {reason}", fix=remake_fix(folder))
        if verify:
            _verify(folder, [(name, sha256, size) for name, sha256, size, _ in files], progress)
        opened = Reference(folder, manifest, layout)
        hold_entry(folder, opened)  # its files are opened later, when rows are read
        return opened

    @property
    def targets(self) -> int:
        return self.layout.targets

    @property
    def width(self) -> int:
        return self.layout.width

    @property
    def dtype(self) -> str:
        """The dtype of the states."""
        return self.layout.dtype

    @property
    def plan_digest(self) -> str:
        return str(self.manifest["plan_digest"])

    @property
    def tokenizer(self) -> str:
        """The tokenizer's fingerprint."""
        return str(self.manifest["tokenizer"])

    @property
    def vocabulary(self) -> int:
        """Number of ids that get a probability; the head's rows after them are padding."""
        return int(self.manifest["vocabulary"])

    @property
    def head_dtype(self) -> str:
        return str(self.manifest["head"]["dtype"])

    @property
    def bias_dtype(self) -> str | None:
        name = self.manifest["head"]["bias_dtype"]
        return None if name is None else str(name)

    @property
    def scale(self) -> float:
        return float(self.manifest["head"]["scale"])

    @property
    def softcap(self) -> float | None:
        cap = self.manifest["head"]["softcap"]
        return None if cap is None else float(cap)

    def rows(self, first: int, count: int, into: Raw | None = None) -> Raw:
        """The raw states (count, width) of consecutive targets, as a new array or in the one given."""
        if first < 0 or count < 0 or first + count > self.targets:
            raise IndexError(f"rows {first} to {first + count} of a reference of {self.targets}")
        return read_rows(self.folder, self.layout, first, count, self.read_elsewhere, into=into)

    def head_weight(self) -> Raw:
        """The head's raw matrix (padded vocabulary, width), mapped, so that only the parts in use are read.

        Changes stay in memory and never reach the file (torch warns about read-only arrays).
        """
        shape = (self.manifest["head"]["rows"], self.width)
        return np.memmap(self.folder / HEAD, RAW_DTYPES[self.head_dtype], "c", DATA_START, shape)

    def head_bias(self) -> Raw | None:
        """The head's raw bias (padded vocabulary,); None if the model has none."""
        if self.bias_dtype is None:
            return None
        head = self.manifest["head"]
        at = DATA_START + head["rows"] * self.width * RAW_DTYPES[head["dtype"]].itemsize
        return np.fromfile(self.folder / HEAD, RAW_DTYPES[self.bias_dtype], head["rows"], offset=at)


def _verify(folder: Path, files: list[tuple[str, str, int]], progress: Progress | None) -> None:
    total, done = sum(size for _, _, size in files), 0
    for name, sha256, size in files:
        try:
            found = remembered_sha256(folder / name)
        except OSError as error:
            raise RunError(f"{folder / name} cannot be read ({error.strerror})", fix=remake_fix(folder)) from None
        if found != sha256:
            raise RunError(f"{folder / name} was changed after the reference was made", fix=remake_fix(folder))
        done += size
        if progress:
            progress(done, total)


# ── sizes, and what can be compared ──────────────────────────────────────────────────────────────────────────────────
def estimate_bytes(targets: int, width: int, dtype: str, vocabulary: int) -> dict[str, int]:
    """The size of a reference on disk, and the size of float16 logits for comparison.

    >>> estimate_bytes(1000, 4096, "bfloat16", 128256)["states"]
    8192000
    """
    item = RAW_DTYPES[dtype].itemsize
    states, head = targets * width * item, vocabulary * width * item
    return {"states": states, "head": head, "total": states + head, "logits_fp16": targets * vocabulary * 2}


def require_comparable(
    reference: Mapping[str, Any],
    *,
    plan_digest: str,
    tokenizer: str,
    vocabulary: int,
    method: str,
    method_settings: Mapping[str, Any] | None = None,
    corpus_sha256: str | None = None,
    where: Where | None = None,
) -> None:
    """Raise InputError if a candidate cannot be compared with a reference.

    ``reference`` is a reference's manifest. The reason names settings and texts that differ, if they are known;
    ``where`` says where the ids of two tokenizers differ.
    """
    kept = ComparableFacts(
        reference["tokenizer"],
        reference["vocabulary"],
        reference["plan_digest"],
        reference["method"],
        reference.get("method_settings"),
        reference.get("corpus_sha256"),
    )
    mine = ComparableFacts(tokenizer, vocabulary, plan_digest, method, method_settings, corpus_sha256)
    found = difference(kept, mine, where)
    if found is None:
        return
    again = _same_question(reference)
    fixes = {
        "tokenizer": f"feed both with one: {again} --tokenizer FOLDER; or compare bits per byte",
        "vocabulary": f"make a reference of a model with {vocabulary} ids: "
        f"scoremode reference MODEL --corpus {_corpus(reference)} --out ref/",
        "text": f"score the same text: {again}",
        "plan": f"use the reference's settings: {again}",
    }
    raise InputError(found.reason, fix=fixes[found.kind])


def _corpus(reference: Mapping[str, Any]) -> str:
    return shlex.quote(harmless(reference["corpus"])) if reference.get("corpus") else "…"


def _same_question(reference: Mapping[str, Any]) -> str:
    """The command that scores a candidate with the reference's plan."""
    settings = reference.get("method_settings") or {}
    words = ["scoremode ppl CANDIDATE --corpus", _corpus(reference), "--method", harmless(str(reference["method"]))]
    for name in ("context_length", "stride", "max_windows"):
        if type(settings.get(name)) is int:
            words += ["--" + name.replace("_", "-"), str(settings[name])]
    return " ".join(words)
