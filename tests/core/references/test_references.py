"""A reference is read back bit for bit, survives a kill, and is refused if anything in it was changed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.disk.folders import HEAD, REFERENCE, shard_name
from scoremode.core.disk.manifests import sealed
from scoremode.core.references.format import DATA_START, RAW_DTYPES, discard, estimate_bytes
from scoremode.core.references.reader import Reference
from scoremode.core.references.writer import StatesWriter
from scoremode.errors import EngineError, InputError, RunError

IDENTITY = {"model": "m" * 64, "plan": "p" * 64, "engine": "table", "settings": {"dtype": "float32"}}
MANIFEST: dict[str, Any] = {
    "plan_digest": "p" * 64,
    "method": "sliding-once",
    "method_settings": {"context_length": 512, "stride": 256, "max_windows": None, "special_tokens": True},
    "model_fingerprint": "m" * 64,
    "tokenizer": "t" * 64,
    "corpus": "wikitext2",
    "corpus_sha256": "c" * 64,
    "engine": {"engine": "table", "dtype": "bfloat16"},
}
DTYPES = ("bfloat16", "float16", "float32")


def random_rows(rows: int, width: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Random bits, which include NaNs with payloads, infinities and subnormals."""
    raw = RAW_DTYPES[dtype]
    data = np.random.default_rng(seed).bytes(rows * width * raw.itemsize)
    return np.frombuffer(data, raw).reshape(rows, width).copy()


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def writer_for(folder: Path, rows: np.ndarray, dtype: str, *, rows_per_shard: int = 7, **other: Any) -> StatesWriter:
    size = rows.shape[1] * rows.dtype.itemsize
    given = {"targets": len(rows), "width": rows.shape[1], "dtype": dtype, "identity": IDENTITY, **other}
    return StatesWriter(folder, shard_bytes=rows_per_shard * size + size // 2, **given)


def make(folder: Path, rows: np.ndarray, dtype: str = "bfloat16", **other: Any) -> Reference:
    """A finished reference of these rows, with a head that depends only on the width."""
    writer = writer_for(folder, rows, dtype, **other)
    writer.write(0, rows)
    write_small_head(writer)
    return writer.finish(MANIFEST)


def write_small_head(writer: StatesWriter) -> np.ndarray:
    weight = random_rows(11, writer.layout.width, writer.layout.dtype, seed=1)
    writer.write_head(weight, None, scale=0.5, softcap=30.0, vocabulary=10)
    return weight


def refused(folder: Path, *, verify: bool = True) -> str:
    """The error of one line when this folder is opened."""
    with pytest.raises(RunError) as caught:
        Reference.open(folder, verify=verify)
    assert caught.value.fix
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ── bit for bit ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back_bit_for_bit_across_odd_shards(tmp_path: Path, dtype: str) -> None:
    rows = random_rows(45, 5, dtype)
    make(tmp_path / "ref", rows, dtype, rows_per_shard=7)
    reference = Reference.open(tmp_path / "ref")
    names = sorted(p.name for p in (tmp_path / "ref").glob("states-*"))
    assert names == [shard_name(i) for i in range(7)]
    assert same_bits(reference.rows(0, 45), rows)
    for first, count in ((0, 0), (0, 1), (44, 1), (6, 2), (7, 7), (3, 30), (45, 0)):
        assert same_bits(reference.rows(first, count), rows[first : first + count]), (first, count)
    assert (reference.targets, reference.width, reference.dtype) == (45, 5, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_file_is_plain_safetensors(tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors import safe_open

    rows = random_rows(20, 6, dtype)
    writer = writer_for(tmp_path / "ref", rows, dtype, rows_per_shard=8)
    writer.write(0, rows)
    weight = random_rows(13, 6, "bfloat16", seed=1)
    bias = random_rows(13, 1, "float32", seed=2)[:, 0]
    writer.write_head(weight, bias, scale=1.0, softcap=None, vocabulary=13)
    writer.finish(MANIFEST)
    kept = []
    for i in range(3):
        with safe_open(tmp_path / "ref" / shard_name(i), framework="pt") as file:
            assert list(file.keys()) == ["states"]
            kept.append(file.get_tensor("states"))
    whole = torch.cat(kept)
    assert whole.dtype == getattr(torch, dtype)
    assert whole.view(torch.uint8).numpy().tobytes() == rows.tobytes()
    with safe_open(tmp_path / "ref" / HEAD, framework="pt") as file:
        assert file.get_tensor("weight").view(torch.uint16).numpy().tobytes() == weight.tobytes()
        assert file.get_tensor("bias").numpy().tobytes() == bias.tobytes()


def test_windows_may_come_in_any_order(tmp_path: Path) -> None:
    rows = random_rows(100, 3, "float32")
    writer = writer_for(tmp_path / "ref", rows, "float32", rows_per_shard=9)
    offsets = np.array([0, 1, 1, 14, 40, 41, 77, 100])
    for window in np.random.default_rng(3).permutation(len(offsets) - 1):
        begin, end = offsets[window : window + 2]
        assert writer.present[begin:end].all() == (begin == end)
        writer.write(int(begin), rows[begin:end])
    write_small_head(writer)
    assert same_bits(writer.finish(MANIFEST).rows(0, 100), rows)


@pytest.mark.parametrize("targets", [0, 1])
def test_none_and_one_target(tmp_path: Path, targets: int) -> None:
    rows = random_rows(targets, 4, "bfloat16")
    make(tmp_path / "ref", rows)
    reference = Reference.open(tmp_path / "ref")
    assert same_bits(reference.rows(0, targets), rows)
    assert len(list((tmp_path / "ref").glob("states-*"))) == targets
    for first, count in ((0, targets + 1), (-1, 1), (0, -1)):
        with pytest.raises(IndexError):
            reference.rows(first, count)


# ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("bias_dtype", [None, "bfloat16", "float32"])
def test_a_head_comes_back_bit_for_bit(tmp_path: Path, bias_dtype: str | None) -> None:
    rows = random_rows(3, 5, "float32")
    weight = random_rows(23, 5, "bfloat16", seed=1)
    bias = None if bias_dtype is None else random_rows(23, 1, bias_dtype, seed=2)[:, 0]
    writer = writer_for(tmp_path / "ref", rows, "float32")
    writer.write(0, rows)
    writer.write_head(weight, bias, scale=0.25, softcap=50.0, vocabulary=20)
    writer.finish(MANIFEST)
    reference = Reference.open(tmp_path / "ref")
    assert same_bits(np.asarray(reference.head_weight()), weight)
    kept = reference.head_bias()
    assert kept is None if bias is None else kept is not None and same_bits(kept, bias)
    head = reference.head
    facts = (head.scale, head.softcap, reference.vocabulary, head.dtype, head.bias_dtype)
    assert facts == (0.25, 50.0, 20, "bfloat16", bias_dtype)


# ── a process that stops ─────────────────────────────────────────────────────────────────────────────────────────────
def test_an_abandoned_writer_is_gone_on_with(tmp_path: Path) -> None:
    rows = random_rows(30, 4, "bfloat16")
    first = writer_for(tmp_path / "ref", rows, "bfloat16")
    write_small_head(first)
    first.write(5, rows[5:20])
    first.close()
    assert "unfinished" in refused(tmp_path / "ref")

    second = writer_for(tmp_path / "ref", rows, "bfloat16")
    assert second.complete_windows(np.array([0, 5, 12, 20, 25, 30])).tolist() == [False, True, True, False, False]
    with pytest.raises(RunError, match="lacks the states of 15 targets, the first is 0"):
        second.finish(MANIFEST)
    second.write(0, rows[:5])
    second.write(20, rows[20:])
    weight = write_small_head(second)
    reference = second.finish(MANIFEST)
    assert same_bits(reference.rows(0, 30), rows)
    assert same_bits(np.asarray(reference.head_weight()), weight)


def test_rows_that_a_power_cut_lost_are_asked_for_again(tmp_path: Path) -> None:
    rows = random_rows(30, 4, "float32")
    first = writer_for(tmp_path / "ref", rows, "float32", rows_per_shard=10)
    for begin in (0, 10, 20):
        first.write(begin, rows[begin : begin + 10])
    first.close()
    with (tmp_path / "ref" / shard_name(1)).open("r+b") as file:
        file.seek(DATA_START + 5 * 16)
        file.write(bytes(16))
    second = writer_for(tmp_path / "ref", rows, "float32", rows_per_shard=10)
    assert second.complete_windows(np.array([0, 10, 20, 30])).tolist() == [True, False, True]


def test_a_kill_while_room_is_made_is_made_good(tmp_path: Path) -> None:
    """A shard that is missing or cut is made again, and its rows are asked for again."""
    rows = random_rows(30, 4, "float32")
    with writer_for(tmp_path / "ref", rows, "float32", rows_per_shard=10) as first:
        first.write(0, rows)
    (tmp_path / "ref" / shard_name(1)).unlink()
    os.truncate(tmp_path / "ref" / shard_name(2), 100)
    writer = writer_for(tmp_path / "ref", rows, "float32", rows_per_shard=10)
    assert writer.present.tolist() == [True] * 10 + [False] * 20


# ── writers that are refused ─────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "other",
    [
        {"identity": {**IDENTITY, "model": "another"}},
        {"targets": 31},
        {"width": 8, "dtype": "bfloat16"},
        {"rows_per_shard": 5},
    ],
)
def test_another_reference_is_not_mixed_in(tmp_path: Path, other: dict[str, Any]) -> None:
    rows = random_rows(30, 4, "float32")
    writer_for(tmp_path / "ref", rows, "float32").close()
    with pytest.raises(RunError, match="belongs to another computation") as caught:
        writer_for(tmp_path / "ref", rows, other.pop("dtype", "float32"), **other)
    assert "--fresh" in caught.value.fix
    writer_for(tmp_path / "ref", rows, "float32").close()


def test_a_finished_reference_is_taken_up_again_by_its_own_run(tmp_path: Path) -> None:
    """As after a kill between reference.json and the run's manifest: nothing is scored again."""
    rows = random_rows(30, 4, "float32")
    make(tmp_path / "ref", rows, "float32")
    before = (tmp_path / "ref" / REFERENCE).read_bytes()
    writer_for(tmp_path / "ref", rows, "float32").close()
    assert "unfinished" in refused(tmp_path / "ref")
    writer = writer_for(tmp_path / "ref", rows, "float32")  # the reopened reference survives a kill as well
    assert writer.present[:30].all()
    write_small_head(writer)
    assert same_bits(writer.finish(MANIFEST).rows(0, 30), rows)
    assert (tmp_path / "ref" / REFERENCE).read_bytes() == before


@pytest.mark.parametrize("name", [HEAD, "states-00000.safetensors"])
def test_files_of_somebody_else_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"dear")
    with pytest.raises(RunError, match=f"it contains {name}"):
        sm.reference("table:uniform", tmp_path, text="any text")
    discard(tmp_path)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [(name, b"dear")]


def test_discard_removes_a_reference_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path / "ref", random_rows(30, 4, "float32"), "float32")
    for name in ("manifest.json", "scores.parquet", "states-1.safetensors", "notes.txt"):
        (tmp_path / "ref" / name).write_text("mine")
    discard(tmp_path / "ref")
    left = sorted(p.name for p in (tmp_path / "ref").iterdir())
    assert left == ["manifest.json", "notes.txt", "scores.parquet", "states-1.safetensors"]


