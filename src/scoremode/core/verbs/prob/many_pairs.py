"""Scores many pairs chunk by chunk: reads them from a file as they are needed, and writes results to a file or stream.

A file of any length takes the memory of a few hundred pairs. Results are one line of JSON for each pair. Scoring
resumes after a kill, and results of different questions are never mixed:

FILE                  the results, when all pairs are scored
FILE.manifest.json    the question that FILE answers, and the sha256 of FILE
FILE.partial          while scoring: the results so far, one record for each chunk of pairs (records.py)
.FILE.lock            while a process works on FILE

How they are written, resumed and replaced is the same for every result (core/store/resumable.py), except that the
manifest gets its name before FILE does, and is removed after FILE. So, whenever a kill comes, a FILE without a manifest
was written by somebody else, and is left as it is.
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
from typing import Any, Literal

import msgspec

from scoremode.core.disk.files import file_sha256, open_regular, written_atomically
from scoremode.core.disk.locks import Lock
from scoremode.core.disk.manifests import Count, Sha256, write_sealed
from scoremode.core.store.resumable import Resumable
from scoremode.core.strict_json import parse
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
            chunk = self._encode(number)
            if number == 0 or (number + 1) * size <= KEPT:
                self._kept.append(chunk)
            self.longest = max(self.longest, longest_of(chunk))
            self.fed += sum(pair.fed for pair in chunk)

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
    lm: SequenceProbability, pairs: Pairs, output: Output, *, fresh: bool = False, progress: Progress | None = None
) -> Written:
    """Scores pairs into a file, unless it already has their results. The same call resumes after an interruption.

    Results of another question, and files that are not ours, are refused before the engine is started. ``fresh``
    discards results that are ours.
    """
    with ResultFiles(output.path, question(lm, pairs), fresh=fresh) as files:
        if files.finished is not None:
            return Written(files.finished, reused=True)
        encoded = EncodedChunks(lm, pairs, CHUNK)
        if not files.is_begun:
            lm.open(encoded.longest)  # first: nothing is lost or made if the engine cannot be opened
        files.begin()
        _finish_chunks(encoded, files, progress)
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
        return output.place is not None or has_content(manifest_of(output.path))  # a URI is checked later

    return check_output(name, flag, "a file of scoremode prob", is_ours)


def manifest_of(path: Path) -> Path:
    """Returns the path of the manifest beside FILE."""
    return path.with_name(path.name + ".manifest.json")


class ResultsManifest(msgspec.Struct, rename={"for_": "for"}):
    """The fields of FILE.manifest.json."""

    for_: Literal["scoremode prob"]
    identity: dict[str, Any]
    results: Count
    sha256: Sha256


class ResultFiles(Resumable[int]):
    """FILE with the results, and the manifest, .partial and lock next to it; if it is finished, how many there are."""

    other, again = "results of another question (it differs in: {})", "give another --out, or delete it"
    replace = "give another --out, or --fresh"
    form, header, shares_folder = ResultsManifest, {"for": KIND}, True

    def __init__(self, path: Path, identity: dict[str, Any], *, fresh: bool = False) -> None:
        super().__init__(path.parent, identity, fresh=fresh)
        self.path = self.named = path
        self.manifest, self.journal = manifest_of(path).name, path.name + ".partial"

    @property
    def is_begun(self) -> bool:
        """Are there results that this call can use?"""
        return not self._fresh and has_content(self.folder / self.journal)

    def _acquire(self) -> Lock:
        lock = Lock(self.path.with_name(f".{self.path.name}.lock"))
        if not lock.acquire():
            raise RunError(f"another process is writing {self.path}", fix="wait for it, or give another --out")
        return lock

    def _present(self) -> set[str]:
        names = (self.path.name, self.manifest, self.journal)
        present = {name for name in names if has_content(self.folder / name)}
        if self.manifest in present:
            self._read_manifest()
        foreign = "exists and is not a file of scoremode prob"
        if self.journal in present and not self._is_journal(self.folder / self.journal):
            raise RunError(f"{self.folder / self.journal} {foreign}", fix="give another --out")
        if self.path.name not in present:
            return present - {self.manifest}  # somebody moved FILE away, or it was never renamed
        if self.manifest not in present:
            raise RunError(f"{self.path} {foreign}", fix="give another --out")
        if file_sha256(self.path) != self._read_manifest()["sha256"]:
            raise RunError(
                f"{self.path} was changed after scoremode wrote it", fix="move it away, or give another --out"
            )
        return present

    def _open(self, manifest: dict[str, Any]) -> int:
        return int(manifest["results"])

    def _discard(self, *, fresh: bool) -> None:
        self._remove(self.path.name, self.manifest)

    def save(self, bodies: Iterable[bytes], count: int) -> None:
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
            manifest = {"for": KIND, "identity": self.identity, "results": count, "sha256": digest.hexdigest()}
            write_sealed(self.folder / self.manifest, manifest, self.form)
        (self.folder / self.journal).unlink()


def _finish_chunks(encoded: EncodedChunks, files: ResultFiles, progress: Progress | None) -> None:
    """Scores the chunks that the .partial lacks, then writes all results into FILE."""
    lm, pairs, records = encoded.lm, len(encoded.pairs), files.open_journal()
    places = {number: place for number, place, _ in records.replay()}
    missing = [number for number in range(encoded.count) if number not in places]
    if missing:
        lm.open(encoded.longest)  # with room for the longest pair of all chunks, even if its chunk is done
    for number in missing:
        places[number] = records.append(number, _lines(lm.score(encoded[number])))
        if progress:
            progress(min(len(places) * CHUNK, pairs), pairs)
    files.save((records.body(places[number], number) for number in range(encoded.count)), pairs)


def _lines(results: list[SequenceScore]) -> bytes:
    return "".join(result.as_line() + "\n" for result in results).encode()
