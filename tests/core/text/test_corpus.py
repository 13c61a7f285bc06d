"""Corpora: their rows, that each pass gives the same rows, and every text that is refused."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoremode.core import extensions
from scoremode.core.installation import pip_install
from scoremode.core.text.corpus import Corpus, CorpusKind, load
from scoremode.core.text.files import Row
from scoremode.errors import CorpusError, OptionError
from tests.memory import measured_alone, peak_of

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write(path: Path, data: str | bytes) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def write_jsonl(path: Path, *rows: Any) -> str:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path: Path, **columns: list[Any]) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def rows(corpus: Corpus) -> list[Row]:
    return list(corpus.rows())


def complaint(*args: Any, **kwargs: Any) -> str:
    """The error with which ``load`` refuses a text; it must say what to type next."""
    with pytest.raises(CorpusError) as caught:
        load(*args, **kwargs)
    assert caught.value.fix
    return str(caught.value)


# ── plain text ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.raw", "a"])
def test_a_plain_file_is_one_document_verbatim(tmp_path: Path, name: str) -> None:
    """Its sha256 is that of its bytes, so that anyone can check it with sha256sum."""
    text = "\ufeff  naïve\r\ntwo\n\n\tthree \n"
    corpus = load(write(tmp_path / name, text))
    assert (corpus.layout, rows(corpus), corpus.byte_count) == ("text", [text], len(text.encode()))
    assert corpus.sha256 == load(text=text).sha256 == hashlib.sha256(text.encode()).hexdigest()


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_comes_back_as_it_was_given(text: str) -> None:
    assert rows(load(text=text)) == [text]


@pytest.mark.parametrize(
    ("text", "count", "wanted"),
    [
        ("one\r\n\ntwo\nthree\n", 3, "one\r\n\ntwo\n"),
        ("a\x0cb\u2028c\x85d\ne\n", 1, "a\x0cb\u2028c\x85d\n"),  # str.splitlines would split these, too
        ("one\ntwo", 99, "one\ntwo"),
    ],
)
def test_num_samples_of_a_plain_text_takes_its_first_lines(text: str, count: int, wanted: str) -> None:
    corpus = load(text=text, num_samples=count)
    assert (rows(corpus), corpus.sha256) == ([wanted], load(text=wanted).sha256)


def test_standard_input_is_read_once_and_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO("from a pipé\n".encode())))
    corpus = load("-")
    assert rows(corpus) == rows(corpus) == ["from a pipé\n"]


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
ROWS: list[tuple[str, dict[str, Any], list[Any]]] = [  # a file's rows, arguments, and the texts
    ('{"text": "one", "id": 1}\n{"text": "two"}\n', {}, ["one", "two"]),
    ('{"text": "one"}\n\n  \n{"text": "two"}', {}, ["one", "two"]),
    ('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n', {"num_samples": 2}, ["one", "two"]),
    ('{"text": "no", "body": "yes"}\n', {"field": "body"}, ["yes"]),
    (json.dumps({"messages": CHAT}), {}, [CHAT]),
    (json.dumps({"conversation": CHAT}), {"field": "conversation"}, [CHAT]),
]


@pytest.mark.parametrize(("lines", "how", "wanted"), ROWS)
def test_each_row_is_a_document_or_a_conversation(
    tmp_path: Path, lines: str, how: dict[str, Any], wanted: list[Any]
) -> None:
    corpus = load(write(tmp_path / "a.jsonl", lines), **how)
    assert rows(corpus) == rows(corpus) == wanted  # as often as they are read
    assert (corpus.layout, corpus.row_count) == ("documents" if isinstance(wanted[0], str) else "chat", len(wanted))
    found = [json.loads(line) for line in lines.splitlines() if line.strip()]
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in found] for name in found[0]}
    assert rows(load(write_parquet(tmp_path / "a.parquet", **columns), **how)) == wanted


def test_the_same_rows_have_one_sha256_in_jsonl_and_parquet(tmp_path: Path) -> None:
    a = load(write_jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": "twó"}))
    b = load(write_parquet(tmp_path / "b.parquet", text=["one", "twó"]))
    assert a.sha256 == b.sha256


def test_where_rows_are_cut_changes_the_sha256(tmp_path: Path) -> None:
    a = load(write_jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"}))
    b = load(write_jsonl(tmp_path / "b.jsonl", {"text": "onet"}, {"text": "wo"}))
    assert a.sha256 != b.sha256


def test_several_files_are_documents_in_the_order_given(tmp_path: Path) -> None:
    files = [write(tmp_path / "b.txt", "bee"), write_jsonl(tmp_path / "a.jsonl", {"text": "ay"})]
    corpus = load(files)
    assert (corpus.layout, corpus.name, rows(corpus)) == ("documents", "b.txt+a.jsonl", ["bee", "ay"])


# ── named corpora ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_python_docs_are_the_topics_of_pydoc_in_a_fixed_order() -> None:
    from pydoc_data.topics import topics

    corpus = load("python-docs")
    assert (corpus.layout, rows(corpus)) == ("documents", [topics[name] for name in sorted(topics)])
    assert rows(load("python-docs-short")) == [topics[name][:1000] for name in sorted(topics)[:20]]


def test_wikitext2_from_a_file_has_the_rows_of_the_hub(tmp_path: Path) -> None:
    """A row is a line with its newline; the file's blank line " \\n" is an empty row on the hub."""
    corpus = load("wikitext2:" + write(tmp_path / "wiki.test.raw", " \n = Title = \n \n Some text . \n"))
    assert (corpus.layout, rows(corpus)) == ("lines", ["", " = Title = \n", "", " Some text . \n"])


