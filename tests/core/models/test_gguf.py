"""Headers of GGUF files: right numbers from good ones, one line from any other."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from scoremode.core.models.gguf import find_files, gguf_models, read_gguf
from scoremode.errors import ModelError
from tests.gguf_files import add_tensor, finish, gguf_of

MAGIC = b"GGUF"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(
    *,
    magic: bytes = MAGIC,
    version: int = 3,
    tensors: int = 1,
    keys: int = 1,
    key: bytes = text("general.architecture") + struct.pack("<I", 8) + text("llama"),
    tensor: bytes = text("output.weight") + struct.pack("<IQQIQ", 2, 4, 2, 0, 0),
    data: bytes = bytes(64),
) -> bytes:
    """A file of one key and one tensor of 2 × 4 float32."""
    start = magic + struct.pack("<IQQ", version, tensors, keys) + key + tensor
    return start + bytes(-len(start) % 32) + data


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ModelError) as found:
        read_gguf(str(path))
    line = str(found.value)
    assert "\n" not in line
    return line


def test_the_header_that_the_damaged_ones_are_made_of_is_good(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(header())
    found = read_gguf(str(path))
    assert (found.architecture, found.types, found.sizes.bytes) == ("llama", {"F32": 8}, 32)


LONG = struct.pack("<Q", 1 << 60)
KEY = text("a.key")
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "magic": ({"magic": b"GGML"}, "does not begin with GGUF"),
    "version 0": ({"version": 0}, "is not a whole GGUF"),
    "version 1": ({"version": 1}, "version 1 is not known"),
    "version 4": ({"version": 4}, "version 4 is not known"),
    "big-endian": ({"version": 3 << 24}, "big-endian"),
    "tensors 2^60": ({"tensors": 1 << 60}, "counts more entries than fit"),
    "keys 2^60": ({"keys": 1 << 60}, "counts more entries than fit"),
    "no tensors": ({"tensors": 0, "tensor": b""}, "contains no weights"),
    "one tensor too many": ({"tensors": 3}, "is not a whole GGUF"),
    "key name 2^60": ({"key": LONG}, "larger than the file"),
    "text 2^60": ({"key": KEY + struct.pack("<I", 8) + LONG}, "larger than the file"),
    "array 2^60": ({"key": KEY + struct.pack("<II", 9, 4) + LONG}, "larger than the file"),
    "array of texts too long": ({"key": KEY + struct.pack("<IIQ", 9, 8, 65)}, "is not a whole GGUF|longer than"),
    "array of numbers too long": ({"key": KEY + struct.pack("<IIQ", 9, 10, 100)}, "longer than the file"),
    "array of arrays": ({"key": KEY + struct.pack("<IIQ", 9, 9, 1)}, "arrays of arrays"),
    "unknown kind of value": ({"key": KEY + struct.pack("<I", 77)}, "is not a whole GGUF"),
    "alignment 0": ({"key": text("general.alignment") + struct.pack("<II", 4, 0)}, "alignment"),
    "alignment 2^31": ({"key": text("general.alignment") + struct.pack("<II", 4, 1 << 31)}, "alignment"),
    "alignment text": ({"key": text("general.alignment") + struct.pack("<I", 8) + text("x")}, "alignment"),
    "type unknown": ({"tensor": text("x") + struct.pack("<IQQIQ", 2, 4, 2, 999, 0)}, "type 999"),
    "axes": ({"tensor": text("x") + struct.pack("<I", 1 << 31)}, "too many axes"),
    "half a block": ({"tensor": text("x") + struct.pack("<IQQIQ", 2, 4, 2, 2, 0)}, "size of tensor x"),
    "2^120 weights": ({"tensor": text("x") + struct.pack("<IQQIQ", 2, 1 << 60, 1 << 60, 0, 0)}, "size of tensor x"),
    "offset": ({"tensor": text("x") + struct.pack("<IQQIQ", 2, 4, 2, 0, 1 << 62)}, "ends after the file"),
    "duplicate": ({"tensors": 2, "tensor": 2 * (text("x") + struct.pack("<IQQIQ", 2, 4, 2, 0, 0))}, "tensor twice"),
    "no data": ({"data": b""}, "truncated"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_header_is_one_line(tmp_path: Path, name: str) -> None:
    changes, words = BAD[name]
    line = refused(tmp_path / "bad.gguf", header(**changes))
    assert any(choice in line for choice in words.split("|")), line


def test_a_file_cut_anywhere_is_one_line(tmp_path: Path, tiny: Path) -> None:
    whole = gguf_of(tiny, tmp_path / "whole.gguf").read_bytes()
    small = header()
    cuts = [small[:n] for n in range(len(small) - 32)] + [whole[:n] for n in range(0, len(whole), len(whole) // 37)]
    assert len(cuts) > 150
    for content in [*cuts, whole[:-1]]:
        assert "cut.gguf" in refused(tmp_path / "cut.gguf", content)


def test_noise_in_a_header_is_read_or_refused(tmp_path: Path) -> None:
    """Never another exception."""
    generator, good, read = np.random.default_rng(0), header(), 0
    for _ in range(400):
        content = bytearray(good)
        for at in generator.integers(4, len(good) - 64, 3):
            content[at] = generator.integers(256)
        (tmp_path / "noise.gguf").write_bytes(content)
        try:
            read_gguf(str(tmp_path / "noise.gguf"))
            read += 1
        except ModelError:
            continue
    assert 0 < read < 400


def test_facts_of_a_whole_file_are_those_of_the_gguf_package(tmp_path: Path, tiny: Path) -> None:
    path = gguf_of(tiny, tmp_path / "tiny.gguf", "F16")
    ours, theirs = read_gguf(str(path)), GGUFReader(path)
    assert {t.name: (t.type, t.weights, t.bytes) for t in ours.tensors} == {
        t.name: (t.tensor_type.name, int(t.n_elements), int(t.n_bytes)) for t in theirs.tensors
    }
    assert ours.values["llama.context_length"] == ours.number("context_length") == 128
    assert ours.vocabulary == 311
    assert ours.values["tokenizer.ggml.tokens"] is None
    parts = ours.sizes.parts
    assert {name: part.weights for name, part in parts.items()}["head"] == 311 * 48
    assert parts["embedding"].bits_per_weight == 16
    assert ours.sizes.bytes == sum(int(t.n_bytes) for t in theirs.tensors)
    assert ours.quantization == "F16"


@pytest.mark.parametrize(
    ("value", "number"), [(7, 7), (0, None), (-3, None), (True, None), ("128", None), (1.5, None), ([1, 2], None)]
)
def test_only_a_positive_whole_number_is_a_number(tmp_path: Path, value: Any, number: int | None) -> None:
    """And the type that a file says is its name only if it is known."""
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    add = {bool: writer.add_bool, int: writer.add_int32, str: writer.add_string, float: writer.add_float32}
    add.get(type(value), writer.add_array)("llama.context_length", value)
    writer.add_int32("general.file_type", {7: 15, 0: 999, -3: -1}.get(value, 0) if isinstance(value, int) else 0)
    add_tensor(writer, "output.weight", np.zeros((2, 4), np.float32), "F32")
    finish(writer)
    found = read_gguf(str(tmp_path / "x.gguf"))
    assert (found.number("context_length"), found.quantization) == (number, "Q4_K_M" if value == 7 else "F32")


# ── which files ──────────────────────────────────────────────────────────────────────────────────────────────────────
def parts_of(folder: Path, count: int, said: int | None = None) -> list[Path]:
    made = []
    for i in range(1, count + 1):
        path = folder / f"model-{i:05d}-of-{count:05d}.gguf"
        writer = GGUFWriter(path, "llama")
        if i == 1 and said is not None:
            writer.add_int32("split.tensors.count", said)
        add_tensor(writer, f"blk.{i}.attn_q.weight", np.zeros((2, 4), np.float32), "F32")
        finish(writer)
        made.append(path)
    return made


def test_the_parts_of_a_split_model_are_read_together(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, 3, said=3)
    for name in (parts[0], parts[2], tmp_path):
        found = read_gguf(str(name))
        assert found.files == tuple(parts)
        assert found.sizes.bytes == 96


def test_parts_that_are_missing_or_do_not_add_up_are_refused(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, 3, said=4)
    with pytest.raises(ModelError, match="have 3 tensors of 4"):
        read_gguf(str(tmp_path))
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003.gguf is missing"):
        read_gguf(str(parts[0]))
    shutil.copy(parts[0], tmp_path / "model-00009-of-00001.gguf")
    with pytest.raises(ModelError, match="is missing"):
        read_gguf(str(tmp_path / "model-00009-of-00001.gguf"))
    shutil.copy(parts[0], tmp_path / "x-00000-of-00000.gguf")
    with pytest.raises(ModelError, match="is missing"):
        read_gguf(str(tmp_path / "x-00000-of-00000.gguf"))


def test_a_folder_must_have_one_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no GGUF file"):
        find_files(str(tmp_path))
    (tmp_path / "mmproj-model.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="has no GGUF file"):
        find_files(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(header())
    with pytest.raises(ModelError, match=r"has 2 models \(a.gguf, b.gguf\); name one: .*a.gguf"):
        find_files(str(tmp_path))
    assert [path.name for path in gguf_models(tmp_path)] == ["a.gguf", "b.gguf"]
    with pytest.raises(ModelError, match="there is no file"):
        find_files(str(tmp_path / "c.gguf"))
    with pytest.raises(ModelError, match="there is no file"):
        find_files("a\0b.gguf")


def test_a_name_that_no_manifest_can_keep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "caf\udce9.gguf"
    path.write_bytes(header())
    with pytest.raises(ModelError, match="not UTF-8"):
        find_files(str(path))
