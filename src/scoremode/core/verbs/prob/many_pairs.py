"""Scores many pairs chunk by chunk: reads them from a file as they are needed, and writes results to a file or stream.

A file of any length takes the memory of a few hundred pairs. Results are one line of JSON for each pair. Scoring
resumes after a kill, and results of different questions are never mixed:

FILE                  the results, when all pairs are scored
FILE.manifest.json    the question that FILE answers, and the sha256 of FILE
FILE.partial          while scoring: the results so far, one record for each chunk of pairs (records.py)
.FILE.lock            while a process works on FILE

The manifest gets its name before FILE does, and is removed after FILE. So, whenever a kill comes, a FILE without a
manifest was written by somebody else, and is left as it is.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from scoremode.core.disk.files import file_sha256, open_regular, write_atomically, written_atomically
from scoremode.core.disk.locks import hold_lock
from scoremode.core.disk.manifests import differing_fields
from scoremode.core.disk.records import RecordFile, read_record_header
from scoremode.core.strict_json import parse, read_object
from scoremode.core.verbs.outputs import Output, check_output, has_content
from scoremode.core.verbs.prob.boundary import EncodedPair, longest_of
from scoremode.core.verbs.prob.sequence import SequenceProbability, SequenceScore
from scoremode.core.verbs.progress import Progress
from scoremode.errors import InputError, RunError

Pair = tuple[str, str]

STEP = 256  # pairs between two stored offsets into the copy of a file
KEPT = 1 << 14  # pairs that stay in memory as tokens; other pairs are encoded again when they are scored
EXAMPLE = 'use rows like {"prompt": "…", "target": "…"}'
CHUNK = 256  # pairs scored between two writes
KIND, FORMAT = "scoremode prob", 2  # format 2: small groups share a batch, which may change last digits
BEGINNING = json.dumps({"for": KIND}).encode()[:-1]  # the first bytes of every .partial
DISCARD = "give another --out, or --fresh"


# ── pairs ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class PairFile:
    """The pairs of a .jsonl file. Every row is checked at once, and its pairs are copied to a temporary file.

    Rows are ``{"prompt": "…", "target": "…"}`` or ``{"prompt": "…", "targets": ["…", "…"]}``. Changes to the file while
    its pairs are scored have no effect.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InputError(f"there is no file '{path}'", fix="check the path given to --file")
        self.path = path
        self._copy = tempfile.TemporaryFile(prefix="scoremode-")  # noqa: SIM115 - closed and removed with this object
        self._places = array("Q")  # the offset in the copy of every STEP-th pair
        self._count = 0
        digest = hashlib.sha256()
        for pair in self._rows():
            if self._count % STEP == 0:
                self._places.append(self._copy.tell())
            line = as_line(pair)
            digest.update(line)
            self._copy.write(line)
            self._count += 1
        if not self._count:
            raise InputError(f"{path} holds no pairs", fix=EXAMPLE)
        self.digest = digest.hexdigest()  # sha256 of all pairs

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> list[Pair]:
        begin, end, step = part.indices(self._count)
        if end <= begin:
            return []
        self._copy.seek(self._places[begin // STEP])
        lines = islice(self._copy, begin % STEP, begin % STEP + end - begin, step)
        return [(prompt, target) for prompt, target in map(json.loads, lines)]

    def _rows(self) -> Iterator[Pair]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = parse(line, constants=True)
                    prompt, targets = row["prompt"], row["targets"] if "targets" in row else [row["target"]]
                    good = isinstance(prompt, str) and isinstance(targets, list) and set(map(type, targets)) == {str}
                except (ValueError, KeyError, TypeError):
                    good = False
                if not good:
                    raise InputError(f"{self.path} line {number} is not a pair", fix=EXAMPLE)
                yield from ((prompt, target) for target in targets)


Pairs = list[Pair] | PairFile

_quoted: Callable[[str], str] = json.encoder.encode_basestring_ascii


def as_line(pair: Pair) -> bytes:
    """Encodes a pair as the bytes that are hashed: as ``json.dumps`` writes it, with a line break."""
    return f"[{_quoted(pair[0])}, {_quoted(pair[1])}]\n".encode()


def digest_of(pairs: Pairs) -> str:
    if isinstance(pairs, PairFile):
        return pairs.digest
    return hashlib.sha256(b"".join(map(as_line, pairs[:]))).hexdigest()


class EncodedChunks:
    """Pairs as tokens, by chunks. All pairs are checked and measured first, but only about KEPT stay in memory."""

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


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Written:
    """The number of results in a file, and whether they existed before."""

    count: int
    reused: bool  # the results existed already: nothing was scored


def score_to_file(
    lm: SequenceProbability,
    pairs: Pairs,
    output: Output,
    *,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Scores pairs into a file, unless it already has their results. The same call resumes after an interruption.

    Results of another question, and files that are not ours, are refused before the engine is started. ``fresh``
    discards results that are ours.
    """
    files = ResultFiles(output.path)
    busy = RunError(f"another process is writing {output.name}", fix="wait for it, or give another --out")
    with hold_lock(files.lock, busy=busy):
        identity = question(lm, pairs)
        count = files.check(identity, fresh=fresh)
        if count is not None and not fresh:
            return Written(count, reused=True)
        encoded = EncodedChunks(lm, pairs, CHUNK)
        if fresh:
            lm.open(encoded.longest)  # first: nothing is lost if the engine cannot be opened
            files.discard()
        _finish_chunks(encoded, files, identity, progress)
    return Written(len(pairs), reused=False)


def score_to_stream(lm: SequenceProbability, pairs: Pairs, output: Output, progress: Progress | None = None) -> Written:
    """Scores pairs into a device or a FIFO, line by line. Nothing can be resumed."""
    encoded = EncodedChunks(lm, pairs, CHUNK)
    with output.stream() as write:
        lm.open(encoded.longest)
        for number in range(encoded.count):
            write(_lines(lm.score(encoded[number])))
            if progress:
                progress(min((number + 1) * CHUNK, len(pairs)), len(pairs))
    return Written(len(pairs), reused=False)


def read_results(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the results in a finished file, one at a time."""
    with open_regular(path) as file:
        for line in file:
            yield parse(line)


def question(lm: SequenceProbability, pairs: Pairs) -> dict[str, Any]:
    """Returns the facts that must be equal for stored results to answer these pairs."""
    return {**lm.identity(), "pairs": digest_of(pairs), "chunk": CHUNK, "format": FORMAT}


def check_results(name: str, flag: str) -> Output:
    """Checks a file for results before the model is loaded; a file without our manifest beside it is refused."""

    def is_ours(output: Output) -> bool:
        return output.place is not None or has_content(ResultFiles(output.path).manifest)  # a URI is checked later

    return check_output(name, flag, "a file of scoremode prob", is_ours)


class ResultFiles:
    """FILE with the results, and the manifest, .partial and lock next to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = path.with_name(path.name + ".manifest.json")
        self.partial = path.with_name(path.name + ".partial")
        self.lock = path.with_name(f".{path.name}.lock")

    def check(self, identity: dict[str, Any], *, fresh: bool) -> int | None:
        """Refuses files that are not ours and, unless ``fresh``, files that answer another question.

        Returns how many results there are; None if they are not complete.
        """
        manifest, finished = self._read_manifest(), has_content(self.path)
        if finished and manifest is None:
            raise RunError(f"{self.path} exists and is not a file of scoremode prob", fix="give another --out")
        if finished and manifest is not None:
            if not fresh:
                _require_same(self.path, manifest["identity"], identity)
            if file_sha256(self.path) != manifest["sha256"]:
                raise RunError(
                    f"{self.path} was changed after scoremode wrote it", fix="move it away, or give another --out"
                )
        begun = self._read_partial()
        if begun is not None and not fresh:
            _require_same(self.partial, begun, identity)
        if not finished or manifest is None:
            return None
        if not fresh:
            self.partial.unlink(missing_ok=True)  # of the same question: a process was killed just before removing this
        return int(manifest["results"])

    def discard(self) -> None:
        """Removes FILE, its manifest and its .partial. Call ``check`` first."""
        for path in (self.path, self.manifest, self.partial):
            path.unlink(missing_ok=True)

    def finish(self, bodies: Iterable[bytes], identity: dict[str, Any], count: int) -> None:
        """Writes FILE and its manifest from the scored chunks, and removes the .partial."""
        if has_content(self.path):
            raise RunError(
                f"{self.path} was written by something else meanwhile",
                fix="move it away and run the same command again: all results are kept",
            )
        digest = hashlib.sha256()
        with written_atomically(self.path) as file:
            for body in bodies:
                digest.update(body)
                file.write(body)
            manifest = {"for": KIND, "identity": identity, "results": count, "sha256": digest.hexdigest()}
            sealed = {**manifest, "seal": _seal(manifest)}
            write_atomically(self.manifest, json.dumps(sealed, indent=1, allow_nan=False).encode() + b"\n")
        self.partial.unlink()

    def _read_manifest(self) -> dict[str, Any] | None:
        """Returns the manifest, or None if there is none; raises RunError if it is not ours or was changed."""
        try:
            found = read_object(self.manifest)
        except ValueError:
            if not has_content(self.manifest):
                return None
            found = {}
        seal = found.pop("seal", None)
        whole = isinstance(found.get("identity"), dict) and isinstance(found.get("results"), int)
        if found.get("for") != KIND or not whole or "sha256" not in found or seal != _seal(found):
            raise RunError(
                f"{self.manifest} is damaged or is not a file of scoremode prob", fix="give another --out, or delete it"
            )
        return found

    def _read_partial(self) -> dict[str, Any] | None:
        """Returns the identity in a .partial; None if there is no .partial, or if its first line is incomplete."""
        if not has_content(self.partial):
            return None
        with open_regular(self.partial) as file:
            beginning = file.read(len(BEGINNING))
        header = read_record_header(self.partial)
        if not BEGINNING.startswith(beginning) or (header is not None and not isinstance(header.get("identity"), dict)):
            raise RunError(f"{self.partial} exists and is not a file of scoremode prob", fix="give another --out")
        return header["identity"] if header is not None else None


def _finish_chunks(
    encoded: EncodedChunks, files: ResultFiles, identity: dict[str, Any], progress: Progress | None
) -> None:
    """Scores the chunks that the .partial lacks, then writes all results into FILE.

    The .partial is made when the first chunk is scored. The caller holds the lock.
    """
    lm, header, pairs = encoded.lm, {"for": KIND, "identity": identity}, len(encoded.pairs)
    records = RecordFile(files.partial, header) if has_content(files.partial) else None
    try:
        places = {} if records is None else {number: place for number, place, _ in records.replay()}
        missing = [number for number in range(encoded.count) if number not in places]
        if missing:
            lm.open(encoded.longest)  # with room for the longest pair of all chunks, even if its chunk is done
        for number in missing:
            lines = _lines(lm.score(encoded[number]))
            records = records or RecordFile(files.partial, header)
            places[number] = records.append(number, lines)
            if progress:
                progress(min(len(places) * CHUNK, pairs), pairs)
        assert records is not None, "there is at least one chunk"
        files.finish((records.body(places[number], number) for number in range(encoded.count)), identity, pairs)
    finally:
        if records is not None:
            records.close()


def _lines(results: list[SequenceScore]) -> bytes:
    return "".join(result.as_line() + "\n" for result in results).encode()


def _require_same(path: Path, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    if differing := differing_fields(known, wanted):
        raise RunError(f"{path} holds results of another question (it differs in: {differing})", fix=DISCARD)


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
