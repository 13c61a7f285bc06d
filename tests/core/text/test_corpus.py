"""Corpora: their rows, that each pass gives the same rows, and every text that is refused."""

from __future__ import annotations

import hashlib
import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoremode.core import entry_points, extensions
from scoremode.core.installation import pip_install
from scoremode.core.models.facts import resolve
from scoremode.core.text.corpus import Corpus, load
from scoremode.core.text.files import Row
from scoremode.core.text.tokenizer import HuggingFaceTokenizer
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
def test_a_plain_file_is_one_document_verbatim_with_the_sha256_of_its_bytes(tmp_path: Path, name: str) -> None:
    text = "\ufeff  one\r\ntwo\n\n\tnaïve 東京 \n"
    corpus = load(write(tmp_path / name, text))
    assert (corpus.layout, rows(corpus), corpus.byte_count) == ("text", [text], len(text.encode()))
    assert corpus.sha256 == hashlib.sha256(text.encode()).hexdigest() == load(text=text).sha256
    assert corpus.notes == (f"{name} begins with a byte order mark, which is scored as part of the text",)
    assert load(text=text[1:]).notes == ()
    assert rows(load(write(tmp_path / name, text), num_samples=3)) == ["\ufeff  one\r\ntwo\n\n"]


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_comes_back_as_it_was_given(text: str) -> None:
    assert rows(load(text=text)) == [text]


def test_samples_of_a_text_are_its_lines_and_a_line_ends_at_a_newline_only() -> None:
    """str.splitlines would also split at form feeds and Unicode separators, which may occur inside a line."""
    assert rows(load(text="a\x0cb\u2028c\x85d\ne\n", num_samples=1)) == ["a\x0cb\u2028c\x85d\n"]
    assert rows(load(text="one\ntwo", num_samples=99)) == ["one\ntwo"]
    assert load(text="one\ntwo\n", num_samples=1).sha256 == load(text="one\n").sha256


def test_standard_input_is_read_once_and_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO("from a pipé\n".encode())))
    corpus = load("-")
    assert rows(corpus) == rows(corpus) == ["from a pipé\n"]


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_jsonl_and_parquet_are_a_document_a_row(tmp_path: Path) -> None:
    jsonl = load(write(tmp_path / "a.jsonl", '{"text": "one", "id": 1}\n\n  \n{"text": "tw\u00f3"}'))
    parquet = load(write_parquet(tmp_path / "a.parquet", id=[1, 2], text=["one", "twó"]))
    for corpus in (jsonl, parquet):
        assert (corpus.layout, corpus.row_count, rows(corpus)) == ("documents", 2, ["one", "twó"])
        assert rows(corpus) == ["one", "twó"], "read again"
    other = load(write_jsonl(tmp_path / "b.jsonl", {"text": "onet"}, {"text": "wó"}))
    assert jsonl.sha256 == parquet.sha256 != other.sha256


def test_another_field_and_the_first_rows_can_be_chosen(tmp_path: Path) -> None:
    many = write_jsonl(tmp_path / "a.jsonl", *({"text": "no", "body": str(i)} for i in range(5)))
    corpus = load(many, field="body", num_samples=2)
    assert (corpus.row_count, rows(corpus)) == (2, ["0", "1"])
    assert rows(load(write_parquet(tmp_path / "a.parquet", text=["no"], body=["yes"]), field="body")) == ["yes"]


def test_several_files_are_documents_in_the_order_given(tmp_path: Path) -> None:
    files = [write(tmp_path / "b.txt", "bee"), write_jsonl(tmp_path / "a.jsonl", {"text": "ay"})]
    corpus = load(files)
    assert (corpus.layout, corpus.name, rows(corpus)) == ("documents", "b.txt+a.jsonl", ["bee", "ay"])


def test_rows_of_messages_are_a_chat_under_any_name(tmp_path: Path) -> None:
    chats = [
        load(write_jsonl(tmp_path / "a.jsonl", {"messages": CHAT})),
        load(write_parquet(tmp_path / "a.parquet", messages=[CHAT])),
        load(write_jsonl(tmp_path / "b.jsonl", {"conversation": CHAT}), field="conversation"),
    ]
    assert [(corpus.layout, rows(corpus)) for corpus in chats] == [("chat", [CHAT])] * 3


