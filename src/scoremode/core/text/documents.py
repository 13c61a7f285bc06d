"""Corpus ─▶ the documents that a recipe feeds: joined, verbatim, divided into pages, or unchanged.

arrangement   one text    lines of a text (wikitext2)          documents
join-lines    verbatim    joined with "\\n\\n"                   each alone
join-rows     verbatim    joined with "\\n\\n"                   joined with "\\n\\n"
raw-file      verbatim*   the original file*                   joined with "\\n\\n"*      * without one trailing newline
pages         verbatim    lm-evaluation-harness's 62 pages     each alone
texts         verbatim    each line (blank lines have no       each alone
                          target, and are counted)

Several texts are documents: recipes that join rows join them too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from typing import Any, Literal, cast

from scoremode.core import free_memory
from scoremode.core.reading import COPIES, require_memory
from scoremode.core.text.corpus import WIKITEXT2_BLANK, Corpus
from scoremode.core.text.files import Message, lines_of
from scoremode.core.text.slices import TEMPLATE, UNDIVIDED, DocumentSlices, SliceRule, Slicing, Span
from scoremode.core.text.tokenizer import TextTokenizer
from scoremode.errors import CorpusError, ModelError, OptionError

Arrangement = Literal["join-lines", "join-rows", "raw-file", "pages", "texts"]
"""How a recipe makes documents from a corpus's rows: see the table above."""