def test_the_real_file_gives_the_rows_that_the_hub_publishes(wikitext_file: Path) -> None:
    """One for each line (``wc -l``), and an empty one for each line of a space (``grep -c '^ $'``)."""
    found = rows(load(f"wikitext2:{wikitext_file}"))
    assert (len(found), sum(1 for row in found if not row)) == (206, 79)


def test_the_rows_give_the_file_back_to_the_byte(wikitext_file: Path) -> None:
    corpus = load(f"wikitext2:{wikitext_file}")
    assert "".join(row or " \n" for row in corpus.texts()).encode() == wikitext_file.read_bytes()


def test_num_samples_of_wikitext2_takes_rows(wikitext_file: Path) -> None:
    assert rows(load(f"wikitext2:{wikitext_file}", num_samples=3)) == ["", " = Robert Boulter = \n", ""]


def test_a_local_parquet_of_wikitext2_equals_the_raw_file(tmp_path: Path) -> None:
    raw = load("wikitext2:" + write(tmp_path / "wiki.test.raw", " \n = Title = \n"))
    parquet = load("wikitext2:" + write_parquet(tmp_path / "test.parquet", text=["", " = Title = \n"]))
    assert (raw.sha256, raw.layout) == (parquet.sha256, parquet.layout)


def test_wikitext2_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "test.parquet", text=["", " = Title = \n"])
    asked: list[tuple[Any, ...]] = []

    def download(*args: Any, **kwargs: Any) -> str:
        asked.append((*args, kwargs["repo_type"]))
        return path

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert rows(load("wikitext2")) == ["", " = Title = \n"]
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1/test-00000-of-00001.parquet", "dataset")]


class Datasets(types.ModuleType):
    """The package ``datasets`` with one dataset in it."""

    def __init__(self, table: list[dict[str, Any]]) -> None:
        super().__init__("datasets")
        self.asked: list[tuple[str, str | None, str]] = []
        self.table = table

    def load_dataset(self, name: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
        self.asked.append((name, config, split))
        if split not in ("test", "train"):
            raise ValueError(f'Unknown split "{split}".\nMore lines.')
        return self.table


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Datasets:
    package = Datasets([{"text": "one", "body": "eins"}, {"text": "two", "body": "zwei"}])
    monkeypatch.setitem(sys.modules, "datasets", package)
    monkeypatch.setattr("scoremode.core.hub.hub_is_reachable", lambda: True)
    return package


def test_a_dataset_is_a_document_a_row(hub: Datasets) -> None:
    corpus = load(dataset="some/set")
    assert (corpus.layout, corpus.name, rows(corpus)) == ("documents", "some/set:test", ["one", "two"])
    chosen = load(dataset="some/set", dataset_config="small", split="train", field="body", num_samples=1)
    assert rows(chosen) == ["eins"]
    assert hub.asked == [("some/set", None, "test"), ("some/set", "small", "train")]


def test_a_dataset_that_cannot_be_loaded_gives_its_reason_on_one_line(hub: Datasets) -> None:
    line = complaint(dataset="some/set", split="dev")
    assert 'Unknown split "dev"' in line
    assert "\n" not in line


def test_without_the_package_datasets_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert pip_install("datasets") in complaint(dataset="some/set")


@pytest.mark.parametrize("flags", [{"dataset_config": "small"}, {"split": "train"}])
def test_settings_of_a_dataset_are_refused_where_there_is_none(flags: dict[str, str]) -> None:
    """If it were ignored, ``--corpus wikitext2 --split validation`` would give the result of another text."""
    assert "--dataset" in complaint(text="one two", **flags)


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_no_text_at_all_is_refused() -> None:
    assert "--corpus" in complaint()


def test_rows_that_are_all_empty_are_refused(tmp_path: Path) -> None:
    assert "contains no text" in complaint(write_jsonl(tmp_path / "a.jsonl", {"text": ""}, {"text": ""}))


def test_wikitext2_that_is_not_utf_8_says_where(tmp_path: Path) -> None:
    assert "offset 2, line 2" in complaint("wikitext2:" + write(tmp_path / "wiki.raw", b"a\n\xff"))


def test_standard_input_that_is_not_utf_8_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(b"ab\xff")))
    assert "standard input is not UTF-8: byte 0xff at offset 2" in complaint("-")


def test_a_chosen_field_that_is_missing_says_in_which_line(tmp_path: Path) -> None:
    line = complaint(write_jsonl(tmp_path / "a.jsonl", {"body": "x"}, {"text": "y"}), field="body")
    assert "line 2 has no field 'body'" in line