# ── named corpora ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_python_docs_are_the_topics_of_pydoc_in_a_fixed_order() -> None:
    from pydoc_data.topics import topics

    corpus = load("python-docs")
    assert (corpus.layout, rows(corpus)) == ("documents", [topics[name] for name in sorted(topics)])
    long = [name for name in sorted(topics) if len(topics[name]) >= 800]
    assert rows(load("python-docs-short")) == [topics[name][:800] for name in long[:24]]


def test_texts_that_are_ours_to_choose_tell_as_much_as_20_equal_documents() -> None:
    """The default text, and the demo's: fewer tell little, and of fewer than ten nothing is claimed."""
    makefile = (Path(__file__).parents[3] / "Makefile").read_text()
    demos = set(re.findall(r"--corpus python-docs --num-samples (\d+) --document-tokens (\d+) ", makefile))
    [(count, longest)] = demos
    tokenizer = HuggingFaceTokenizer.load(resolve("smollm2-135m"))
    texts = [(load("python-docs-short"), None), (load("python-docs", num_samples=int(count)), int(longest))]
    for corpus, most in texts:
        targets = [len(tokenizer.encode(text, special=False).ids[:most]) - 1 for text in corpus.texts()]
        assert sum(targets) ** 2 / sum(n**2 for n in targets) >= 20


def test_wikitext2_has_the_same_rows_from_a_file_from_parquet_and_from_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A row is a line with its newline; the file's blank line " \\n" is an empty row on the hub. Another program may
    use scoremode as a library: the hub's client is as loud afterwards as it was."""
    from huggingface_hub.utils import logging

    raw = load("wikitext2:" + write(tmp_path / "wiki.test.raw", " \n = Title = \n \n Some text . \n"))
    assert (raw.layout, rows(raw)) == ("lines", ["", " = Title = \n", "", " Some text . \n"])
    file = write_parquet(tmp_path / "test.parquet", text=["", " = Title = \n", "", " Some text . \n"])
    asked: list[Any] = []

    def download(*args: Any, **kwargs: Any) -> str:
        asked.extend([*args, kwargs["repo_type"], logging.get_verbosity()])
        return file

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        hub = load("wikitext2")
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)
    place = ("Salesforce/wikitext", "wikitext-2-raw-v1/test-00000-of-00001.parquet", "dataset")
    assert asked == [*place, logging.ERROR]
    for other in (load(f"wikitext2:{file}"), hub):
        assert (raw.sha256, raw.layout, rows(raw)) == (other.sha256, other.layout, rows(other))


def test_the_real_file_gives_the_rows_that_the_hub_publishes(wikitext_file: Path) -> None:
    """One for each line (``wc -l``), and an empty one for each line of a space (``grep -c '^ $'``)."""
    found = list(load(f"wikitext2:{wikitext_file}").texts())
    assert (len(found), sum(1 for row in found if not row)) == (206, 79)
    assert "".join(row or " \n" for row in found).encode() == wikitext_file.read_bytes()
    assert rows(load(f"wikitext2:{wikitext_file}", num_samples=3)) == ["", " = Robert Boulter = \n", ""]


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


def test_a_dataset_is_asked_for_by_name_configuration_and_split(hub: Datasets) -> None:
    corpus = load(dataset="some/set")
    assert (corpus.name, corpus.layout, rows(corpus)) == ("some/set:test", "documents", ["one", "two"])
    assert rows(load(dataset="some/set", field="body", num_samples=1)) == ["eins"]
    load(dataset="some/set", dataset_config="small", split="train")
    assert hub.asked == [("some/set", None, "test"), ("some/set", None, "test"), ("some/set", "small", "train")]


def test_a_dataset_that_cannot_be_loaded_gives_its_reason_on_one_line(hub: Datasets) -> None:
    line = complaint(dataset="some/set", split="dev")
    assert 'Unknown split "dev"' in line
    assert "\n" not in line


