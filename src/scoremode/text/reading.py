"""Documents that are read again from their source when somebody needs their text: a long one is never kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import overload

from scoremode.errors import CorpusError
from scoremode.text.tokens import Document, OpenDocument
from scoremode.values import Ints


class ReadAgain(Sequence[Document]):
    """The documents of a corpus, in order. Each access reads the source from its beginning, and gives a whole text.

    Use ``Excerpts`` for many places.
    """

    def __init__(self, opened: Callable[[], Iterator[OpenDocument]], count: int) -> None:
        self.opened, self._count = opened, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Document]:
        return (document.whole() for document in self.opened())

    @overload
    def __getitem__(self, index: int) -> Document: ...

    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...

    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        for number, document in enumerate(self.opened()):
            if number == index % self._count:
                return document.whole()
            for _ in document:
                pass
        raise _changed()


class Excerpts:
    """Characters of documents, by place. Places that ascend are read in one pass over the source.

    It holds the text between the first and the last place of a call, and what it read beyond.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents
        self._again: _Pass | None = None

    def at(self, document: Ints, start: Ints, end: Ints) -> list[str]:
        """The characters ``start[i]:end[i]`` of each document, in the order of the places."""
        places = list(zip(document.tolist(), start.tolist(), end.tolist(), strict=True))
        if not isinstance(self._documents, ReadAgain):
            return [self._documents[d].text[a:b] for d, a, b in places]
        if not places:
            return []
        first = min((d, a) for d, a, _ in places)
        if self._again is None or first < self._again.begin:
            self._again = _Pass(self._documents.opened())
        found = [""] * len(places)
        for i in sorted(range(len(places)), key=places.__getitem__):
            found[i] = self._again.excerpt(*places[i], kept=first)
        return found


class _Pass:
    """One pass over documents. It holds a stretch of one document, which begins and ends later and later."""

    def __init__(self, opened: Iterator[OpenDocument]) -> None:
        self._opened = opened
        self._reading = -1  # the document that is being read
        self._pieces: Iterator[str] = iter(())
        self._text, self._at = "", 0  # what is held of it, and the character that it begins with

    @property
    def begin(self) -> tuple[int, int]:
        """The first place that is held."""
        return self._reading, self._at

    def excerpt(self, document: int, start: int, end: int, *, kept: tuple[int, int]) -> str:
        """Characters of a document; nothing from ``kept`` on is forgotten, if it is in this document."""
        while self._reading < document:
            self._next_document()
        while self._at + len(self._text) < end:
            piece = next(self._pieces, None)
            if piece is None:
                raise _changed()
            if document == kept[0]:
                self._forget_before(kept[1])
            self._text += piece
        return self._text[start - self._at : end - self._at]

    def _forget_before(self, character: int) -> None:
        drop = min(max(0, character - self._at), len(self._text))
        self._text, self._at = self._text[drop:], self._at + drop

    def _next_document(self) -> None:
        for _ in self._pieces:
            pass
        following = next(self._opened, None)
        if following is None:
            raise _changed()
        self._reading, self._pieces = self._reading + 1, iter(following)
        self._text, self._at = "", 0


def _changed() -> CorpusError:
    return CorpusError("the text is shorter than when it was read first", fix="run the same command again")
