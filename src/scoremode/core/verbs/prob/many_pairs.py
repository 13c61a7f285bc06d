"""Scores many pairs, chunk by chunk, and keeps the results in the cache, where the same question resumes after a kill.

pairs.jsonl ──▶ pairs ──▶ CACHE/prob/DIGEST: a journal of scored chunks; then results.jsonl and manifest.json ──▶ --out
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Literal

import msgspec

from scoremode.core.cache.entries import hold_entry
from scoremode.core.disk.files import file_sha256, written_atomically
from scoremode.core.disk.folders import JOURNAL, MANIFEST, RESULTS, Mark, entry_folder
from scoremode.core.disk.manifests import Sha256
from scoremode.core.reading import LARGEST, numbered_lines
from scoremode.core.store.resumable import Resumable
from scoremode.core.strict_json import parse
from scoremode.core.verbs.outputs import About, FileKind, Output, check_output, standing
from scoremode.core.verbs.prob.boundary import EncodedPair, longest_of
from scoremode.core.verbs.prob.sequence import SequenceProbability, SequenceScore
from scoremode.core.verbs.progress import Progress
from scoremode.errors import InputError, RunError

Pairs = list[tuple[str, str]]

EXAMPLE = 'use rows like {"prompt": "…", "target": "…"}'
CHUNK = 256  # pairs scored between two writes
KIND, FORMAT = "scoremode prob", 2  # format 2: small groups share a batch, which may change last digits


def read_pairs(path: Path) -> Pairs:
    """The pairs of a .jsonl file: {"prompt": "…", "target": "…"} or {"prompt": "…", "targets": ["…", "…"]}."""
    if not path.is_file():
        raise InputError(f"there is no file '{path}'", fix="check the path given to --file")
    found: Pairs = []
    for number, line in numbered_lines(path, kept=True):
        if not line.strip():
            continue
        try:
            row = parse(line, constants=True)
            prompt, targets = row["prompt"], row["targets"] if "targets" in row else [row["target"]]
            good = isinstance(prompt, str) and isinstance(targets, list) and set(map(type, targets)) == {str}
        except (ValueError, KeyError, TypeError):
            good = False
        if not good:
            raise InputError(f"{path} line {number} is not a pair", fix=EXAMPLE)
        found += ((prompt, target) for target in targets)
    if not found:
        raise InputError(f"{path} holds no pairs", fix=EXAMPLE)
    return found


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Written:
    """The results that a file has, one line of JSON for each pair."""

    output: Output
    size: int  # bytes
    reused: bool  # the results existed already: nothing was scored

    def rows(self) -> Iterator[Mapping[str, Any]]:
        with self.output.opened(self.size) as file:
            yield from map(parse, file)


def check_results(name: str, flag: str) -> Output:
    """Checks a file for results before the model is loaded; a file that has something else is refused."""
    return check_output(name, flag, RESULTS_FILE)


def _about(file: IO[bytes]) -> About | None:
    """A hash of results; None if a line is not written as ours are."""
    digest = hashlib.sha256()
    for line in iter(lambda: file.readline(LARGEST), b""):
        digest.update(line)
        try:
            if SequenceScore.from_json(parse(line)).as_line() + b"\n" != line:
                return None
        except (ValueError, LookupError, TypeError, AttributeError, msgspec.MsgspecError):
            return None
    return frozenset({digest.hexdigest()})


RESULTS_FILE = FileKind("a file of scoremode prob", _about, most=1 << 30)


def score_to_file(
    lm: SequenceProbability, pairs: Pairs, output: Output, *, fresh: bool = False, progress: Progress | None = None
) -> Written:
    """Scores pairs and writes their results to a file, which may have other results only if ``fresh``."""
    identity = question(lm, pairs)
    with ExitStack() as stack:
        if lm.held.is_given:  # only the caller knows the model: its results cannot be found again
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="scoremode-")))
        else:
            folder = entry_folder("prob", identity)
        kept = stack.enter_context(KeptResults(folder, identity, fresh=fresh))
        hold_entry(folder)
        known = kept.finished
        is_there = _is_there(output, known, fresh=fresh)  # other results are refused before the engine starts
        results = known or _score(lm, pairs, kept, progress)
        if known is None:
            is_there = _is_there(check_results(output.name, output.flag), results, fresh=fresh)
        if not is_there:
            output.write(results.path)
        return Written(output, results.path.stat().st_size, reused=known is not None)


def _is_there(output: Output, results: PairResults | None, *, fresh: bool) -> bool:
    """Does the file have these results? RunError if it has others that may not be replaced."""
    there = standing(output, RESULTS_FILE, frozenset({results.sha256} if results else ()))
    if there == "foreign" or (there == "other" and not fresh):
        raise RunError(f"{output} has other results", fix="give another --out, or --fresh to replace it")
    return there == "same"


def _score(lm: SequenceProbability, pairs: Pairs, kept: KeptResults, progress: Progress | None) -> PairResults:
    """Scores the chunks that the journal lacks, and keeps all results. Only one chunk is in memory as tokens."""

    def encoded(begin: int) -> list[EncodedPair]:
        return lm.encode(pairs[begin : begin + CHUNK], begin + 1)

    begins = range(0, len(pairs), CHUNK)
    # the engine has room for the longest pair of all chunks, even if its chunk is done
    lm.open(max(longest_of(encoded(begin)) for begin in begins), progress)
    kept.begin({"model": lm.held.subject.name, "corpus": f"{len(pairs):,} pairs", "engine": lm.held.engine_name})
    records = kept.open_journal()
    places = {number: at for number, at, _ in records.replay()}
    for number, begin in enumerate(begins):
        if number in places:
            continue
        lines = (result.as_line() + b"\n" for result in lm.score(encoded(begin)))
        places[number] = records.append(number, b"".join(lines))
        if progress:
            progress(min(len(places) * CHUNK, len(pairs)), len(pairs))
    return kept.save(records.body(places[number], number) for number in range(len(begins)))


def question(lm: SequenceProbability, pairs: Pairs) -> Mapping[str, object]:
    """Returns the facts that must be equal for stored results to answer these pairs."""
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(json.dumps(pair).encode() + b"\n")
    return {**lm.identity(), "pairs": digest.hexdigest(), "chunk": CHUNK, "format": FORMAT}


class ResultsManifest(msgspec.Struct, rename={"for_": "for"}):
    """The fields of a manifest."""

    for_: Literal["scoremode prob"]
    identity: dict[str, Any]
    sha256: Sha256


@dataclass(frozen=True, slots=True)
class PairResults:
    """A file of results."""

    path: Path
    sha256: str


class KeptResults(Resumable[PairResults]):
    """A folder of the cache for the results of some pairs."""

    what, other, again = "a folder of results", "results of another question (it differs in: {})", "give --fresh"
    manifest, form, journal, header = MANIFEST, ResultsManifest, JOURNAL, {"for": KIND}

    def _data(self) -> dict[str, Mark]:
        return {RESULTS: lambda _: True}

    def _open(self, manifest: Mapping[str, Any]) -> PairResults:
        found = PairResults(self.folder / RESULTS, manifest["sha256"])
        if not found.path.is_file() or file_sha256(found.path) != found.sha256:
            raise RunError(f"{found.path} was changed after scoremode wrote it", fix=self.again)
        return found

    def save(self, bodies: Iterable[bytes]) -> PairResults:
        path, digest = self.folder / RESULTS, hashlib.sha256()
        with written_atomically(path) as file:
            for body in bodies:
                digest.update(body)
                file.write(body)
        found = PairResults(path, digest.hexdigest())
        self.finish({"for": KIND, "identity": self.identity, "sha256": found.sha256})
        return found