@pytest.mark.parametrize(
    ("first", "rows"),
    [
        (0, np.zeros((2, 4), np.float64)),
        (0, np.zeros((2, 4), np.uint16)),
        (0, np.zeros((2, 5), np.float32)),
        (0, np.zeros(4, np.float32)),
        (-1, np.zeros((2, 4), np.float32)),
        (9, np.zeros((2, 4), np.float32)),
    ],
)
def test_states_that_do_not_fit_are_the_engines_fault(tmp_path: Path, first: int, rows: np.ndarray) -> None:
    writer = writer_for(tmp_path / "ref", random_rows(10, 4, "float32"), "float32")
    with pytest.raises(EngineError):
        writer.write(first, rows)
    assert not writer.present.any()


def test_a_dtype_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="float8"):
        StatesWriter(tmp_path / "ref", targets=1, width=1, dtype="float8", identity={})
    assert not (tmp_path / "ref").exists()


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_fills_while_writing_is_one_line_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = random_rows(30, 4, "float32")
    writer = writer_for(tmp_path / "ref", rows, "float32")
    writer.write(0, rows[:10])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full_disk)
        with pytest.raises(RunError, match="is full"):
            writer.write(10, rows[10:])
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(RunError, match="is full"):
            write_small_head(writer)
    assert sorted(p.name for p in (tmp_path / "ref").iterdir() if "head" in p.name) == []
    writer.close()
    again = writer_for(tmp_path / "ref", rows, "float32")
    assert again.present.tolist() == [True] * 10 + [False] * 20