JOIN = "\n\n"
LISTED = 8  # how many texts a note names at most
JOINING = ("join-rows", "raw-file")  # arrangements that make one document from all rows
PROBES = ("\ue000", "\ue001")  # characters of private use: no chat template writes them


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A text that a recipe feeds.

    >>> document = Document("one text")
    >>> document.source_bytes, document.source_words
    (8, 2)
    """

    text: str
    source: str | None = None  # the text from which the recipe made this one; None: this one
    scored_spans: tuple[tuple[int, int], ...] | None = None  # characters that may be targets; None: all
    joined_at: tuple[int, ...] = ()  # characters at which another text begins
    slices: DocumentSlices | None = None  # None: the text has no slices

    @property
    def source_bytes(self) -> int:
        text = self.text if self.source is None else self.source
        return len(text) if text.isascii() else len(text.encode())

    @property
    def source_words(self) -> int:
        return count_words(self.text if self.source is None else self.source)


class RereadDocuments:
    """The documents that an arrangement makes from a corpus. Each pass reads the corpus again, so no text is kept."""

    def __init__(
        self,
        corpus: Corpus,
        arrangement: Arrangement,
        tokenizer: TextTokenizer,
        *,
        assistant_only: bool = False,
        rules: tuple[SliceRule, ...] = (),
    ) -> None:
        if assistant_only and corpus.layout != "chat":
            raise OptionError("--assistant-only needs chat rows (a field 'messages')", fix="leave --assistant-only out")
        self.corpus, self.arrangement, self.tokenizer = corpus, arrangement, tokenizer
        self.assistant_only, self.rules = assistant_only, rules

    def __iter__(self) -> Iterator[Document]:
        slicing = Slicing(self.rules)
        if self.corpus.layout == "chat":
            for row in self.corpus.rows():
                messages = cast(list[Message], row)
                yield chat_document(messages, self.tokenizer, slicing, assistant_only=self.assistant_only)
            return
        for document in arranged(self.corpus, self.arrangement):
            yield replace(document, slices=slicing.document(document.text)) if self.rules else document

    def excerpt(self, number: int, start: int, end: int) -> str:
        """Returns characters ``start`` to ``end`` of a document."""
        document = next(islice(self, number, None), None)
        if document is None or end > len(document.text):
            raise CorpusError("the text is shorter than when it was read first", fix="run the same command again")
        return document.text[start:end]


def arranged(corpus: Corpus, arrangement: Arrangement) -> Iterator[Document]:
    """Yields the documents that an arrangement makes from rows of text."""
    if arrangement in JOINING or (corpus.layout == "lines" and arrangement == "join-lines"):
        is_file = arrangement == "raw-file"
        require_memory(f"joining {corpus.name}", COPIES * corpus.byte_count, free_memory.available())
        text, joined_at = _joined_lines(corpus, verbatim=is_file) if corpus.layout == "lines" else _joined(corpus)
        yield Document(text.removesuffix("\n") if is_file else text, joined_at=tuple(joined_at))
    elif corpus.layout == "lines" and arrangement == "pages":
        for page in wikitext_pages(lines_of("".join(row or WIKITEXT2_BLANK for row in corpus.texts()))):
            yield Document(detokenised(page), source=page)
    else:
        yield from map(Document, corpus.texts())


def _joined(corpus: Corpus) -> tuple[str, list[int]]:
    """The rows of a corpus as one text, and the characters at which another row begins in it."""
    texts = list(corpus.texts())
    begins = accumulate(len(text) + len(JOIN) for text in texts[:-1])
    return JOIN.join(texts), list(begins)


def _joined_lines(corpus: Corpus, *, verbatim: bool) -> tuple[str, list[int]]:
    """The lines of WikiText as one text, and the characters at which another article begins in it.

    Blank lines before the first article are not a separate text.
    """
    lines = [row or WIKITEXT2_BLANK if verbatim else row for row in corpus.texts()]
    between = "" if verbatim else JOIN
    begins, at, has_text = list[int](), 0, False  # has_text: was a text or at least an article found?
    for line in lines:
        heading = _is_heading(line)
        if heading and has_text:
            begins.append(at)
        has_text = has_text or heading or bool(line.strip())
        at += len(line) + len(between)
    return between.join(lines), begins


def notes_on(corpus: Corpus, arrangement: Arrangement) -> tuple[str, ...]:
    """Returns notes on the text for a reader of the result, such as how several texts were combined."""
    if len(corpus.parts) < 2:
        return corpus.notes
    joined = corpus.layout != "chat" and arrangement in JOINING
    made = "joined into one document" if joined else "scored as separate documents"
    more = len(corpus.parts) - LISTED
    listed = ", ".join(corpus.parts[:LISTED]) + (f" and {more} more" if more > 0 else "")
    return (f"{len(corpus.parts)} texts {made}: {listed}", *corpus.notes)


# ── conversations ────────────────────────────────────────────────────────────────────────────────────────────────────
def chat_document(
    messages: list[Message], tokenizer: TextTokenizer, slicing: Slicing, *, assistant_only: bool
) -> Document:
    """Renders a conversation with the model's chat template, whose text already contains special tokens.

    It is divided into roles; with ``assistant_only``, the assistant's turns alone are, and are scored.
    """
    messages = as_template_takes(messages, tokenizer, open_turn=False)
    text = tokenizer.render_chat(messages, open_turn=False)
    if not assistant_only:
        spans = message_slices(messages, tokenizer, text, slicing)
        slicing.undivided += spans is None
        slices = slicing.document(text, spans or (), outside=UNDIVIDED if spans is None else TEMPLATE)
        return Document(text, slices=slices)
    turns: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn = assistant_turn(messages, index, tokenizer, text)
        if turn is None:
            raise ModelError(
                "the chat template rewrites earlier turns, so the assistant's tokens cannot be identified",
                fix="score all tokens, without --assistant-only",
            )
        turns.append(turn)
    if not turns:
        raise ModelError("a chat row has no assistant turn", fix="remove the row, or score without --assistant-only")
    divided = [span for turn in turns for span in slicing.turn(text, *turn)]
    return Document(text, scored_spans=tuple(turns), slices=slicing.document(text, divided, outside=TEMPLATE))


def as_template_takes(messages: list[Message], tokenizer: TextTokenizer, *, open_turn: bool) -> list[Message]:
    """Contents as the chat template writes them, which a probe shows: parts, or their texts, joined by newlines.

    Null stays, unless the template fails on it or writes "None": then it becomes an empty text.
    """
    plain: list[Message] = [{**message, "content": "\n".join(_texts_in(message))} for message in messages]
    if plain == messages:
        return messages

    def rendered(index: int, content: Any) -> str:
        try:
            changed: list[Message] = [*plain[:index], {**plain[index], "content": content}, *plain[index + 1 :]]
            return tokenizer.render_chat(changed, open_turn=open_turn)
        except ModelError:
            return ""

    takes_parts, taken = dict[str, bool](), list(plain)  # by role
    first, second = "".join(PROBES), "".join(PROBES[::-1])
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if isinstance(content, list):
            if role not in takes_parts:
                between, sep, _ = rendered(index, _parts(first, second)).partition(first)[2].partition(second)
                takes_parts[role] = bool(sep) and "type" not in between  # else it writes lists as Python or JSON does
            if takes_parts[role]:  # without empty fields, which Parquet adds: some templates ask whether there is one
                taken[index] = {**message, "content": _parts(*_texts_in(message))}
        elif content is None and rendered(index, None) not in ("", rendered(index, "None")):
            taken[index] = message
    return taken


def _texts_in(message: Message) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content or ()]


def _parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def assistant_turn(messages: list[Message], index: int, tokenizer: TextTokenizer, text: str) -> tuple[int, int] | None:
    """The assistant's part of a turn: everything that the template writes after it opens the turn.

    These are the assistant's words and the end-of-turn mark. None if the template rewrites earlier turns.
    """
    opened = tokenizer.render_chat(messages[:index], open_turn=True)
    closed = tokenizer.render_chat(messages[: index + 1], open_turn=False).rstrip()
    if text.startswith(opened) and text.startswith(closed) and len(closed) > len(opened):
        return len(opened), len(closed)
    return None


def message_slices(messages: list[Message], tokenizer: TextTokenizer, text: str, slicing: Slicing) -> list[Span] | None:
    """The slices of all messages, sorted: roles, and inside of the assistant's turns thinking, answer and tool call.

    None if a message cannot be found in the text, or if two overlap.
    """
    places: list[tuple[int, int, Message]] = []
    try:
        for index, message in enumerate(messages):
            place = None
            if message["role"] == "assistant":
                place = assistant_turn(messages, index, tokenizer, text)
                place = place or _rewritten_turn(messages, index, tokenizer, text)
            else:
                place = _own_words(messages, index, tokenizer, text)
            if place is None:
                return None
            places.append((*place, message))
    except ModelError:  # the template takes whole conversations only
        return None
    places.sort(key=lambda place: place[:2])  # some templates write the system's words into a later message
    if any(place[1] > next_place[0] for place, next_place in pairwise(places)):
        return None
    spans: list[Span] = []
    for begin, end, message in places:
        is_own = message["role"] == "assistant"
        spans += slicing.turn(text, begin, end) if is_own else [(begin, end, message["role"])]
    return spans


def _own_words(messages: list[Message], index: int, tokenizer: TextTokenizer, text: str) -> tuple[int, int] | None:
    """Finds a message's own words: renders the conversation with a probe in their place, and looks for the probe."""
    probe, replaced = _with_probe(messages[index], text)
    other = tokenizer.render_chat([*messages[:index], replaced, *messages[index + 1 :]], open_turn=False)
    before, sep, after = other.partition(probe)
    begin, end = len(before), len(text) - len(after)
    fits = sep and begin <= end and text.startswith(before) and text.endswith(after)
    return (begin, end) if fits else None


