"""Scores many pairs, chunk by chunk, and keeps the results in the cache, where the same question resumes after a kill.

pairs.jsonl ──▶ pairs ──▶ CACHE/prob/DIGEST: a journal of scored chunks; then results.jsonl and manifest.json ──▶ --out
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec

from scoremode.core.disk.files import write_atomically
from scoremode.core.disk.folders import JOURNAL, MANIFEST, RESULTS, Mark, entry_folder
from scoremode.core.disk.manifests import Sha256
from scoremode.core.store.resumable import Resumable
from scoremode.core.strict_json import parse
from scoremode.core.verbs.outputs import Output, check_output
from scoremode.core.verbs.prob.boundary import longest_of
from scoremode.core.verbs.prob.sequence import SequenceProbability, SequenceScore
from scoremode.core.verbs.progress import Progress
from scoremode.errors import InputError, RunError

Pairs = list[tuple[str, str]]

EXAMPLE = 'use rows like {"prompt": "…", "target": "…"}'
CHUNK = 256  # pairs scored between two writes
KIND, FORMAT = "scoremode prob", 2  # format 2: small groups share a batch, which may change last digits
MARK_WITHIN = 1 << 20  # the first result is recognized within this many bytes


def read_pairs(path: Path) -> Pairs:
    """The pairs of a .jsonl file: {"prompt": "…", "target": "…"} or {"prompt": "…", "targets": ["…", "…"]}."""
    if not path.is_file():
        raise InputError(f"there is no file '{path}'", fix="check the path given to --file")
    found: Pairs = []
    with path.open("rb") as file:
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
                raise InputError(f"{path} line {number} is not a pair", fix=EXAMPLE)
            found += ((prompt, target) for target in targets)
    if not found:
        raise InputError(f"{path} holds no pairs", fix=EXAMPLE)
    return found


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Written:
    """The results that a file has, one line of JSON for each pair."""

    lines: list[bytes]
    reused: bool  # the results existed already: nothing was scored

    def rows(self) -> Iterable[Mapping[str, Any]]:
        return map(parse, self.lines)


def check_results(name: str, flag: str) -> Output:
    """Checks a file for results before the model is loaded; a file that has something else is refused."""

    def is_ours(output: Output) -> bool:
        first = output.beginning(MARK_WITHIN).split(b"\n", 1)[0]
        return first.startswith(b'{"prompt": ') and b'"log_prob": ' in first

    return check_output(name, flag, "a file of scoremode prob", is_ours)


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
        data = kept.finished
        is_there = _is_there(output, data, fresh=fresh)  # other results are refused before the engine starts
        if data is None:
            data = _score(lm, pairs, kept, progress)
            is_there = _is_there(check_results(output.name, output.flag), data, fresh=fresh)
        if not is_there:
            output.write(data)
        return Written(data.splitlines(), reused=kept.finished is not None)


def _is_there(output: Output, data: bytes | None, *, fresh: bool) -> bool:
    """Does the file have these results? RunError if it has others that may not be replaced."""
    if not output.exists:
        return False
    same = data is not None and output.beginning(len(data) + 1) == data
    if not (same or fresh):
        raise RunError(f"{output} has other results", fix="give another --out, or --fresh to replace it")
    return same


def _score(lm: SequenceProbability, pairs: Pairs, kept: KeptResults, progress: Progress | None) -> bytes:
    """Scores the chunks that the journal lacks, and keeps all results."""
    encoded = lm.encode(pairs)
    lm.open(longest_of(encoded), progress)  # with room for the longest pair of all chunks, even if its chunk is done
    kept.begin()
    records = kept.open_journal()
    done = {number: body for number, _, body in records.replay()}
    for number, begin in enumerate(range(0, len(encoded), CHUNK)):
        if number in done:
            continue
        done[number] = _lines(lm.score(encoded[begin : begin + CHUNK]))
        records.append(number, done[number])
        if progress:
            progress(min(len(done) * CHUNK, len(pairs)), len(pairs))
    return kept.save(b"".join(done[number] for number in sorted(done)))


def question(lm: SequenceProbability, pairs: Pairs) -> Mapping[str, object]:
    """Returns the facts that must be equal for stored results to answer these pairs."""
    digest = hashlib.sha256("".join(json.dumps(pair) + "\n" for pair in pairs).encode()).hexdigest()
    return {**lm.identity(), "pairs": digest, "chunk": CHUNK, "format": FORMAT}


def _lines(results: list[SequenceScore]) -> bytes:
    return b"".join(result.as_line() + b"\n" for result in results)


class ResultsManifest(msgspec.Struct, rename={"for_": "for"}):
    """The fields of a manifest."""

    for_: Literal["scoremode prob"]
    identity: dict[str, Any]
    sha256: Sha256


class KeptResults(Resumable[bytes]):
    """A folder of the cache for the results of some pairs."""

    what, other, again = "a folder of results", "results of another question (it differs in: {})", "give --fresh"
    manifest, form, journal, header = MANIFEST, ResultsManifest, JOURNAL, {"for": KIND}

    def _data(self) -> dict[str, Mark]:
        return {RESULTS: lambda _: True}

    def _open(self, manifest: Mapping[str, Any]) -> bytes:
        path = self.folder / RESULTS
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
            raise RunError(f"{path} was changed after scoremode wrote it", fix=self.again)
        return data

    def save(self, data: bytes) -> bytes:
        write_atomically(self.folder / RESULTS, data)
        self.finish({"for": KIND, "identity": self.identity, "sha256": hashlib.sha256(data).hexdigest()})
        return data