def test_a_parquet_file_damaged_inside_is_refused(tmp_path: Path) -> None:
    """Its footer is intact, so only reading the rows can detect it."""
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [f"row {i}" for i in range(1000)]}), path, compression="zstd", use_dictionary=False
    )
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = b"\xff" * (len(data) // 2 - 4)
    path.write_bytes(data)
    assert "a.parquet" in complaint(str(path))


def test_a_parquet_column_that_is_missing_names_those_there_are(tmp_path: Path) -> None:
    line = complaint(write_parquet(tmp_path / "a.parquet", id=[1], body=["x"]), field="txt")
    assert "no column 'txt'" in line
    assert "(id, body)" in line


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def peak_bytes(spec: str) -> list[int]:
    load(spec)  # imports what it needs
    return [peak_of(lambda: load(spec))]


def test_a_long_file_is_not_held_three_times(tmp_path: Path) -> None:
    size = 8 << 20
    path = write(tmp_path / "a.txt", b"some text\n" * (size // 10))
    assert measured_alone(peak_bytes, path)[0] < 2.2 * size


def test_a_jsonl_file_is_streamed(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    path = write(tmp_path / "a.jsonl", line * 8000)
    assert measured_alone(peak_bytes, path)[0] < 1 << 20


# ── several texts ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_num_samples_that_end_before_a_text_are_refused(tmp_path: Path) -> None:
    """The corpus would still be called "a.jsonl+b.txt"."""
    files = [write_jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"}), write(tmp_path / "b.txt", "three")]
    assert rows(load(files, num_samples=3)) == rows(load(files, num_samples=99)) == ["one", "two", "three"]
    assert "--num-samples 2 leaves no rows of b.txt" in complaint(files, num_samples=2)


def test_an_empty_text_among_several_is_refused(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.txt", "one"), write_jsonl(tmp_path / "b.jsonl", {"text": ""})]
    assert "b.jsonl contains no text" in complaint(files)


def test_chats_do_not_mix_with_other_texts(tmp_path: Path) -> None:
    chats = write_jsonl(tmp_path / "b.jsonl", {"messages": CHAT})
    wiki = "wikitext2:" + write(tmp_path / "wiki.test.raw", " = Title = \n")
    for other in (wiki, "python-docs", write(tmp_path / "a.txt", "text")):
        assert "together" in complaint([other, chats])


def test_several_chat_files_are_one_chat(tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / f"{n}.jsonl", {"messages": CHAT}) for n in "ab"]
    assert (load(files).layout, load(files).row_count) == ("chat", 2)


def test_python_docs_with_a_file_are_documents(tmp_path: Path) -> None:
    both = load(["python-docs", write(tmp_path / "a.txt", "one")])
    assert (both.layout, both.row_count) == ("documents", load("python-docs").row_count + 1)


def test_the_sha256_of_several_files_is_of_their_rows(tmp_path: Path) -> None:
    several = load([write(tmp_path / "a.txt", "one"), write(tmp_path / "b.txt", "two")])
    assert several.sha256 == load(write_jsonl(tmp_path / "c.jsonl", {"text": "one"}, {"text": "two"})).sha256


def test_the_hub_client_is_as_loud_afterwards_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another program may use scoremode as a library and choose its own verbosity."""
    from huggingface_hub.utils import logging

    path, seen = write_parquet(tmp_path / "test.parquet", text=["x"]), []

    def download(*_: Any, **__: Any) -> str:
        seen.append(logging.get_verbosity())
        return path

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        load("wikitext2")
        assert (seen, logging.get_verbosity()) == ([logging.ERROR], logging.INFO)
    finally:
        logging.set_verbosity(before)


class Words:
    """A corpus that a wing could bring: the words of its name."""

    def __init__(self, name: str) -> None:
        self.words = name.split("-")

    def as_corpus(self, count: int | None = None) -> Corpus:
        kept = self.words[:count]
        return Corpus("words", "documents", lambda: iter(kept), "0" * 64, len(kept), sum(map(len, kept)))


def test_a_wing_brings_a_kind_of_corpus_and_takes_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prefix and its objects are read while the wing is there; without it, the prefix is a file that is missing."""
    kind = CorpusKind("words:", Words, lambda name: None, Words)
    monkeypatch.setattr(extensions, "offered", lambda asked: [kind] if asked == "corpus" else [])
    assert list(load("words:a-b-c", num_samples=2).rows()) == list(load(Words("a-b")).rows()) == ["a", "b"]
    with pytest.raises(CorpusError, match="--field does not apply to words"):
        load(Words("a"), field="x")
    with pytest.raises(OptionError, match="--text"):
        load(Words("a"), text="x")
    with pytest.raises(CorpusError, match="words were given together with other texts"):
        load(["words:a", "python-docs"])
    monkeypatch.setattr(extensions, "offered", lambda asked: [])
    with pytest.raises(CorpusError, match="words:a"):
        load("words:a")
