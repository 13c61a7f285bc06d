"""Results of many pairs in a file: one line of JSON for each pair, resumed after a kill, never mixed with others.

FILE                  the results, when all are there
FILE.manifest.json    which question FILE answers, and its sha256
FILE.partial          while scoring: what is done so far, one record for each chunk of pairs (records.py)
.FILE.lock            while a process works on FILE

The manifest takes its name before FILE does and goes after it: wherever a kill falls, a FILE without a manifest was
written by somebody else, and stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scoremode.disk.files import file_sha256, write_atomically, written_atomically
from scoremode.disk.locks import hold_lock
from scoremode.disk.records import RecordFile, read_record_header
from scoremode.errors import RunError
from scoremode.strict_json import parse, read_object
from scoremode.verbs.outputs import Output, has_content
from scoremode.verbs.prob import SequenceProbability, SequenceScore, TokenScore
from scoremode.verbs.prob_pairs import EncodedChunks, Pairs, digest_of
from scoremode.verbs.progress import Progress

CHUNK = 256  # pairs scored between two writes
KIND, FORMAT = "scoremode prob", 2  # 2: small groups share a batch, which may change last digits
BEGINNING = json.dumps({"for": KIND}).encode()[:-1]  # of every .partial
ROUNDING = 1e-6  # nats that a stored sum may differ from the sum of its stored parts
DISCARD = "give another --out, or --fresh"
FIELDS, TOKEN_FIELDS = {field.name for field in fields(SequenceScore)}, set(TokenScore._fields)


@dataclass(frozen=True, slots=True)
class Written:
    """What became of the results."""

    count: int
    reused: bool  # they were there already: nothing was scored


def score_to_file(
    lm: SequenceProbability,
    pairs: Pairs,
    output: Output,
    *,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Score pairs into a file, or find them there. The same call resumes after an interruption.

    Results of another question, and files that are not ours, are refused before the engine is started. ``fresh``
    discards results that are ours.
    """
    files = ResultFiles(output.path)
    busy = RunError(f"another process is writing {output.name}", fix="wait for it, or give another --out")
    with hold_lock(files.lock, busy=busy):
        identity = question(lm, pairs)
        files.check(identity, fresh=fresh)
        if not fresh and (count := files.finished()) is not None:
            return Written(count, reused=True)
        work = _Work(lm, EncodedChunks(lm, pairs, CHUNK), files, identity)
        try:
            if fresh:
                lm.open(work.encoded.longest)  # nothing is lost if that fails
                files.discard()
            work.score(progress)
            work.finish()
        finally:
            work.close()
    return Written(len(pairs), reused=False)


def score_to_stream(lm: SequenceProbability, pairs: Pairs, output: Output, progress: Progress | None = None) -> Written:
    """Score pairs into a device or a FIFO, line by line. Nothing can be resumed."""
    encoded = EncodedChunks(lm, pairs, CHUNK)
    with output.stream() as write:
        lm.open(encoded.longest)
        for number in range(encoded.count):
            write(_lines(lm.score(encoded[number])))
            if progress:
                progress(min((number + 1) * CHUNK, len(pairs)), len(pairs))
    return Written(len(pairs), reused=False)


def read_results(path: Path) -> Iterator[dict[str, Any]]:
    """The results in a finished file, one at a time."""
    with path.open("rb") as file:
        for line in file:
            yield parse(line)


def question(lm: SequenceProbability, pairs: Pairs) -> dict[str, Any]:
    """What must be equal for stored results to answer these pairs: as JSON gives it back."""
    known = {**lm.identity(), "pairs": digest_of(pairs), "chunk": CHUNK, "format": FORMAT}
    return dict(parse(json.dumps(known)))


