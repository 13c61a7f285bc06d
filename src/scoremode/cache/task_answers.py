"""Stores a model's answers to documents of tasks: one record per document, which is found by its token ids.

DIR/answers.records   a header that names the model, then one record per document (disk/records.py)
DIR/.lock             the lock, held while a process writes into DIR

The records also hold the engine's facts, so that stored answers can name the engine that gave them. A document's digest
is computed from its ids alone: its task and the other documents of the request do not matter. A later record replaces
an earlier one of the same document, so ``--fresh`` only appends.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scoremode.cache.entries import is_cached, mark_used
from scoremode.disk.folders import ANSWERS, LOCK, give_another, own_files
from scoremode.disk.locks import hold_lock
from scoremode.disk.manifests import differing_fields
from scoremode.disk.records import RecordFile, is_record_file, read_record_header
from scoremode.errors import RunError, harmless
from scoremode.strict_json import parse
from scoremode.values import Ids

KIND, FORMAT = "scoremode tasks", 1
BEGINNING = json.dumps({"for": KIND}).encode()[:-1]  # the first bytes of every file
WAITING = "another process is asking the same model; waiting for it (Ctrl-C to stop)"
DISCARD = "delete it, or give another --out"

Answer = tuple[float, bool | None]
"""The log-probability of a continuation in nats, and whether the continuation is greedy (None: not measured)."""


def digest_of(asked: Sequence[tuple[Ids, int]]) -> str:
    """Returns the digest of a document, computed from the ids of each continuation and the index where it begins.

    >>> import numpy as np
    >>> digest_of([(np.array([1, 2, 3], np.int32), 2)])[:12]
    '4327c41bc722'
    """
    found = hashlib.sha256()
    for ids, first in asked:
        found.update(struct.pack("<QQ", len(ids), first) + ids.astype("<i4").tobytes())
    return found.hexdigest()[:32]


class AnswerFile:
    """The stored answers of one model. The caller must hold the lock of their folder."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.path = folder / ANSWERS
        self._records = RecordFile(self.path, {"for": KIND, "format": FORMAT, "identity": identity})
        self._found: dict[str, list[Answer]] = {}
        self._count = 0
        self.engine: dict[str, Any] | None = None  # the facts that the engine reported about itself
        try:
            for number, _, body in self._records.replay():
                self._read(number, body)
        except BaseException:
            self.close()
            raise

    def get(self, digest: str, count: int) -> list[Answer] | None:
        """Returns the stored answers to a document with ``count`` continuations; None if none are stored."""
        found = self._found.get(digest)
        if found is not None and len(found) != count:
            raise RunError(
                f"{self.path} has {len(found)} answers to a document with {count} continuations", fix=DISCARD
            )
        return found

    def add(self, digest: str, answers: Sequence[Answer]) -> None:
        """Stores the answers to a document. If the process is killed after this call, they are not lost."""
        stored = [[None if math.isinf(log_prob) else log_prob, greedy] for log_prob, greedy in answers]
        self._append({"document": digest, "answers": stored})
        self._found[digest] = list(answers)

    def set_engine(self, facts: dict[str, Any]) -> None:
        """Stores the facts of the engine, if they differ from the stored ones."""
        facts = parse(json.dumps(facts, allow_nan=False))
        if facts != self.engine:
            self._append({"engine": facts})
            self.engine = facts

    def _append(self, value: dict[str, Any]) -> None:
        self._records.append(self._count, json.dumps(value, allow_nan=False).encode())
        self._count += 1

    def close(self) -> None:
        self._records.close()

    def _read(self, number: int, body: bytes) -> None:
        """Reads a record and checks its values, because a correct checksum does not show that a number is possible."""
        try:
            value = parse(body)
            if number != self._count or not isinstance(value, dict):
                raise ValueError("a record where none belongs")
            if set(value) == {"engine"} and isinstance(value["engine"], dict):
                self.engine = value["engine"]
            elif set(value) == {"document", "answers"} and isinstance(value["document"], str):
                self._found[value["document"]] = [_answer(*one) for one in value["answers"]]
            else:
                raise ValueError("other fields than a record has")
        except (ValueError, TypeError) as error:
            raise RunError(f"{self.path} is damaged in record {number} ({error})", fix=DISCARD) from None
        self._count += 1


def _answer(log_prob: Any, greedy: Any) -> Answer:
    if log_prob is None:
        log_prob = -math.inf
    if type(log_prob) not in (int, float) or not log_prob <= 0 or not (greedy is None or type(greedy) is bool):
        raise ValueError("numbers that cannot be")
    return float(log_prob), greedy


@contextmanager
def opened_answers(folder: Path, identity: dict[str, Any]) -> Iterator[AnswerFile]:
    """Opens the answers in a folder, and holds the folder's lock inside the block.

    If the folder is in the cache, this process waits while another process writes into it. A folder that the user named
    is refused while another process writes into it, or if it contains other files.
    """
    cached = is_cached(folder)
    if not cached:
        _require_ours(folder, identity)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder} cannot be created ({error.strerror})", fix=give_another(folder)) from None
    busy = RunError(f"another process is writing into {folder}", fix="wait for it, or give another --out")
    with hold_lock(folder / LOCK, busy=busy, waiting=WAITING if cached else None):
        answers = AnswerFile(folder, identity)
        try:
            yield answers
        finally:
            answers.close()
    mark_used(folder)


def _require_ours(folder: Path, identity: dict[str, Any]) -> None:
    if "\0" in str(folder) or (folder.exists() and not folder.is_dir()):
        raise RunError(f"{harmless(str(folder))} is not a folder", fix="give another --out")
    own_files(folder, "a folder of answers", {ANSWERS: lambda path: is_record_file(path, BEGINNING)})
    header = (folder / ANSWERS).exists() and read_record_header(folder / ANSWERS)
    if not header:
        return
    known = header.get("identity")
    if header.get("format") != FORMAT or not isinstance(known, dict):
        raise RunError(f"{folder / ANSWERS} is damaged or of another version", fix=DISCARD)
    differing = differing_fields(known, identity)
    if differing:
        raise RunError(
            f"{folder} holds answers of another model (it differs in: {differing})", fix="give another --out"
        )
