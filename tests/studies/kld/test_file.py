"""llama.cpp's file of base logits: what is read, what is written, and what is refused."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from scoremode.core.scores.answers import measured
from scoremode.errors import EngineError, InputError, RunError
from scoremode.studies.kld.file import (
    HEADER,
    Coarseness,
    KldFile,
    KldLayout,
    KldWriter,
    is_kld,
    read_scores,
)
from tests.studies.kld.kld_files import Logits, log_p, random_logits, write_file

CONTEXT, VOCABULARY, CHUNKS = 8, 11, 3
ROWS = CONTEXT - 1 - CONTEXT // 2
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, CHUNKS * CONTEXT)
LOGITS = random_logits(CHUNKS * CONTEXT, VOCABULARY, size=4.5)


def logits_of(chunk: int, row: int) -> Logits:
    found: Logits = LOGITS[chunk * CONTEXT + row]
    return found


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_file(tmp_path / "good.kld", TOKENS, VOCABULARY, logits_of, CONTEXT)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_scores_are_those_of_the_longhand(good: Path) -> None:
    file, seen = KldFile(good), Coarseness()
    for chunk in range(CHUNKS):
        targets = file.tokens[chunk, CONTEXT // 2 + 1 :]
        found = read_scores(file, chunk, targets, seen)
        assert found.top is not None
        assert found.top_logprob is not None
        for row in range(ROWS):
            stored, codes = log_p(good, chunk, row)
            assert found.logprob[row, 0] == pytest.approx(stored[targets[row]], abs=1e-12)
            assert measured(found.top)[row] == codes.index(max(codes))
            assert measured(found.top_logprob)[row] == pytest.approx(max(stored), abs=1e-12)
    rows = np.stack([logits_of(c, r) for c in range(CHUNKS) for r in range(CONTEXT // 2, CONTEXT - 1)])
    on_floor = (rows <= rows.max(1, keepdims=True) - np.float32(16)).sum(1)
    assert 0 < np.count_nonzero(on_floor) < len(rows), "rows with and without a floor"
    low = int(on_floor.sum())
    assert (seen.rows, seen.ids, seen.ids_on_floor) == (ROWS * CHUNKS, ROWS * CHUNKS * VOCABULARY, low)
    assert any(f"{low / seen.ids:.1%}" in note for note in seen.notes())


def test_a_file_is_known_by_its_name_or_its_beginning(good: Path, tmp_path: Path) -> None:
    other = tmp_path / "logits.bin"
    other.write_bytes(good.read_bytes())
    (tmp_path / "folder.kld").mkdir()
    assert is_kld(good)
    assert is_kld(other)
    assert is_kld("not-there.kld"), "so that the line says which file is missing"
    assert not is_kld(tmp_path / "folder.kld")
    assert not is_kld("smollm2-135m")
    assert not is_kld("a\0b")


def read_all(path: Path) -> None:
    file = KldFile(path)
    for chunk in range(file.layout.chunks):
        read_scores(file, chunk, file.tokens[chunk, CONTEXT // 2 + 1 :], Coarseness())


def header(context: int = CONTEXT, vocabulary: int = VOCABULARY, chunks: int = CHUNKS) -> Callable[[bytes], bytes]:
    return lambda data: HEADER.pack(b"_logits_", context, vocabulary, chunks) + data[20:]


RECORDS = 20 + 4 * CHUNKS * CONTEXT


def float_at(offset: int, value: float) -> Callable[[bytes], bytes]:
    return lambda data: data[: RECORDS + offset] + struct.pack("<f", value) + data[RECORDS + offset + 4 :]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:15], "ends in its header"),
        (lambda data: b"GGUF" + data[4:], "does not begin"),
        (lambda data: data[:-1], "interrupted"),
        (lambda data: data + b"\0", "asks for"),
        (header(context=2), "tokens of a chunk"),
        (header(vocabulary=-1), "number of ids"),
        (header(chunks=0), "number of chunks"),
        (header(2**31 - 1, 2**31 - 1, 2**31 - 1), "asks for"),
        (lambda data: data[:-2] + b"\1\0", "is not zero"),  # an odd vocabulary has a word of padding
        (header(vocabulary=VOCABULARY - 1), "asks for|token"),
        (lambda data: data[:20] + struct.pack("<i", VOCABULARY) + data[24:], "the token 11"),
        (lambda data: data[:20] + struct.pack("<i", -1) + data[24:], "the token -1"),
        (float_at(0, float("nan")), "row 0 of chunk 0"),
        (float_at(0, -1e-4), "row 0 of chunk 0"),
        (float_at(0, 1.0), "row 0 of chunk 0"),
        (float_at(4, float("-inf")), "row 0 of chunk 0"),
        (float_at(4, 3.0), "row 0 of chunk 0"),
        (float_at(4, -0.5), "sum to"),
        (float_at(4, -400.0), "sum to"),
    ],
)
def test_a_bad_file_is_refused(good: Path, damage: Callable[[bytes], bytes], says: str) -> None:
    good.write_bytes(damage(good.read_bytes()))
    with pytest.raises(InputError) as refused:
        read_all(good)
    assert any(words in str(refused.value) for words in says.split("|")), refused.value


def test_ten_gigabytes_are_not_read(tmp_path: Path) -> None:
    """A sparse file: opening it and looking at one chunk takes no time and no memory."""
    import resource

    layout = KldLayout(512, 128_256, 160)
    path = tmp_path / "large.kld"
    with path.open("wb") as file:
        file.write(layout.beginning(np.zeros((160, 512), np.int32)))
        os.ftruncate(file.fileno(), layout.size)
    assert layout.size > 10 * 10**9
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = KldFile(path)
    assert found.records(159).shape == (255, layout.words)
    assert int(found.records(100)[7, 1000]) == 0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100 << 10, f"{grown} KiB more"


def test_a_file_that_changes_while_it_is_read_is_refused(good: Path) -> None:
    file = KldFile(good)
    with good.open("r+b") as changed:
        changed.truncate(30)
    with pytest.raises(RunError, match="changed"):
        file.records(0)


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def writer_of(good: Path, path: Path) -> KldWriter:
    file = KldFile(good)
    return KldWriter(path, file.layout, file.tokens)


def test_writing_goes_on_where_it_stopped(good: Path, tmp_path: Path) -> None:
    file, part = KldFile(good), tmp_path / "part"
    with closing(writer_of(good, part)) as writer:
        assert writer.is_new
        writer.write(1, np.array(file.records(1)))
    assert part.stat().st_size == good.stat().st_size
    with pytest.raises(InputError, match="does not begin"):
        KldFile(part)
    with closing(writer_of(good, part)) as writer:
        assert not writer.is_new
        for chunk in (2, 0):
            writer.write(chunk, np.array(file.records(chunk)))
        writer.finish(tmp_path / "whole.kld")
    assert (tmp_path / "whole.kld").read_bytes() == good.read_bytes()
    assert not part.exists()
    other = file.tokens.copy()
    other[0, 0] = (other[0, 0] + 1) % VOCABULARY
    writer_of(good, part).close()
    with closing(KldWriter(part, file.layout, other)) as writer:
        assert writer.is_new, "other tokens: nothing of it is kept"


@pytest.mark.parametrize(("place", "value"), [(0, np.nan), (0, np.inf), (0, -1.0), (1, np.nan), (1, 0.0)])
def test_records_that_no_model_can_give_are_not_written(good: Path, tmp_path: Path, place: int, value: float) -> None:
    records = np.array(KldFile(good).records(0))
    records[1, 2 * place : 2 * place + 2] = np.array([value], "<f4").view("<u2")
    with closing(writer_of(good, tmp_path / "part")) as writer, pytest.raises(EngineError, match="NaN or infinite"):
        writer.write(0, records)