def _rewritten_turn(messages: list[Message], index: int, tokenizer: TextTokenizer, text: str) -> tuple[int, int] | None:
    """As ``assistant_turn``, where the template writes a turn differently once another one follows.

    The words are found by a probe. What the template writes around them belongs to the turn if it is the same in both.
    """
    place = _own_words(messages, index, tokenizer, text)
    if place is None:
        return None
    begin, end = place
    opened = tokenizer.render_chat(messages[:index], open_turn=True)
    if len(opened) <= begin and text.startswith(opened):
        begin = len(opened)
    probe, replaced = _with_probe(messages[index], text)
    closing = tokenizer.render_chat([*messages[:index], replaced], open_turn=False).partition(probe)[2].rstrip()
    marks = (mark for mark in (closing, closing.lstrip()) if text.startswith(mark, end))
    return begin, end + len(next(marks, ""))


def _with_probe(message: Message, text: str) -> tuple[str, Message]:
    probe = next((probe for probe in PROBES if probe not in text), PROBES[0])
    return probe, {**message, "content": _parts(probe) if isinstance(message["content"], list) else probe}


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def count_words(text: str) -> int:
    """Counts words as lm-evaluation-harness does: the pieces between white space, including empty ones at the ends."""
    return 1 + sum(1 for _ in re.finditer(r"\s+", text))


# ── WikiText-2 as lm-evaluation-harness sees it ──────────────────────────────────────────────────────────────────────
def wikitext_pages(lines: Iterable[str]) -> Iterator[str]:
    """Yields the pages of wiki.test.raw. A page begins at a heading with one "=" on each side.

    Only 60 of the 62 pages are articles: two begin at equations that look like headings. These two stay, because the
    published numbers include them. Lines before the first heading are omitted. A text without headings is one page.
    """
    page, has_heading = list[str](), False
    for line in lines:
        if _is_heading(line):
            if has_heading:
                yield "".join(page).removesuffix("\n")
            page, has_heading = [], True
        page.append(line)
    yield "".join(page)


def _is_heading(line: str) -> bool:
    """Does an article begin at this line? Headings inside articles have more than one "=" on each side."""
    heading = re.sub("= =", "==", re.sub("= = =", "===", line)).strip()
    return heading.startswith("= ") and heading.endswith(" =")


# (pattern, replacement) as regular expressions, applied in this order to undo WikiText's tokenisation
_DETOKENISE: tuple[tuple[str, str], ...] = (
    (r"s '", "s'"),
    (r"/' [0-9]/", "/'[0-9]/"),  # probably a mistake, but the published numbers were computed with it
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
    """Returns a WikiText page as ordinary prose, by the rules of lm-evaluation-harness's wikitext task."""
    for pattern, replacement in _DETOKENISE:
        page = re.sub(pattern, replacement, page)
    return page
