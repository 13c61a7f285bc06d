"""What comes from outside is read within limits: one line, quickly, whatever is in the file."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from scoremode.core.reading import LARGEST, numbered_lines, open_regular, read_file, read_text, require_plain_files
from scoremode.errors import CorpusError
from tests.house import needs_wing

HUGE = 1 << 38  # bytes of a sparse file, which takes no room on the disk
ROOM = 2 << 30  # bytes of addresses that the commands may take together, beside the libraries

ALONE = """
import contextlib, io, json, resource, sys
import numpy, pyarrow.parquet, tokenizers
from scoremode.cli.main import main
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + int(sys.argv[1]), resource.RLIM_INFINITY))
for words in map(json.loads, sys.argv[2:]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, out.getvalue(), said.getvalue()]))
assert "torch" not in sys.modules
"""


def sparse(path: Path, beginning: bytes = b"", size: int = HUGE) -> Path:
    with path.open("wb") as file:
        file.write(beginning)
        file.truncate(size)
    return path


@pytest.fixture
def model(tmp_path: Path, tiny: Path) -> Path:
    """A model's folder whose files are links, so that a test may replace one."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in tiny.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


@needs_wing("studies/records")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit a process's addresses")
def test_endless_files_are_refused_in_little_memory(tmp_path: Path) -> None:
    """In a process that may take 2 GiB more than its libraries."""
    gguf = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 8, HUGE // 8)
    files = {
        name: str(sparse(tmp_path / name, beginning))
        for name, beginning in {
            **dict.fromkeys(("a.txt", "a.jsonl", "a.parquet", "a.json", "samples_arc_2026-01-01T00-00-00.jsonl"), b""),
            **{"b.jsonl": b'{"text": "abc"}\n', "a.gguf": gguf},
        }.items()
    }
    cases = [
        (["ppl", "table:uniform", "--corpus", files["a.jsonl"]], "line 1 is longer than 256 MiB; give rows of JSON"),
        (["ppl", "table:uniform", "--corpus", files["b.jsonl"]], "line 2 is longer than 256 MiB"),
        (["prob", "table:uniform", "--file", files["a.jsonl"]], "of memory, and"),
        (["ppl", "table:uniform", "--corpus", files["a.txt"]], "of memory, and"),
        (["ppl", "table:uniform", "--corpus", f"wikitext2:{files['a.txt']}"], "of memory, and"),
        (["ppl", "table:uniform", "--corpus", "-"], "standard input contains a NUL byte at offset 0"),
        (["ppl", "table:uniform", "--corpus", files["a.parquet"]], "is not a Parquet file"),
        (["report", files["a.json"]], "is not a record (larger than 4 MiB)"),
        (["tasks", files["samples_arc_2026-01-01T00-00-00.jsonl"], str(tmp_path)], "of memory, and"),
        (["plan", files["a.gguf"], "--text", "abc"], "is not a whole GGUF file (a length is larger than the file)"),
    ]
    words = [json.dumps(words) for words, _ in cases]
    with Path("/dev/zero").open("rb") as zeros:
        command = [sys.executable, "-c", ALONE, str(ROOM), *words]
        done = subprocess.run(command, stdin=zeros, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases)
    for (command, says), (code, out, line) in zip(cases, answers, strict=True):
        assert (code, out, line.count("\n")) == (2, "", 1), (command, line)
        assert says in line, command


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_an_endless_file_of_a_model_is_refused(name: str, model: Path) -> None:
    (model / name).unlink(missing_ok=True)
    sparse(model / name)
    with pytest.raises(OSError, match=r"larger than 64 MiB"):
        require_plain_files(model)


def test_a_header_of_tensors_has_a_limit(tmp_path: Path) -> None:
    from scoremode.core.models.safetensors import read_header
    from scoremode.errors import ModelError

    with pytest.raises(ModelError, match="its header is larger than 64 MiB"):
        read_header(sparse(tmp_path / "a.safetensors", struct.pack("<Q", LARGEST + 1)))


def test_what_is_not_a_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    from scoremode.core.models.facts import inspect
    from scoremode.core.scores.parquet import is_column_file

    os.mkfifo(tmp_path / "a.safetensors")
    for path in (tmp_path / "a.safetensors", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match=r"not a plain file|directory"):
            open_regular(path)
        with pytest.raises(CorpusError, match="cannot be read"):
            next(numbered_lines(path))
        assert path.is_dir() or not is_column_file(path)
    with pytest.raises(OSError, match="not a plain file"):
        inspect(str(tmp_path))


def test_a_text_is_read_as_far_as_memory_holds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return b"a" * size

    monkeypatch.setattr("scoremode.core.free_memory.available", lambda: 30 << 20)
    with pytest.raises(CorpusError, match="reading standard input needs about 35 MB of memory, and 31 MB are free"):
        read_text(Endless(), "standard input")  # type: ignore[arg-type]
    assert read_text(io.BytesIO(b"ab" * (1 << 20)), "x") == b"ab" * (1 << 20)
    assert read_text(io.BytesIO(b"ab" * (1 << 19) + b"ab\0" + b"\xff" * (1 << 20)), "x")[-3:] == b"ab\0"
    (tmp_path / "a").write_bytes(b"x" * 10)
    assert read_file(tmp_path / "a", 10) == b"x" * 10
    with pytest.raises(ValueError, match="larger than 0 MiB"):
        read_file(tmp_path / "a", 9)