class ResultFiles:
    """FILE and the files next to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = path.with_name(path.name + ".manifest.json")
        self.partial = path.with_name(path.name + ".partial")
        self.lock = path.with_name(f".{path.name}.lock")

    def check(self, identity: dict[str, Any], *, fresh: bool) -> None:
        """Refuse whatever is not ours, and unless ``fresh``, what answers another question."""
        manifest = self._read_manifest()
        if has_content(self.path):
            if manifest is None:
                raise RunError(f"{self.path} exists and is not a file of scoremode prob", fix="give another --out")
            if not fresh:
                _require_same(self.path, manifest["identity"], identity)
            if file_sha256(self.path) != manifest["sha256"]:
                raise RunError(
                    f"{self.path} was changed after scoremode wrote it", fix="move it away, or give another --out"
                )
        begun = self._read_partial()
        if begun is not None and not fresh:
            _require_same(self.partial, begun, identity)

    def finished(self) -> int | None:
        """How many results there are; None if they are not complete. Call ``check`` first."""
        if not has_content(self.path):
            return None
        self.partial.unlink(missing_ok=True)  # of the same question: a kill came just before this was done
        manifest = self._read_manifest()
        assert manifest is not None, "checked before"
        return int(manifest["results"])

    def discard(self) -> None:
        """Remove everything. Call ``check`` first."""
        for path in (self.path, self.manifest, self.partial):
            path.unlink(missing_ok=True)

    def _read_manifest(self) -> dict[str, Any] | None:
        """None if there is none; RunError if it is not ours or not as we wrote it."""
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
        """What a .partial answers; None if there is none, or if a kill left not even its first line."""
        if not has_content(self.partial):
            return None
        with self.partial.open("rb") as file:
            beginning = file.read(len(BEGINNING))
        header = read_record_header(self.partial)
        if not BEGINNING.startswith(beginning) or (header is not None and not isinstance(header.get("identity"), dict)):
            raise RunError(f"{self.partial} exists and is not a file of scoremode prob", fix="give another --out")
        return header["identity"] if header is not None else None


class _Work:
    """Results on their way into a file. The caller holds the lock."""

    def __init__(
        self,
        lm: SequenceProbability,
        encoded: EncodedChunks,
        files: ResultFiles,
        identity: dict[str, Any],
    ) -> None:
        self.lm, self.encoded, self.files, self.identity = lm, encoded, files, identity
        self.pairs, self.chunks = encoded.pairs, encoded.count
        self.places: dict[int, int] = {}  # chunk -> where its record lies
        self._records: RecordFile | None = None

    @property
    def records(self) -> RecordFile:
        if self._records is None:
            self._records = RecordFile(self.files.partial, {"for": KIND, "identity": self.identity})
        return self._records

    def close(self) -> None:
        if self._records is not None:
            self._records.close()

    def score(self, progress: Progress | None) -> None:
        """Score the chunks that no record holds."""
        if has_content(self.files.partial):
            self._replay()
        missing = [number for number in range(self.chunks) if number not in self.places]
        if missing:
            self.lm.open(self.encoded.longest)  # the same room for all, whatever was done before
        for number in missing:
            scored = self.lm.score(self.encoded[number])
            self.places[number] = self.records.append(number, _lines(scored))
            if progress:
                progress(min(len(self.places) * CHUNK, len(self.pairs)), len(self.pairs))

    def finish(self) -> None:
        """Give the results their name."""
        if has_content(self.files.path):
            raise RunError(
                f"{self.files.path} was written by something else meanwhile",
                fix="move it away and run the same command again: all results are kept",
            )
        digest = hashlib.sha256()
        with written_atomically(self.files.path) as file:
            for number in range(self.chunks):
                body = self.records.body(self.places[number], number)
                digest.update(body)
                file.write(body)
            manifest = {
                "for": KIND,
                "identity": self.identity,
                "results": len(self.pairs),
                "sha256": digest.hexdigest(),
            }
            sealed = {**manifest, "seal": _seal(manifest)}
            write_atomically(self.files.manifest, json.dumps(sealed, indent=1, allow_nan=False).encode() + b"\n")
        self.files.partial.unlink()

    def _replay(self) -> None:
        """Find the chunks that are done. What a checksum cannot vouch for is checked here."""
        for number, place, body in self.records.replay():
            if number >= self.chunks or number in self.places:
                raise RunError(f"{self.files.partial} holds chunk {number} where none belongs", fix=DISCARD)
            try:
                self._check_chunk(number, body)
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise RunError(f"{self.files.partial} is damaged in chunk {number} ({error})", fix=DISCARD) from None
            self.places[number] = place

    def _check_chunk(self, number: int, body: bytes) -> None:
        lines = body.split(b"\n")[:-1]
        asked = self.pairs[number * CHUNK : (number + 1) * CHUNK]
        for line, (prompt, target) in zip(lines, asked, strict=True):
            check_result(parse(line), prompt, self.lm.encoder.as_scored(target))


def check_result(value: Any, prompt: str, target: str) -> None:
    """ValueError, TypeError, KeyError or OverflowError unless it is a possible result for this prompt and target."""
    if set(value) != FIELDS:
        raise ValueError("other fields than a result has")
    for token in value["tokens"]:
        if set(token) != TOKEN_FIELDS or type(token["id"]) is not int:
            raise ValueError("a token that cannot be")
        if token["rank"] is not None and token["rank"] < 1:
            raise ValueError("a token that cannot be")
    if len({token["rank"] is None for token in value["tokens"]}) > 1:
        raise ValueError("ranks of some tokens only")
    result = SequenceScore.from_json(value)
    if (result.prompt, result.target) != (prompt, target):
        raise ValueError("the answer to another pair")
    total = math.fsum(token.logprob for token in result.tokens) - result.condition_log_prob
    per_token = -result.log_prob / len(result.tokens) if result.tokens else math.nan
    possible = (
        result.log_prob <= 0
        and result.condition_log_prob <= 0
        and all(token.logprob <= ROUNDING for token in result.tokens)
        and math.isclose(result.log_prob, min(0.0, total), abs_tol=ROUNDING)
        and math.isclose(result.prob, math.exp(result.log_prob), rel_tol=ROUNDING)
        and math.isclose(result.perplexity, math.exp(per_token) if per_token < 700 else math.inf, rel_tol=ROUNDING)
        and result.boundary == ("spanning" if result.condition else "clean")
    )
    if not possible:
        raise ValueError("numbers that cannot be")


def _lines(results: list[SequenceScore]) -> bytes:
    return "".join(result.as_line() + "\n" for result in results).encode()


def _require_same(path: Path, known: dict[str, Any], wanted: dict[str, Any]) -> None:
    differing = sorted(name for name in known.keys() | wanted.keys() if known.get(name) != wanted.get(name))
    if differing:
        raise RunError(f"{path} holds results of another question (it differs in: {', '.join(differing)})", fix=DISCARD)


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
