"""A text of any length ─▶ its tokens, window by window, with the same ids as the whole text gives.

text     ……………………………………………………………………
window 1 ├──────────────┤
window 2            ├──────────────┤      neighbours share OVERLAP characters
seam               ↑                      tokens before it are taken from window 1, those after it from window 2

A seam is a boundary between two tokens that both windows have, where no token can reach across (coders.py), inside a
run of tokens that are equal in both windows: same ids, same positions. The run has at least WORDS more such boundaries
on either side, and MARGIN characters. So what a tokenizer does at the ends of a window (a space in front, half a word,
white space that is stripped) is outside of the run.

If there is no seam, the two windows become one, and that one doubles until there is a seam or the text ends. In the
end this is the whole text, encoded at once, as if it had never been cut.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np

from scoremode.errors import ModelError
from scoremode.text.coders import SAMPLE, Coded, Coder, coder_for
from scoremode.text.tokenizer import TextTokenizer
from scoremode.values import Bools, Ids, Ints

STEP, OVERLAP = 1 << 16, 1 << 11  # characters; longer windows take more memory, shorter ones more time
MARGIN = OVERLAP // 8  # characters of agreement on either side of a seam
CHECKED_MARGIN = OVERLAP // 4  # the same where nothing but agreement speaks for a seam
WORDS = 2  # more boundaries that are apart, on either side of a seam
TRIED = 256  # boundaries that are tried in one overlap
MOST_WINDOWS, MOST_TEXTS = 16, 1024  # that are encoded in one call; each window takes 5 to 25 MB meanwhile
NOTED = 1 << 20  # characters; a longer stretch without a seam is noted


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long windows are, in characters. An overlap is at most half a step."""

    step: int = STEP
    overlap: int = OVERLAP
    margin: int = MARGIN
    checked_margin: int = CHECKED_MARGIN

    @property
    def longest(self) -> int:
        """The longest text that is one window."""
        return self.step + self.overlap


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Consecutive tokens of one text, and the characters that they own."""

    ids: Ids  # (n,)
    ends: Ints  # (n,) from the beginning of ``text``
    text: str


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a text."""

    text: str
    is_first: bool
    is_last: bool

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last


def windows_of(pieces: Iterable[str], sizes: Sizes) -> Iterator[Window]:
    """A text as windows that overlap. A text that fits into one window is one; an empty text is an empty window."""
    held, length, first = list[str](), 0, True
    for piece in pieces:
        held.append(piece)
        length += len(piece)
        if length <= sizes.longest:
            continue
        text, at = "".join(held), 0
        while len(text) - at > sizes.longest:
            yield Window(text[at : at + sizes.longest], first, is_last=False)
            at, first = at + sizes.step, False
        held, length = [text[at:]], len(text) - at
    yield Window("".join(held), first, is_last=True)


