"""Texts and models that cannot be used: one clear line each, exit code 2, nothing on standard output.

Each table is (what is wrong, how the file is made, words that the line must have).
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scoremode.core.text.corpus import load
from scoremode.errors import CorpusError
from tests import forked
from tests.cli.test_main import PROGRAM, run
from tests.command_line import Command, Refused

USER = {"role": "user", "content": "Hi"}
DEEP = "[" * 100_000
TEXT = '{"text": "one two"}\n'


def chat(*messages: Any) -> str:
    return json.dumps({"messages": messages}) + "\n"


# (what is wrong, file name, its bytes, words expected)
PLAIN_FILES: list[tuple[str, str, bytes, str]] = [
    ("empty rows", "a.jsonl", b"", "a.jsonl is empty"),
    ("empty table", "a.parquet", b"", "a.parquet is empty"),
    ("only blank lines", "a.jsonl", b"\n \n\n", "contains no rows"),
    ("latin-1", "a.txt", b"caf\xe9", "not UTF-8: byte 0xe9 at offset 3, line 1"),
    ("cut inside a character", "a.txt", "naïve".encode()[:3], "not UTF-8"),
    ("NUL byte", "a.txt", b"one\ntwo\0three", "NUL byte at offset 7, line 2"),
    ("UTF-16 with a mark", "a.txt", "one two".encode("utf-16"), "not UTF-8"),
    ("UTF-16 without a mark", "a.txt", "one two".encode("utf-16-le"), "it is UTF-16"),
    ("UTF-16 rows", "a.jsonl", TEXT.encode("utf-16"), "line 1 is not JSON (not UTF-8)"),
    ("gzip as text", "a.txt", gzip.compress(b"one two"), "compressed (gzip); unpack it first"),
    ("gzip as rows", "a.jsonl", gzip.compress(TEXT.encode()), "compressed (gzip)"),
    ("zip as rows", "a.jsonl", b"PK\x03\x04rest", "compressed (zip)"),
    ("deep nesting", "a.jsonl", ('{"text": ' + DEEP).encode(), "line 1 is not JSON (nested too deeply)"),
    ("deep and whole", "a.jsonl", f'{TEXT}{{"x": {"[" * 300}{"]" * 300}}}'.encode(), "line 2 is not JSON (nested"),
    ("half a surrogate pair", "a.jsonl", b'{"text": "\\ud800"}', "line 1 is not UTF-8"),
    ("half a pair in a chat", "a.jsonl", b'{"messages": [{"role": "user", "content": "\\udc00"}]}', "not UTF-8"),
    ("a list for a row", "a.jsonl", b"[1, 2]", "line 1 is not a JSON object"),
    ("a number with 5,000 digits", "a.jsonl", b'{"text": ' + b"9" * 5000 + b"}", "line 1 is not JSON"),
    ("not Parquet", "a.parquet", b"PAR1 and nothing more", "not a Parquet file"),
    (
        "rows of a number",
        "a.jsonl",
        b'{"text": 5}',
        "is not text or a conversation (Expected `str | array`, got `int`)",
    ),
    ("rows of null", "a.jsonl", b'{"text": null}', "got `null`"),
    ("no text field", "a.jsonl", b'{"body": "x"}', "choose one with --field (body)"),
    ("no field at all", "a.jsonl", b"{}", "no field 'text'; use rows like"),
    ("text, then a chat", "a.jsonl", (TEXT + chat(USER)).encode(), "row 2 is not text as the first is"),
    ("a chat, then text", "a.jsonl", (chat(USER) + TEXT).encode(), "row 2 is not a list of messages"),
]

# (what is wrong, the messages of a row, words expected)
CHATS: list[tuple[str, list[Any], str]] = [
    ("no messages", [], "an empty list of messages"),
    ("text for a message", ["Hi"], "got `str` - at `$[0]`"),
    ("null for a message", [USER, None], "got `null` - at `$[1]`"),
    ("no content", [USER, {"role": "assistant"}], "required field `content` - at `$[1]`"),
    ("no role", [{"content": "Hi"}], "required field `role` - at `$[0]`"),
    ("number as role", [{"role": 5, "content": "Hi"}], "got `int` - at `$[0].role`"),
    ("empty role", [{"role": " ", "content": "Hi"}], "at `$[0].role`"),
]


@pytest.mark.parametrize(("name", "data", "words"), [c[1:] for c in PLAIN_FILES], ids=[c[0] for c in PLAIN_FILES])
def test_a_file_that_is_no_text(refused: Refused, tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert words in refused("plan", "table:uniform", "--corpus", tmp_path / name)


@pytest.mark.parametrize(("messages", "words"), [c[1:] for c in CHATS], ids=[c[0] for c in CHATS])
def test_a_chat_that_a_template_would_print_wrongly(
    refused: Refused, tmp_path: Path, messages: list[Any], words: str
) -> None:
    (tmp_path / "a.jsonl").write_text(chat(USER) + chat(*messages))
    line = refused("plan", "table:uniform", "--corpus", tmp_path / "a.jsonl")
    assert (words in line, "line 2" in line) == (True, True), line


# ── Parquet ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def bad_utf_8() -> pa.Table:
    """A column that says it is text and holds bytes that are not, as a careless writer leaves it."""
    data = pa.array([b"fine", b"ab\xff"], pa.binary())
    return pa.Table.from_arrays([pa.Array.from_buffers(pa.string(), 2, data.buffers())], names=["text"])


# (what is wrong, the table, more arguments, words expected)
TABLES: list[tuple[str, Callable[[], pa.Table], list[str], str]] = [
    ("bad UTF-8", bad_utf_8, [], "row 2 is not UTF-8 ('utf-8' codec can't decode byte 0xff in position 2"),
    ("no rows", lambda: pa.table({"text": pa.array([], pa.string())}), [], "contains no rows"),
    ("no columns", lambda: pa.table({}), [], "no field 'text'"),
    ("numbers", lambda: pa.table({"text": [1, 2]}), [], "field 'text' is not text"),
    ("numbers chosen", lambda: pa.table({"text": ["a"], "n": [1]}), ["--field", "n"], "field 'n' is not text"),
    ("nested column", lambda: pa.table({"text": [{"a": "x"}]}), [], "got `object`"),
    ("nested field", lambda: pa.table({"text": [{"a": "x"}]}), ["--field", "text.a"], "no column 'text.a'"),
    ("bytes", lambda: pa.table({"text": [b"x"]}), [], "got `bytes`"),
    ("null", lambda: pa.table({"text": ["one", None]}), [], "row 2: field 'text' is not text"),
    (
        "two columns of one name",
        lambda: pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]),
        [],
        "more than one column 'text'",
    ),
    (
        "chat without content",
        lambda: pa.table({"messages": [[{"role": "user", "content": None}]]}),
        [],
        "content of message 1 is null",
    ),
    (
        "dates in a chat",
        lambda: pa.table({"messages": [[{**USER, "at": pa.scalar(0, pa.timestamp("s")).as_py()}]]}),
        [],
        "is not a conversation",
    ),
]


@pytest.mark.parametrize(("table", "more", "words"), [c[1:] for c in TABLES], ids=[c[0] for c in TABLES])
def test_a_parquet_file_that_is_no_text(
    refused: Refused, tmp_path: Path, table: Callable[[], pa.Table], more: list[str], words: str
) -> None:
    pq.write_table(table(), tmp_path / "a.parquet")
    assert words in refused("plan", "table:uniform", "--corpus", tmp_path / "a.parquet", *more)


@pytest.mark.parametrize("keep", [8, 0.5, -20])
def test_a_parquet_file_cut_short(refused: Refused, tmp_path: Path, keep: float) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one two"] * 500}), file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    assert "a.parquet" in refused("plan", "table:uniform", "--corpus", file)


# ── what is not a file ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "contains no text; put files there"),
        (os.mkfifo, "cannot be read (it is not a plain file); name a plain file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.symlink_to(path.parent / "nowhere"), "there is no corpus or file"),
        (lambda _: None, "there is no corpus or file"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_what_is_not_a_file(
    refused: Refused, tmp_path: Path, make: Callable[[Path], None], words: str, name: str
) -> None:
    make(tmp_path / name)
    assert words in refused("plan", "table:uniform", "--corpus", tmp_path / name)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/random"])
def test_a_device_is_not_read(refused: Refused, device: str) -> None:
    assert "it is not a plain file" in refused("plan", "table:uniform", "--corpus", device)


def test_a_name_that_is_too_long(refused: Refused) -> None:
    assert "cannot be read (File name too long)" in refused("plan", "table:uniform", "--corpus", "x" * 5000)


def test_a_file_that_may_not_be_read(refused: Refused, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one two")
    file.chmod(0)
    if os.geteuid():
        assert "cannot be read" in refused("plan", "table:uniform", "--corpus", file)
        return
    os.seteuid(65534)  # root may read everything, so it becomes somebody else for a moment
    try:
        line = refused("plan", "table:uniform", "--corpus", file)
    finally:
        os.seteuid(0)
    assert "cannot be read" in line


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    """Hashed in one pass and cut into tokens in the next: the sha256 would belong to another text."""
    (tmp_path / "a.txt").write_text("one two")
    corpus = load(str(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_text("one two three")
    with pytest.raises(CorpusError, match=r"a\.txt was changed while it was read; run the same command again"):
        list(corpus.rows())


# ── standard input ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("verb", ["plan", "ppl"])
def test_a_closed_standard_input(verb: str) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" <&-', "sh", *PROGRAM, verb, "table:uniform", "--corpus", "-"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "standard input is closed; pipe a text into it" in done.stderr


def test_standard_input_that_is_not_open_for_reading(tmp_path: Path) -> None:
    with (tmp_path / "a.txt").open("w") as only_written:
        done = run("plan", "table:uniform", "--corpus", "-", stdin=only_written)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "standard input cannot be read" in done.stderr


# ── what is unusual and right ────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("name", "data", "count"),
    [
        ("crlf.txt", b"one\r\ntwo\r\n", 10),
        ("crlf.jsonl", b'{"text": "one"}\r\n{"text": "two"}\r\n', 6),
        ("mark.jsonl", b'\xef\xbb\xbf{"text": "one two"}\n', 7),
        ("nan.jsonl", b'{"text": "one two", "score": NaN}\n', 7),
        ("long.jsonl", b'{"text": "' + b"word " * 400_000 + b'"}', 2_000_000),
        ("nul.jsonl", b'{"text": "a\\u0000b"}\n', 3),
    ],
)
def test_unusual_files_are_read(command: Command, tmp_path: Path, name: str, data: bytes, count: int) -> None:
    (tmp_path / name).write_bytes(data)
    made = command("plan", "table:uniform", "--corpus", tmp_path / name, "--json").json
    assert (made["tokens"], made["notes"]) == (count, [])


def test_a_byte_order_mark_of_a_text_is_scored_and_said(command: Command, tmp_path: Path) -> None:
    """A plain text is verbatim, so that its sha256 is that of the file; bytes that nobody sees are worth a note."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    made = command("plan", "table:uniform", "--corpus", tmp_path / "a.txt", "--json").json
    assert made["tokens"] == 6
    assert made["notes"] == ["a.txt begins with a byte order mark, which is scored as part of the text"]


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A model that a test may damage."""
    return shutil.copytree(tiny, tmp_path / "model")


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_config_that_python_wrote_may_hold_infinity(command: Command, copy: Path) -> None:
    """Models with state spaces have ``time_step_limit: [0.0, Infinity]``."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "time_step_limit": [0.0, float("inf")]}))
    assert command("plan", copy, "--text", "one two", "--json").code == 0


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def limited(gigabytes: float, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command under ``ulimit -v``: what this process maps already, and so much more."""
    code = (
        "import resource, sys\nfrom transformers import AutoTokenizer\n"
        "mapped = int(next(l for l in open('/proc/self/status') if l.startswith('VmSize')).split()[1]) * 1024\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (mapped + int({gigabytes} * 1e9),) * 2)\n"
        "from scoremode.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    return forked.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(resource, "RLIMIT_AS"), reason="needs Linux")
def test_a_long_text_is_cut_into_tokens_in_little_memory(tiny: Path, tmp_path: Path) -> None:
    """In 0.7 GB beyond the imports 4 MB were too much once: all tokens were made at a time."""
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog, and 12345 more.\n" * 70_000)
    done = limited(0.7, "plan", tiny, "--corpus", tmp_path / "a.txt")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(resource, "RLIMIT_AS"), reason="needs Linux")
def test_a_prompt_too_large_for_the_tokenizer_is_refused_before_it_is_cut(tiny: Path, tmp_path: Path) -> None:
    """The tokenizer's library aborts the process when memory runs out: nothing could be said then."""
    prompt = "The quick brown fox jumps over the lazy dog, and 12345 more. " * 70_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": prompt, "target": " yes"}) + "\n")
    done = limited(0.7, "prob", tiny, "--file", tmp_path / "a.jsonl")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "splitting a text of 4 MB into tokens needs about" in done.stderr
