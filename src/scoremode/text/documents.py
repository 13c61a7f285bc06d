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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, cast

from scoremode.errors import OptionError
from scoremode.text.corpus import WIKITEXT2_BLANK, Corpus, Message
from scoremode.text.files import lines_of
from scoremode.text.reading import ReadAgain
from scoremode.text.tokenizer import TextTokenizer
from scoremode.text.tokens import Document, OpenDocument, Tokens, TokenSink, chat_document, count_words, tokenize

Arrangement = Literal["join-lines", "join-rows", "raw-file", "pages", "texts"]
"""How a recipe makes documents from a corpus's rows: see the table above."""

JOIN = "\n\n"
IN_MEMORY = 1 << 20  # bytes of a corpus; the documents of a longer one are read again when they are needed
LISTED = 8  # most texts that a note names
JOINING = ("join-rows", "raw-file")  # arrangements that make one document from all rows


Keep = Callable[[Callable[[TokenSink | None], Tokens]], Tokens]
"""Gives a function that cuts the text into tokens a place where to put them."""


def prepare(
    corpus: Corpus,
    arrangement: Arrangement,
    tokenizer: TextTokenizer,
    *,
    special: bool,
    assistant_only: bool = False,
    keep: Keep | None = None,
) -> tuple[Sequence[Document], Tokens]:
    """The documents of a corpus as a recipe arranges them, and their tokens.

    ``special`` says whether the tokenizer adds its special tokens; ``keep``, where tokens go if not into memory.
    """
    if corpus.layout == "chat":
        special = False  # the template has already added them
    elif assistant_only:
        raise OptionError("--assistant-only needs chat rows (a field 'messages')", fix="leave --assistant-only out")

    def opened() -> Iterator[OpenDocument]:
        if corpus.layout == "chat":
            conversations = (cast(list[Message], row) for row in corpus.rows())
            return (
                OpenDocument.of(chat_document(row, tokenizer, assistant_only=assistant_only)) for row in conversations
            )
        return open_documents(corpus, arrangement)

    if corpus.byte_count < IN_MEMORY:
        documents = [document.whole() for document in opened()]
        return documents, tokenize(documents, tokenizer, special=special)

    def make(sink: TokenSink | None) -> Tokens:
        return tokenize(opened(), tokenizer, special=special, sink=sink)

    tokens = make(None) if keep is None else keep(make)
    return ReadAgain(opened, tokens.documents), tokens


def arrange(corpus: Corpus, arrangement: Arrangement) -> Iterator[Document]:
    """The documents that an arrangement makes from a corpus, each whole."""
    return (document.whole() for document in open_documents(corpus, arrangement))


def open_documents(corpus: Corpus, arrangement: Arrangement) -> Iterator[OpenDocument]:
    """The documents that an arrangement makes from a corpus, to be read in order, each once."""
    if arrangement in JOINING or (corpus.layout == "lines" and arrangement == "join-lines"):
        yield _from_joined(_joined(corpus, arrangement), trimmed=arrangement == "raw-file")
    elif corpus.layout == "mixed":
        for part in corpus.parts:
            yield from open_documents(part, arrangement)
    elif corpus.layout == "lines" and arrangement == "pages":
        for page in _pages(lines_of(row or WIKITEXT2_BLANK for row in corpus.texts())):
            yield OpenDocument([detokenised(page)], source=(len(page.encode()), count_words(page)))
    else:
        yield from map(OpenDocument, corpus.streams())


Joined = Iterator[tuple[str, bool]]
"""Pieces of a text, and whether another text begins at each. Nothing of one piece is in the next."""


def _from_joined(joined: Joined, *, trimmed: bool) -> OpenDocument:
    """A document whose ``joined_at`` grows while it is read: the characters at which another text begins."""

    def pieces() -> Iterator[str]:
        at = 0
        for piece, begins in joined:
            if begins:
                made.joined_at.append(at)
            at += len(piece)
            yield piece

    made = OpenDocument(_without_last_newline(pieces()) if trimmed else pieces())
    return made


def _joined(corpus: Corpus, arrangement: Arrangement) -> Joined:
    """The whole corpus as one text. Each row is a separate text, except in WikiText, where each article is."""
    if corpus.layout == "mixed":
        for number, part in enumerate(corpus.parts):
            yield from _after(JOIN if number else "", _joined(part, arrangement), begins=number > 0)
    elif corpus.layout == "lines":
        yield from _joined_lines(corpus, verbatim=arrangement == "raw-file")
    else:
        for number, pieces in enumerate(corpus.streams()):
            text = ((piece, False) for piece in pieces)
            yield from _after(JOIN if number else "", text, begins=number > 0)


def _after(between: str, text: Joined, *, begins: bool) -> Joined:
    """A text after what joins it to the text before; it begins after that, even if it is empty."""
    if between:
        yield between, False
    if begins:
        yield "", True
    yield from text


def _joined_lines(corpus: Corpus, *, verbatim: bool) -> Joined:
    """Lines of WikiText. Blank lines before the first article are not a text."""
    between, found = "" if verbatim else JOIN, False  # found: was there a text, or at least an article?
    for number, row in enumerate(corpus.texts()):
        line = row or WIKITEXT2_BLANK if verbatim else row
        if number and between:
            yield between, False
        heading = _is_heading(line)
        yield line, heading and found
        found = found or heading or bool(line.strip())


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


def _without_last_newline(pieces: Iterable[str]) -> Iterator[str]:
    held = ""  # a newline that may be the last character
    for piece in filter(None, pieces):
        yield held + piece.removesuffix("\n")
        held = "\n" if piece.endswith("\n") else ""


# ── WikiText-2 as lm-evaluation-harness sees it ──────────────────────────────────────────────────────────────────────
def wikitext_pages(raw: str) -> list[str]:
    """The pages of wiki.test.raw: a page begins at a heading with one "=" on each side.

    Only 60 of the 62 pages are articles: two begin at equations that look like headings. They are kept, because the
    published numbers include them. What stands before the first page is left out; a text without pages is one.
    """
    return list(_pages(lines_of([raw])))


def _pages(lines: Iterable[str]) -> Iterator[str]:
    page, found = list[str](), False
    for line in lines:
        if _is_heading(line):
            if found:
                yield "".join(page).removesuffix("\n")
            page, found = [], True
        page.append(line)
    yield "".join(page)


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