# ── verified ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def flip_last(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("name", [shard_name(1), shard_name(4), HEAD])
@pytest.mark.parametrize(
    ("damage", "reason", "always"),
    [
        (lambda p: os.truncate(p, p.stat().st_size - 1), "has .* bytes instead of", True),
        (lambda p: p.write_bytes(p.read_bytes() + b"\0"), "has .* bytes instead of", True),
        (lambda p: p.rename(p.with_name("renamed")), "is missing", True),
        (flip_last, "was changed", False),
    ],
)
def test_a_damaged_file_is_named_and_refused(
    tmp_path: Path, name: str, damage: Callable[[Path], object], reason: str, always: bool
) -> None:
    make(tmp_path / "ref", random_rows(33, 4, "float32"), "float32")
    damage(tmp_path / "ref" / name)
    line = refused(tmp_path / "ref")
    assert re.search(f"{name} {reason}", line)
    assert "scoremode reference MODEL" in line
    if always:
        assert re.search(f"{name} {reason}", refused(tmp_path / "ref", verify=False))


def test_a_file_cut_while_the_reference_is_open_is_one_line_and_no_crash(tmp_path: Path) -> None:
    reference = make(tmp_path / "ref", random_rows(33, 4, "float32"), "float32")
    os.truncate(tmp_path / "ref" / shard_name(2), DATA_START)
    with pytest.raises(RunError, match=rf"{shard_name(2)} was truncated"):
        reference.rows(0, 33)
    (tmp_path / "ref" / shard_name(2)).unlink()
    with pytest.raises(RunError, match=rf"{shard_name(2)} cannot be read"):
        reference.rows(0, 33)


