"""How a recipe makes documents from a corpus's rows, and excerpts of documents that are read again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoremode.core.plan.recipes import find_method
from scoremode.core.text.corpus import Corpus, Layout, load
from scoremode.core.text.documents import (
    Arrangement,
    Document,
    RereadDocuments,
    arranged,
    detokenised,
    notes_on,
    wikitext_pages,
)
from scoremode.core.text.files import lines_of
from scoremode.core.text.tokenizer import ByteTokenizer
from scoremode.errors import CorpusError

LINES = ["", " = Title = \n", "", " Some text . \n", " = Other = \n"]
RAW = " \n = Title = \n \n Some text . \n = Other = \n"
ARRANGEMENTS: tuple[Arrangement, ...] = ("join-lines", "join-rows", "pages", "texts")


def corpus_of(layout: Layout, *rows: str) -> Corpus:
    return Corpus("made", layout, lambda: iter(rows), "0" * 64, len(rows), sum(len(r.encode()) for r in rows))


def texts(layout: Layout, arrangement: Arrangement, *rows: str) -> list[str]:
    return [d.text for d in arranged(corpus_of(layout, *rows), arrangement)]


@pytest.mark.parametrize(
    ("arrangement", "given", "fed"),
    [
        *((arrangement, " = T = \n\n a @-@ b \r\n", " = T = \n\n a @-@ b \r\n") for arrangement in ARRANGEMENTS),
        *(("raw-file", given, fed) for given, fed in (("a\n", "a"), ("a\n\n", "a\n"), ("a", "a"), ("a\r\n", "a\r"))),
    ],
)
def test_one_text_stays_verbatim_but_a_raw_file_loses_one_trailing_newline(
    arrangement: Arrangement, given: str, fed: str
) -> None:
    assert texts("text", arrangement, given) == [fed]


@pytest.mark.parametrize("arrangement", ["join-lines", "join-rows"])
def test_lines_of_a_text_are_joined_with_empty_rows_kept(arrangement: Arrangement) -> None:
    assert texts("lines", arrangement, *LINES) == ["\n\n".join(LINES)]


def test_lines_as_the_original_file_as_pages_and_as_texts() -> None:
    """A page begins at a heading of one sign. Blank texts are kept, so that they are counted."""
    assert texts("lines", "raw-file", *LINES) == [RAW.removesuffix("\n")]
    pages = [" = Title = \n \n Some text . ", " = Other = \n"]
    assert texts("lines", "pages", *LINES) == [detokenised(page) for page in pages]
    assert texts("lines", "texts", *LINES) == list(LINES)


@pytest.mark.parametrize(("arrangement", "begins"), [("join-lines", 34), ("raw-file", 30)])
def test_another_article_begins_at_its_heading_and_lines_before_the_first_are_no_text(
    arrangement: Arrangement, begins: int
) -> None:
    (document,) = arranged(corpus_of("lines", *LINES), arrangement)
    assert document.joined_at == (begins,)
    assert document.text[begins:].startswith(" = Other = ")
    (plain,) = arranged(corpus_of("lines", "no heading\n", *LINES), arrangement)
    assert len(plain.joined_at) == 2


@pytest.mark.parametrize("arrangement", ["join-lines", "pages", "texts"])
def test_documents_stay_alone(arrangement: Arrangement) -> None:
    assert texts("documents", arrangement, "one\n", "two") == ["one\n", "two"]


def test_documents_are_joined_where_the_recipe_joins_rows() -> None:
    assert texts("documents", "join-rows", "one", "two\n") == ["one\n\ntwo\n"]
    assert texts("documents", "raw-file", "one", "two\n") == ["one\n\ntwo"]


# ── counts ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_words_are_counted_with_the_empty_ends_as_lm_eval_does() -> None:
    """re.split on white space gives an empty piece at an end with white space; published numbers count those."""
    assert Document(" two words \n").source_words == 4
    document = Document("ab", source="naïve source")
    assert (document.source_bytes, document.source_words) == (13, 2)


def pages_of(raw: str) -> list[str]:
    return list(wikitext_pages(lines_of(raw)))


# ── WikiText-2 ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("raw", "pages"),
    [
        (" = A = \n = = B = = \n text \n = = = C = = = \n", [" = A = \n = = B = = \n text \n = = = C = = = \n"]),
        (" \n = A = \n text", [" = A = \n text"]),
        ("no heading\nhere", ["no heading\nhere"]),
    ],
)
def test_a_page_begins_at_a_heading_of_one_sign(raw: str, pages: list[str]) -> None:
    assert pages_of(raw) == pages


def digest_of(pages: list[str]) -> str:
    return hashlib.sha256(json.dumps(pages).encode()).hexdigest()


def test_the_pages_of_wikitext2_are_those_of_lm_eval(wikitext_file: Path) -> None:
    """Recorded from the rows that lm-eval's wikitext task reads (EleutherAI/wikitext_document_level, test): numbers 0,
    24, 27, 28, 29 and 36. As in the whole file, only the last page ends with a newline."""
    digest = digest_of(pages_of(wikitext_file.read_text(encoding="utf-8")))
    assert digest == "ef2df9faca1a3fdb141c4ccab3637cab0e5d8c86354d292a863c9dead1b8bba2"


def test_the_detokenised_pages_and_their_words_and_bytes_are_those_of_lm_eval(wikitext_file: Path) -> None:
    """Recorded from the same rows and lm-evaluation-harness 0.4.13's wikitext task, version 2.0."""
    found = list(arranged(load(f"wikitext2:{wikitext_file}"), "pages"))
    digest = digest_of([d.text for d in found])
    assert digest == "349529a93bbcbf4d8d7e258d8c28f6febc7f916c12e947435a56f2582ddeb561"
    totals = (len(found), sum(d.source_words for d in found), sum(d.source_bytes for d in found))
    assert totals == (6, 6203, 34_877)


