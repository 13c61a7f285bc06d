"""Corpus ─▶ the documents that a recipe feeds: joined, verbatim, divided into pages, or unchanged.

arrangement   one text    lines of a text (wikitext2)          documents
join-lines    verbatim    joined with "\\n\\n"                   each alone
join-rows     verbatim    joined with "\\n\\n"                   joined with "\\n\\n"
raw-file      verbatim*   the original file*                   joined with "\\n\\n"*      * without one trailing newline
pages         verbatim    lm-evaluation-harness's 62 pages     each alone
texts         verbatim    each line (blank lines have no       each alone
                          target, and are counted)

Each of several texts is arranged separately. Recipes that join rows also join several texts, like documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, cast

from scoremode.errors import OptionError
from scoremode.text.corpus import WIKITEXT2_BLANK, Corpus, Message
from scoremode.text.tokenizer import TextTokenizer
from scoremode.text.tokens import Document, Tokens, chat_document, count_words, tokenize

Arrangement = Literal["join-lines", "join-rows", "raw-file", "pages", "texts"]
"""How a recipe makes documents from a corpus's rows: see the table above."""

JOIN = "\n\n"
LISTED = 8  # most texts that a note names
JOINING = ("join-rows", "raw-file")  # arrangements that make one document from all rows


def prepare(
    corpus: Corpus,
    arrangement: Arrangement,
    tokenizer: TextTokenizer,
    *,
    special: bool,
    assistant_only: bool = False,
) -> tuple[list[Document], Tokens]:
    """The documents of a corpus as a recipe arranges them, and their tokens.

    ``special`` says whether the tokenizer adds its special tokens.
    """
    if corpus.layout == "chat":
        conversations = (cast(list[Message], row) for row in corpus.rows())
        documents = [chat_document(row, tokenizer, assistant_only=assistant_only) for row in conversations]
        return documents, tokenize(documents, tokenizer, special=False)  # the template has already added them
    if assistant_only:
        raise OptionError("--assistant-only needs chat rows (a field 'messages')", fix="leave --assistant-only out")
    documents = list(arrange(corpus, arrangement))
    return documents, tokenize(documents, tokenizer, special=special)


def arrange(corpus: Corpus, arrangement: Arrangement) -> Iterator[Document]:
    """The documents that an arrangement makes from a corpus."""
    if arrangement in JOINING:
        text, joined_at = _joined(corpus, arrangement)
        yield document(_without_last_newline(text) if arrangement == "raw-file" else text, joined_at=joined_at)
    elif corpus.layout == "mixed":
        for part in corpus.parts:
            yield from arrange(part, arrangement)
    elif corpus.layout == "lines" and arrangement == "join-lines":
        text, joined_at = _joined(corpus, arrangement)
        yield document(text, joined_at=joined_at)
    elif corpus.layout == "lines" and arrangement == "pages":
        for page in wikitext_pages(_original(corpus)):
            yield document(detokenised(page), source=page)
    else:
        yield from map(document, corpus.texts())


def _joined(corpus: Corpus, arrangement: Arrangement) -> tuple[str, list[int]]:
    """The whole corpus as one text, and the character positions at which another text begins in it.

    Each row is a separate text, except in WikiText, where each article is.
    """
    if corpus.layout == "mixed":
        return _concatenated([_joined(part, arrangement) for part in corpus.parts])
    if corpus.layout == "lines":
        verbatim = arrangement == "raw-file"
        lines = [row or WIKITEXT2_BLANK for row in corpus.texts()] if verbatim else list(corpus.texts())
        text, starts = _concatenated([(line, []) for line in lines], "" if verbatim else JOIN)
        articles = [at for at, line in zip([0, *starts], lines, strict=True) if _is_heading(line)]
        first = articles[0] if articles else 0
        return text, articles if text[:first].strip() else articles[
            1:
        ]  # blank lines before the first article are not a text
    return _concatenated([(text, []) for text in corpus.texts()])


def _concatenated(parts: list[tuple[str, list[int]]], between: str = JOIN) -> tuple[str, list[int]]:
    """Concatenate (text, its inner starts) pairs: one text, and the positions of all starts except the first."""
    starts: list[int] = []
    at = 0
    for text, inner in parts:
        starts += [at] * (at > 0) + [at + begin for begin in inner]
        at += len(text) + len(between)
    return between.join(text for text, _ in parts), starts


def _original(corpus: Corpus) -> str:
    """The original file, byte for byte: the rows on the hub have "" where the file has a blank line."""
    return "".join(row or WIKITEXT2_BLANK for row in corpus.texts())


def notes_on(corpus: Corpus, arrangement: Arrangement) -> tuple[str, ...]:
    """What a reader of the result should know about the text, such as how several texts were combined."""
    if len(corpus.parts) < 2:
        return corpus.notes
    joined = corpus.layout != "chat" and arrangement in JOINING
    made = "joined into one document" if joined else "scored as separate documents"
    names = [part.name for part in corpus.parts]
    listed = ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
    return (f"{len(corpus.parts)} texts {made}: {listed}", *corpus.notes)


def document(text: str, source: str | None = None, joined_at: Sequence[int] = ()) -> Document:
    """A document with the counts of its source, and the positions at which texts were joined."""
    source = text if source is None else source
    size = len(source.encode())
    return Document(text, source_bytes=size, source_words=count_words(source), joined_at=tuple(joined_at))


def _without_last_newline(text: str) -> str:
    return text.removesuffix("\n")


# ── WikiText-2 as lm-evaluation-harness sees it ──────────────────────────────────────────────────────────────────────
def wikitext_pages(raw: str) -> list[str]:
    """The pages of wiki.test.raw: a page begins at a heading with one "=" on each side.

    Only 60 of the 62 pages are articles: two begin at equations that look like headings. They are kept, because the
    published numbers include them.
    """
    pages: list[list[str]] = []
    for line in raw.split("\n"):
        if _is_heading(line):
            pages.append([])
        if pages:
            pages[-1].append(line)
    return ["\n".join(lines) for lines in pages] or [raw]


def _is_heading(line: str) -> bool:
    """Does an article begin here? Headings inside articles have more than one "=" on each side."""
    heading = re.sub("= =", "==", re.sub("= = =", "===", line)).strip()
    return heading.startswith("= ") and heading.endswith(" =")


# (pattern, replacement) as regular expressions, applied in this order to undo WikiText's tokenisation
_DETOKENISE: tuple[tuple[str, str], ...] = (
    (r"s '", "s'"),
    (r"/' [0-9]/", "/'[0-9]/"),  # probably a mistake, but the published numbers were made with it
    *((re.escape(f" @{sign}@ "), sign) for sign in "-,."),
    *((re.escape(f" {sign} "), f"{sign} ") for sign in ":;.!?,"),
    *(
        (rf"{re.escape(left)}\s*([^{re.escape(right)}]*?)\s*{re.escape(right)}", rf"{left}\1{right}")
        for left, right in ("()", "[]", "{}", '""', "''")
    ),
    *(("= " * depth + "=", "=" * (depth + 1)) for depth in (3, 2, 1)),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenised(page: str) -> str:
    """A WikiText page as ordinary prose, by the rules of lm-evaluation-harness's wikitext task."""
    for pattern, replacement in _DETOKENISE:
        page = re.sub(pattern, replacement, page)
    return page