def test_without_the_package_datasets_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert pip_install("datasets") in complaint(dataset="some/set")


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_wikitext2_that_is_not_utf_8_says_where(tmp_path: Path) -> None:
    assert "offset 2, line 2" in complaint("wikitext2:" + write(tmp_path / "wiki.raw", b"a\n\xff"))


def test_a_chosen_field_that_is_missing_is_named(tmp_path: Path) -> None:
    line = complaint(write_jsonl(tmp_path / "a.jsonl", {"body": "x"}, {"text": "y"}), field="body")
    assert "line 2 has no field 'body'" in line
    line = complaint(write_parquet(tmp_path / "a.parquet", id=[1], body=["x"]), field="txt")
    assert "no column 'txt'" in line
    assert "(id, body)" in line


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


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def peak_bytes(spec: str) -> list[int]:
    load(spec)  # imports what it needs
    return [peak_of(lambda: load(spec))]


def test_a_long_file_is_not_held_three_times_and_jsonl_is_streamed(tmp_path: Path) -> None:
    size = 8 << 20
    path = write(tmp_path / "a.txt", b"some text\n" * (size // 10))
    assert measured_alone(peak_bytes, path)[0] < 2.2 * size
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    assert measured_alone(peak_bytes, write(tmp_path / "a.jsonl", line * 8000))[0] < 1 << 20


# ── what a name stands for ───────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Texts in a folder, beside files that are not read from one."""
    folder = tmp_path / "notes"
    for name in ("b.TXT", "deep/a.md", "c.jsonl", "code.py", ".hidden.txt", ".git/x.txt", "[1].txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "c"}' if name == "c.jsonl" else name)
    return folder


def test_a_folder_a_pattern_and_a_uri_stand_for_files_sorted_by_name(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(notes.parent)
    files = ["[1].txt", "b.TXT", "c", "deep/a.md"]
    for name, label in (("notes", "notes"), ("notes/", "notes"), (f"file://{notes}", "notes")):
        corpus = load(name)
        assert (corpus.name, corpus.layout, rows(corpus)) == (label, "documents", files)
    pattern = load("notes/**/*.[mT]*")
    assert (pattern.name, rows(pattern)) == ("notes/**/*.[mT]*", ["b.TXT", "deep/a.md"])
    assert (load("notes/[1].txt").name, rows(load("notes/[1].txt"))) == ("[1].txt", ["[1].txt"])
    several = load(["notes/c.jsonl", "notes/deep", "python-docs"], num_samples=3)
    assert (several.name, several.parts) == ("c.jsonl+deep+python-docs", ("c.jsonl", "a.md", "python-docs"))
    wiki = load(f"wikitext2:file://{notes}/b.TXT")
    assert (wiki.name, wiki.layout, rows(wiki)) == ("wikitext2", "lines", ["b.TXT"])


def test_a_file_may_have_the_name_of_a_corpus_that_cannot_be_used(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = entry_points.Refused("haiku", "more-corpora", "update it")
    monkeypatch.setattr("scoremode.core.text.corpus.corpora", lambda: entry_points.Plugins({}, (refused,)))
    assert complaint("haiku") == "the corpus 'haiku' cannot be used; haiku of the package more-corpora: update it"
    assert "no corpus or file 'senryu'" in complaint("senryu")
    monkeypatch.chdir(notes)
    write(Path("haiku"), "an old silent pond")
    assert rows(load("haiku")) == ["an old silent pond"]


@pytest.mark.parametrize(
    ("names", "options", "line"),
    [
        (None, {}, "no text was given; give one of --corpus NAME-or-FILE, --text TEXT, --dataset NAME"),
        (None, {"text": "a", "dataset": "b"}, "--text and --dataset were given together; give one of"),
        ("python-docs", {"text": "a"}, "--corpus and --text were given together"),
        ("", {}, "--corpus is empty; give a name or a file"),
        (None, {"text": ""}, "--text is empty; give it a value, as in --text WORDS"),
        ("python-docs", {"field": ""}, "--field is empty; give it a value"),
        (None, {"text": "\udcff"}, "--text is not UTF-8; give text in UTF-8, or a file with --corpus"),
        (["-", "-"], {}, "- was given twice, and standard input can be read only once; give it once"),
        ("python-docs", {"split": "test"}, "--split was given without --dataset; name a dataset, or leave --split out"),
        ("python-docs", {"dataset_config": "x"}, "--dataset-config was given without --dataset; name a dataset"),
        ("python-docs", {"num_samples": 0}, "--num-samples 0 leaves no text; give 1 or more"),
        ("python-docs", {"field": "text"}, "--field does not apply to plain text; leave --field out"),
        ("wikitxt2", {}, "there is no corpus or file 'wikitxt2'; did you mean 'wikitext2'"),
        ("no/wikitxt2", {}, "there is no corpus or file 'no/wikitxt2'; check the path"),
        ("wikitxt2.txt", {}, "there is no corpus or file 'wikitxt2.txt'; check the path"),
        (None, {"dataset": "python-docs"}, "python-docs is no dataset but a text that is known here; give --corpus"),
        (None, {"dataset": __file__.replace(".py", ".txt")}, "--dataset needs the package 'datasets'"),
    ],
)
def test_arguments_that_do_not_go_together(
    names: Any, options: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert complaint(names, **options).startswith(line)


# ── several texts ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_num_samples_that_end_before_a_text_are_refused(tmp_path: Path) -> None:
    """The corpus would still be called "a.jsonl+b.txt"."""
    files = [write_jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"}), write(tmp_path / "b.txt", "three")]
    assert rows(load(files, num_samples=3)) == rows(load(files, num_samples=99)) == ["one", "two", "three"]
    assert "--num-samples 2 leaves no rows of b.txt" in complaint(files, num_samples=2)


def test_an_empty_text_among_several_is_refused(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.txt", "one"), write_jsonl(tmp_path / "b.jsonl", {"text": ""})]
    assert "b.jsonl contains no text" in complaint(files)


def test_several_texts_are_one_corpus_where_they_are_alike(tmp_path: Path) -> None:
    chats = [write_jsonl(tmp_path / f"{n}.jsonl", {"messages": CHAT}) for n in "ab"]
    assert (load(chats).layout, load(chats).row_count) == ("chat", 2)
    one, two = write(tmp_path / "a.txt", "one"), write(tmp_path / "b.txt", "two")
    both = load(["python-docs", one])
    assert (both.layout, both.row_count) == ("documents", load("python-docs").row_count + 1)
    assert load([one, two]).sha256 == load(write_jsonl(tmp_path / "c.jsonl", {"text": "one"}, {"text": "two"})).sha256
    wiki = "wikitext2:" + write(tmp_path / "wiki.test.raw", " = Title = \n")
    for other in (one, wiki, "python-docs"):
        assert "together" in complaint([other, chats[0]])
    for other in (one, wiki):
        assert "WikiText and other texts were given together" in complaint([wiki, other])


class Words:
    """A corpus that a wing could bring: the words of its name."""

    prefix = "words:"

    def __init__(self, name: str) -> None:
        self.words = name.split("-")

    def as_corpus(self, count: int | None = None) -> Corpus:
        kept = self.words[:count]
        return Corpus("words", "documents", lambda: iter(kept), "0" * 64, len(kept), sum(map(len, kept)))


class WordsOffer(extensions.TextOffer):
    def load(self) -> Any:
        return types.SimpleNamespace(check=len, open=Words)


WORDS = WordsOffer(prefix="words:", value="A-B", code="of this file")


def test_a_wing_brings_a_kind_of_corpus_and_takes_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prefix and its objects are read while the wing is there; without it, the prefix is a file that is missing."""
    monkeypatch.setattr(extensions, "wings", lambda: (extensions.Wing(offers=(WORDS,)),))
    assert list(load("words:a-b-c", num_samples=2).rows()) == list(load(Words("a-b")).rows()) == ["a", "b"]
    with pytest.raises(CorpusError, match="--field does not apply to words"):
        load(Words("a"), field="x")
    with pytest.raises(OptionError, match="--text"):
        load(Words("a"), text="x")
    with pytest.raises(CorpusError, match="words were given together with other texts"):
        load(["words:a", "python-docs"])
    monkeypatch.setattr(extensions, "wings", tuple)
    with pytest.raises(CorpusError, match="words:a"):
        load("words:a")
