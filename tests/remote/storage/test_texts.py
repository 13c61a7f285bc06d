"""Texts in a bucket: files, folders and patterns, fetched once, noticed when they change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.core.text import corpus
from scoremode.errors import CorpusError
from tests.s3 import Bucket

Move = Callable[[], Path]


@pytest.fixture
def texts(bucket: Bucket, tmp_path: Path) -> Path:
    """The same files in the bucket and in a folder."""
    files = {"a.txt": b"hello there\n", "b.txt": b"another text\n", "more/c.jsonl": b'{"text": "abc def"}\n'}
    for name, data in files.items():
        bucket.put(f"texts/{name}", data)
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    bucket.put("texts/.hidden.txt", b"not read")
    bucket.put("texts/image.png", b"not read")
    return tmp_path / "texts"


@pytest.mark.parametrize("name", ["a.txt", "", "*.txt", "**/*", "more/c.jsonl", "?.txt"])
def test_a_text_elsewhere_is_the_text_here(bucket: Bucket, elsewhere: Move, texts: Path, name: str) -> None:
    if name == "**/*":  # a pattern takes every file that matches, and a picture is none of these
        bucket.remove("texts/image.png")
        bucket.remove("texts/.hidden.txt")
    there, here = corpus.load(bucket.uri(f"texts/{name}")), corpus.load(str(texts / name))
    assert (there.sha256, there.layout, there.row_count) == (here.sha256, here.layout, here.row_count)
    assert list(there.rows()) == list(here.rows())


def test_wikitext_and_pairs(bucket: Bucket, elsewhere: Move, tmp_path: Path) -> None:
    bucket.put("wiki.test.raw", b" \n = A = \n \n text of it \n")
    (tmp_path / "wiki").write_bytes(b" \n = A = \n \n text of it \n")
    there = corpus.load(f"wikitext2:{bucket.uri('wiki.test.raw')}")
    here = corpus.load(f"wikitext2:{tmp_path / 'wiki'}")
    assert (there.sha256, there.name) == (here.sha256, "wikitext2")


def test_a_changed_text_is_noticed_and_an_unchanged_one_is_fetched_once(bucket: Bucket, elsewhere: Move) -> None:
    uri = bucket.uri("a.txt")
    bucket.put("a.txt", b"first text")
    for _ in range(2):
        assert list(corpus.load(uri).rows()) == ["first text"]
    assert bucket.server.requests.count(("GET", f"/{bucket.name}/a.txt")) == 1
    bucket.put("a.txt", b"another text")
    assert list(corpus.load(uri).rows()) == ["another text"]


def test_a_text_with_the_name_of_a_file_of_ours_is_read_as_it_is(bucket: Bucket, elsewhere: Move) -> None:
    for name in (".file.json", ".lock", ".scoremode-part.tmp"):
        bucket.put(f"odd/{name}", b"its own words")
        assert list(corpus.load(f"wikitext2:{bucket.uri(f'odd/{name}')}").rows()) == ["its own words"]


def test_what_cannot_be_read(bucket: Bucket, elsewhere: Move) -> None:
    bucket.put("empty.txt", b"")
    for name, says in (("none.txt", "there is no file"), ("x/*.txt", "there is no text at"), ("empty.txt", "is empty")):
        with pytest.raises(CorpusError, match=says):
            sm.ppl("table:uniform", corpus=bucket.uri(name))
    with pytest.raises(CorpusError, match="contains a user name or a secret"):
        sm.ppl("table:uniform", corpus="s3://key:secret@bucket/x")