@pytest.mark.parametrize(
    ("page", "prose"),
    [
        ("the dogs ' tails", "the dogs' tails"),
        ("well @-@ known", "well-known"),
        ("1 @,@ 000 @.@ 5", "1,000.5"),
        ("one , two ; three : four ! five ? six . seven", "one, two; three: four! five? six. seven"),
        ("( a ) [ b ] { c }", "(a) [b] {c}"),
        ('he said " yes " and left', 'he said "yes" and left'),
        ("= = = = Deep = = = =", "==== Deep ===="),
        (" text . \n \n more", " text.\n\nmore"),
        ("20 ° C", "20°C"),
        ("it 's", "it's"),
        ("of N points", "of 1 points"),
    ],
)
def test_wikitext_is_detokenised(page: str, prose: str) -> None:
    assert detokenised(page) == prose


# ── several texts ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("method", "note"),
    [
        ("sliding-once", "2 texts scored as separate documents: a.txt, b.txt"),
        ("gptq", "2 texts joined into one document: a.txt, b.txt"),
    ],
)
def test_what_was_made_of_several_texts_is_said(tmp_path: Path, method: str, note: str) -> None:
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file in files:
        file.write_text("some text\n")
    arrangement = find_method(method).arrangement
    assert notes_on(load(files), arrangement) == (note,)
    assert notes_on(load(files[0]), arrangement) == ()
    found = [document.joined_at for document in arranged(load(files), arrangement)]
    assert found == ([(12,)] if method == "gptq" else [(), ()])


TEXTS = ["plain text", "", "naïve Füße, 日本語 und 😀 mixed", "ends\n", "𝔘𝔫𝔦"]


def documents() -> RereadDocuments:
    return RereadDocuments(corpus_of("documents", *TEXTS), "texts", ByteTokenizer())


@given(draw=st.data())
def test_excerpts_are_slices_of_the_text(draw: st.DataObject) -> None:
    found = documents()
    assert [document.text for document in found] == TEXTS
    for number in draw.draw(st.lists(st.sampled_from(range(len(TEXTS))), max_size=12)):
        start = draw.draw(st.integers(0, len(TEXTS[number])))
        end = draw.draw(st.integers(start, len(TEXTS[number])))
        assert found.excerpt(number, start, end) == TEXTS[number][start:end]


@pytest.mark.parametrize(("number", "end"), [(0, 11), (5, 1)])
def test_a_text_that_became_shorter_is_refused(number: int, end: int) -> None:
    with pytest.raises(CorpusError, match="shorter than when it was read first"):
        documents().excerpt(number, 0, end)