def workers() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ── seams ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def find_seam(left: Coded, right: Coded, overlap: int, coder: Coder, sizes: Sizes) -> tuple[int, int] | None:
    """(i, j) such that the tokens before i of ``left`` and those from j of ``right`` are those of both; or None."""
    shift = len(left.text) - overlap  # where the right window begins in the left one
    skipped = int(np.searchsorted(left.ends, shift, side="right"))
    mine, theirs = left.ends[skipped:] - shift, right.ends[: int(np.searchsorted(right.ends, overlap, side="right"))]
    common = np.intersect1d(mine, theirs)
    common = common[(common > 0) & (common < overlap)]
    nearest = common[np.argsort(np.abs(common - overlap // 2), kind="stable")][:TRIED].tolist()
    exact = coder.exact and left.in_full and right.in_full  # else the words of a pre-tokenizer are not known
    both = _Pair(left, right, shift, sizes.margin if exact else sizes.checked_margin)
    for way in range(max(len(left.apart), len(right.apart))):
        for end in nearest:
            i = skipped + int(np.searchsorted(mine, end, side="right"))
            j = int(np.searchsorted(theirs, end, side="right"))
            if both.is_seam(i, j, way):
                return i, j
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """Two windows; the right one begins ``shift`` characters after the left one."""

    left: Coded
    right: Coded
    shift: int
    margin: int

    def is_seam(self, i: int, j: int, way: int) -> bool:
        """Is no token across the boundary before these tokens, and do both windows agree around it?"""
        ends = self.right.ends
        if not (0 < i < len(self.left.ids) and 0 < j < len(ends) and self._apart(i, j, way)):
            return False
        before, after = self._agreement(i, j)
        began = int(ends[j - before - 1]) if before < j else 0
        at, ended = int(ends[j - 1]), int(ends[j + after - 1])
        if at - began < self.margin or ended - at < self.margin:
            return False
        return self._boundaries(i, j, way, range(-1, -before, -1)) and self._boundaries(i, j, way, range(1, after))

    def _apart(self, i: int, j: int, way: int) -> bool:
        ways = self.left.apart, self.right.apart
        return all(known[min(way, len(known) - 1)](at) for known, at in zip(ways, (i, j), strict=True))

    def _agreement(self, i: int, j: int) -> tuple[int, int]:
        """How many tokens are equal without a gap: directly before the boundary, and directly after it."""
        most = min(i, j)
        before = _leading(self._equal(i - most, j - most, most)[::-1])
        return before, _leading(self._equal(i, j, min(len(self.left.ids) - i, len(self.right.ids) - j)))

    def _equal(self, i: int, j: int, count: int) -> Bools:
        left, right = self.left, self.right
        same: Bools = left.ids[i : i + count] == right.ids[j : j + count]
        same &= left.ends[i : i + count] - self.shift == right.ends[j : j + count]
        return same

    def _boundaries(self, i: int, j: int, way: int, steps: range) -> bool:
        """Are there WORDS more boundaries that are apart, inside of the agreement?"""
        found = (step for step in steps if self._apart(i + step, j + step, way))
        return len(list(islice(found, WORDS))) == WORDS


def _leading(same: Bools) -> int:
    return len(same) if same.all() else int(np.argmin(same))


# ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────────────
Labelled = tuple[Window, Coded]


class PieceEncoder:
    """Encodes texts one after the other, reading ahead by a few windows: two batches of them are in memory."""

    def __init__(self, tokenizer: TextTokenizer, *, special: bool, sizes: Sizes | None = None) -> None:
        self.tokenizer, self.special, self.sizes = tokenizer, special, sizes or Sizes()
        self._uncut = 0  # characters of the longest part that could not be cut
        self._coder: Coder | None = None

    def encode(self, texts: Iterable[Iterable[str]]) -> Iterator[Iterator[Stretch]]:
        """For each text, given in pieces, its tokens in stretches. Each must be used up before the next."""
        flat = self._coded(self._all_windows(texts))
        for first in flat:
            yield self._stretches(chain([first], _until_last(first, flat)))

    def _all_windows(self, texts: Iterable[Iterable[str]]) -> Iterator[Window]:
        for text in texts:
            pieces = iter(text)
            begins = next(pieces, "")
            if self._coder is None:
                self._coder = coder_for(self.tokenizer, begins[:SAMPLE])
            sizes = replace(self.sizes, overlap=0) if self._coder.any_cut else self.sizes
            yield from windows_of(chain([begins], pieces), sizes)

    @property
    def coder(self) -> Coder:
        assert self._coder is not None, "no text was read yet"
        return self._coder

    # ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _coded(self, windows: Iterator[Window]) -> Iterator[Labelled]:
        """All windows in order with their tokens; the next batch is encoded while the last one is looked at."""
        with ThreadPoolExecutor(1) as thread:
            waiting: deque[tuple[list[Window], Future[list[Coded]]]] = deque()
            for batch in self._batches(windows):
                waiting.append((batch, thread.submit(self._encode_batch, batch)))
                if len(waiting) > 1:
                    yield from _answered(*waiting.popleft())
            for pending in waiting:
                yield from _answered(*pending)

    def _batches(self, windows: Iterator[Window]) -> Iterator[list[Window]]:
        most = min(2 * workers(), MOST_WINDOWS) * self.sizes.longest
        batch, size = list[Window](), 0
        for window in windows:
            if batch and (size + len(window.text) > most or len(batch) == MOST_TEXTS):
                yield batch
                batch, size = [], 0
            batch.append(window)
            size += len(window.text)
        if batch:
            yield batch

    def _encode_batch(self, batch: list[Window]) -> list[Coded]:
        whole = [window.text for window in batch if window.is_whole]
        parts = [window.text for window in batch if not window.is_whole]
        of_whole = iter(self.coder.encode(whole, special=self.special) if whole else ())
        of_parts = iter(self.coder.encode(parts, special=False) if parts else ())
        return [next(of_whole if window.is_whole else of_parts) for window in batch]

    # ── one text ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _stretches(self, windows: Iterator[Labelled]) -> Iterator[Stretch]:
        window, coded = next(windows)
        if window.is_whole:
            yield Stretch(coded.ids, coded.ends, coded.text)
            return
        added = self._added_to(window.text[:SAMPLE])
        if added is None:
            yield self._at_once(coded, windows)
            return
        before, after = added
        if len(before):
            yield Stretch(before, np.zeros(len(before), np.int64), "")
        yield from self._joined(coded, (found for _, found in windows))
        if len(after):
            yield Stretch(after, np.zeros(len(after), np.int64), "")

    def _at_once(self, first: Coded, rest: Iterator[Labelled]) -> Stretch:
        text = "".join([first.text, *(coded.text[self.sizes.overlap :] for _, coded in rest)])
        self._uncut = max(self._uncut, len(text))
        (whole,) = self.coder.encode([text], special=self.special)
        return Stretch(whole.ids, whole.ends, text)

    def _joined(self, held: Coded, following: Iterator[Coded]) -> Iterator[Stretch]:
        begin = done = 0  # the first token that was not given, the first character that it may own
        for right in following:
            seam = self._seam(held, right)
            if seam is None:
                held = self._widened(held, right, following, begin)
                continue
            i, j = seam
            yield _stretch(held, begin, i, done)
            begin, done = j, int(right.ends[j - 1]) if j else 0
            held = right
        yield _stretch(held, begin, len(held.ids), done)

    def _seam(self, left: Coded, right: Coded) -> tuple[int, int] | None:
        if self.coder.any_cut:
            return len(left.ids), 0
        seam = find_seam(left, right, self.sizes.overlap, self.coder, self.sizes)
        if seam is not None or (left.in_full and right.in_full):
            return seam
        left, right = self.coder.encode_in_full([left.text, right.text], special=False)
        return find_seam(left, right, self.sizes.overlap, self.coder, self.sizes)

    def _widened(self, held: Coded, right: Coded, following: Iterator[Coded], begin: int) -> Coded:
        """One window instead of two or more: at least twice as long, if the text is."""
        overlap, parts, length = self.sizes.overlap, [held.text, right.text[self.sizes.overlap :]], len(held.text)
        wanted = 2 * length
        length += len(parts[1])
        while length < wanted and (more := next(following, None)) is not None:
            parts.append(more.text[overlap:])
            length += len(parts[-1])
        (wide,) = self.coder.encode(["".join(parts)], special=False)
        same = np.array_equal(wide.ids[:begin], held.ids[:begin]) and np.array_equal(
            wide.ends[:begin], held.ends[:begin]
        )
        if not same:
            raise ModelError(
                "this tokenizer gives other tokens to the same words if more text follows far behind them",
                fix="give the text as rows of a .jsonl file, each short enough to be encoded at once",
            )
        self._uncut = max(self._uncut, length)
        return wide

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the result should know."""
        if self._uncut < NOTED:
            return ()
        return (f"no safe place to cut {self._uncut:,} characters of the text: the tokenizer encoded them at once",)

    def _added_to(self, sample: str) -> tuple[Ids, Ids] | None:
        """The special tokens that the tokenizer puts before and after a text; None if it changes more than that."""
        if not self.special:
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        (plain,), (full,) = (self.coder.encode([sample], special=special) for special in (False, True))
        for lead in range(len(full.ids) - len(plain.ids) + 1):
            inside = slice(lead, lead + len(plain.ids))
            same = np.array_equal(full.ids[inside], plain.ids) and np.array_equal(full.ends[inside], plain.ends)
            if same and not full.ends[:lead].any():
                return full.ids[:lead], full.ids[lead + len(plain.ids) :]
        return None


def _answered(batch: list[Window], coded: Future[list[Coded]]) -> Iterator[Labelled]:
    return zip(batch, coded.result(), strict=True)


def _until_last(first: Labelled, flat: Iterator[Labelled]) -> Iterator[Labelled]:
    """The rest of the text that ``first`` begins."""
    if first[0].is_last:
        return
    for window, coded in flat:
        yield window, coded
        if window.is_last:
            return


def _stretch(held: Coded, begin: int, end: int, done: int) -> Stretch:
    """Tokens of a window, with the text from the first character that is not owned yet to the last that they own."""
    stop = int(held.ends[end - 1]) if end > begin else done
    return Stretch(held.ids[begin:end], held.ends[begin:end] - done, held.text[done:stop])