def put(*place: Any) -> Callable[[dict[str, Any]], None]:
    """Set the value at the path given by all but the last of ``place``."""

    def change(stored: Any) -> None:
        for step in place[:-2]:
            stored = stored[step]
        stored[place[-2]] = place[-1]

    return change


HOSTILE: list[Callable[[dict[str, Any]], object]] = [
    put("shards", 0, "file", "../x"),
    put("shards", []),
    put("head", "file", "/dev/zero"),
    put("head", "scale", float("nan")),
    put("targets", 10**30),
    put("width", 5),
    put("rows_per_shard", 0),
    put("format", 1),
    lambda stored: stored.pop("plan_digest"),
]


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "ref"
    make(folder, random_rows(33, 4, "float32"), "float32")
    return folder


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_manifest_is_refused(made_once: Path, tmp_path: Path, number: int) -> None:
    shutil.copytree(made_once, tmp_path / "ref")
    path = tmp_path / "ref" / REFERENCE
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored))
    Reference.open(tmp_path / "ref", verify=False)  # unchanged, it opens
    HOSTILE[number](stored)
    for seal in (dict, sealed):  # changed by accident, and on purpose with a recomputed seal
        path.write_text(json.dumps(seal(stored)))
        assert str(tmp_path / "ref") in refused(tmp_path / "ref", verify=False)


def test_a_folder_that_is_no_reference_is_refused(tmp_path: Path) -> None:
    assert "is not a reference" in refused(tmp_path)
    assert "is not a reference" in refused(tmp_path / "absent")


# ── sizes ──────────────────────────────────────────────────────────────────────────────────
def test_the_estimate_is_what_the_files_take(tmp_path: Path) -> None:
    rows = random_rows(500, 64, "float16")
    writer = writer_for(tmp_path / "ref", rows, "float16", rows_per_shard=200)
    writer.write(0, rows)
    writer.write_head(random_rows(300, 64, "float16"), None, scale=1.0, softcap=None, vocabulary=300)
    writer.finish(MANIFEST)
    files = {p.name: p.stat().st_size - DATA_START for p in (tmp_path / "ref").glob("*.safetensors")}
    head = files.pop(HEAD)
    estimate = estimate_bytes(500, 64, "float16", 300)
    assert estimate == {
        "states": sum(files.values()),
        "head": head,
        "total": sum(files.values()) + head,
        "logits_fp16": 500 * 300 * 2,
    }
