"""Pairs in a file, read as they are needed: a file of any length takes the memory of a few hundred pairs."""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import overload

from scoremode import strict_json
from scoremode.errors import InputError
from scoremode.verbs.prob import SequenceProbability
from scoremode.verbs.prob_encoding import EncodedPair, longest_of

Pair = tuple[str, str]
Pairs = Sequence[Pair]

STEP = 256  # pairs between two places in the file that are remembered
KEPT = 1 << 14  # pairs that stay in memory as tokens; the others are encoded again when their turn comes
EXAMPLE = 'use rows like {"prompt": "…", "target": "…"}'


class PairFile(Sequence[Pair]):
    """The pairs of a .jsonl file. Every row is checked at once, and read again when its pairs are asked for.

    Rows are ``{"prompt": "…", "target": "…"}`` or ``{"prompt": "…", "targets": ["…", "…"]}``.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InputError(f"there is no file '{path}'", fix="check the path given to --file")
        self.path = path
        self._file = path.open("rb")
        self._places = array("Q")  # of every STEP pairs: where the row of the first one begins,
        self._skipped = array("Q")  # how many pairs of that row come before it,
        self._checksums = array("Q")  # and a checksum, because the file may be changed before it is read again
        self._count = 0
        try:
            self.digest = self._scan()
        except BaseException:
            self.close()
            raise

    def _scan(self) -> str:
        """Check every row, and remember what is needed to read parts of the file again; sha256 of all pairs."""
        digest, last = hashlib.sha256(), -1
        for at, before, line, pair in self._rows(0):
            begins = self._count % STEP == 0
            if begins:
                self._places.append(at)
                self._skipped.append(before)
                self._checksums.append(0)
            if begins or at != last:
                self._checksums[-1] = zlib.crc32(line, self._checksums[-1])
            digest.update(as_line(pair))
            last, self._count = at, self._count + 1
        if not self._count:
            raise InputError(f"{self.path} holds no pairs", fix=EXAMPLE)
        return digest.hexdigest()

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Pair: ...

    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...

    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            begin, end, step = index.indices(self._count)
            first = begin // STEP
            found = [pair for number in range(first, -(-end // STEP)) for pair in self._step(number)]
            return found[begin - first * STEP : end - first * STEP : step] if end > begin else []
        place = range(self._count)[index]  # also for negative numbers; IndexError if there is none
        return self[place : place + 1][0]

    def __iter__(self) -> Iterator[Pair]:
        for number in range(len(self._places)):
            yield from self._step(number)

    def _step(self, number: int) -> list[Pair]:
        """STEP pairs, or what is left at the end."""
        count = min(STEP, self._count - number * STEP)
        found: list[Pair] = []
        checksum, last = 0, -1
        try:
            for at, _, line, pair in islice(self._rows(self._places[number], self._skipped[number]), count):
                if at != last:
                    checksum = zlib.crc32(line, checksum)
                found.append(pair)
                last = at
        except InputError:
            found = []
        if len(found) != count or checksum != self._checksums[number]:
            raise InputError(f"{self.path} was changed while it was being read", fix="run the same command again")
        return found

    def _rows(self, at: int, skipped: int = 0) -> Iterator[tuple[int, int, bytes, Pair]]:
        """Pairs from a row on: where the row begins, how many of its pairs came before, the row, and the pair."""
        self._file.seek(at)
        for number, line in enumerate(self._file, 1):
            begins, at = at, at + len(line)
            if not line.strip():
                continue
            prompt, targets = self._row(line, number)
            for before in range(skipped, len(targets)):
                yield begins, before, line, (prompt, targets[before])
            skipped = 0

    def _row(self, line: bytes, number: int) -> tuple[str, list[str]]:
        try:
            row = strict_json.parse(line, constants=True)
            targets = row["targets"] if "targets" in row else [row["target"]]
            good = isinstance(row["prompt"], str) and isinstance(targets, list) and set(map(type, targets)) == {str}
        except (ValueError, KeyError, TypeError):
            good = False
        if not good:
            raise InputError(f"{self.path} line {number} is not a pair", fix=EXAMPLE)
        return row["prompt"], targets


_quoted: Callable[[str], str] = json.encoder.encode_basestring_ascii


def as_line(pair: Pair) -> bytes:
    """A pair as it is hashed: as ``json.dumps`` writes it, and a line break."""
    return f"[{_quoted(pair[0])}, {_quoted(pair[1])}]\n".encode()


def digest_of(pairs: Pairs) -> str:
    """sha256 of all pairs in order."""
    if isinstance(pairs, PairFile):
        return pairs.digest
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(as_line(pair))
    return digest.hexdigest()


class EncodedChunks:
    """Pairs as tokens, some at a time. All are checked and measured at once, but only the first KEPT are kept."""

    def __init__(self, lm: SequenceProbability, pairs: Pairs, size: int) -> None:
        self.lm, self.pairs, self.size = lm, pairs, size
        self.count = -(-len(pairs) // size)
        self.longest = self.fed = 0
        self._kept: list[list[EncodedPair]] = []
        for number in range(self.count):
            if number == 0 or (number + 1) * size <= KEPT:
                chunk = self._encode(number)
                self._kept.append(chunk)
                longest, fed = longest_of(chunk), sum(pair.fed for pair in chunk)
            else:
                begin = number * size
                longest, fed = lm.measure(pairs[begin : begin + size], begin + 1)
            self.longest, self.fed = max(self.longest, longest), self.fed + fed

    def __getitem__(self, number: int) -> list[EncodedPair]:
        return self._kept[number] if number < len(self._kept) else self._encode(number)

    def _encode(self, number: int) -> list[EncodedPair]:
        begin = number * self.size
        return self.lm.encode(self.pairs[begin : begin + self.size], begin + 1)
