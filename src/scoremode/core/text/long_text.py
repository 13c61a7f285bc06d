"""A text of any length ─▶ its tokens, window by window. The ids are the same as if the whole text were encoded at once.

text     ……………………………………………………………………
window 1 ├──────────────┤
window 2            ├──────────────┤      neighbours share OVERLAP characters
seam               ↑                      tokens before the seam come from window 1, those after it from window 2

A seam is a boundary between two tokens that no token can cross, inside a run of tokens that are equal in both windows:
same ids, same positions. On either side of the seam, the run has at least WORDS more such boundaries, and MARGIN
characters. So the effects of a window's ends (a space in front, half a word, stripped white space) are outside the
run. No token can cross a boundary:

BPE and Unigram    if no token of the vocabulary contains the two characters at the boundary, side by side: BPE cannot
                   merge across the boundary, and Unigram has no token there.
other tokenizers   if a word ends there and white space follows. This is a check, not a proof.

Without a seam, the two windows are joined into one, which doubles until there is a seam or the text ends. In the worst
case this is the whole text, encoded at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from scoremode.core.text.tokenizer import PROBE, HuggingFaceTokenizer, TextTokenizer
from scoremode.errors import ModelError
from scoremode.values import Bools, Ids, Ints

STEP, OVERLAP = 1 << 16, 1 << 11  # characters; longer windows take more memory, shorter ones more time
MARGIN = OVERLAP // 4  # characters that must agree on either side of a seam
WORDS = 2  # how many more uncrossable boundaries must be on either side of a seam
TRIED = 256  # the most boundaries that are tried per overlap
MOST_WINDOWS, MOST_TEXTS = 16, 1024  # the most that are encoded per call; each window takes 5 to 25 MB during a call
NOTED = 1 << 20  # characters; a longer stretch without a seam is noted
SAMPLE = 4096  # characters of a text on which the library is compared with the tokenizer's own ``encode``
ENDS = "a \n  b\n\n   \nc  \t d\u00a0\r\n x"  # white space whose positions differ between tokenizers
MOST_REFUSED = 1 << 17, 1 / 8  # limit for characters whose tokens are not the text itself: a number, or a share of all


@dataclass(frozen=True, slots=True)
class Sizes:
    """The lengths of windows, in characters. An overlap is at most half a step."""

    step: int = STEP
    overlap: int = OVERLAP
    margin: int = MARGIN

    @property
    def longest(self) -> int:
        """The length of the longest text that is one window."""
        return self.step + self.overlap


class TextWindow(NamedTuple):
    """A part of a text."""

    text: str
    is_whole: bool
    is_last: bool


@dataclass(frozen=True, slots=True, eq=False)
class EncodedWindow:
    """A part of a text as tokens."""

    text: str
    ids: Ids  # (n,)
    ends: Ints  # (n,) each token owns the characters from the previous token's end up to here


def windows_of(pieces: Iterable[str], sizes: Sizes) -> Iterator[TextWindow]:
    """Divides a text into overlapping windows. A short text is one window; an empty text is one empty window."""
    held, length, whole = list[str](), 0, True
    for piece in pieces:
        held.append(piece)
        length += len(piece)
        if length <= sizes.longest:
            continue
        text, at = "".join(held), 0
        while len(text) - at > sizes.longest:
            yield TextWindow(text[at : at + sizes.longest], is_whole=False, is_last=False)
            at, whole = at + sizes.step, False
        held, length = [text[at:]], len(text) - at
    yield TextWindow("".join(held), whole, is_last=True)


def workers() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ── windows ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class WindowEncoder:
    """Encodes windows with a tokenizer's own ``encode``."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.any_cut = bool(getattr(tokenizer, "each_character_alone", False))  # may a text be cut anywhere?

    def encode(self, texts: Sequence[str], *, special: bool) -> list[EncodedWindow]:
        found = (self.tokenizer.encode(text, special=special) for text in texts)
        return [EncodedWindow(text, one.ids, one.char_end) for text, one in zip(texts, found, strict=True)]

    def is_uncrossable(self, window: EncodedWindow, i: int) -> bool:
        """Is it impossible for a token to cross the boundary before token ``i``?"""
        text, at = window.text, int(window.ends[i - 1])
        return 0 < at < len(text) and text[at].isspace() and not text[at - 1].isspace()


class LibraryEncoder(WindowEncoder):
    """Encodes windows with the library behind a fast tokenizer, on all cores."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        super().__init__(tokenizer)
        self.backend, self.vocabulary = tokenizer.backend, tokenizer.vocabulary
        self._prepare = tokenizer.prepare
        self._encoded = self._refused = 0  # characters that were encoded; those whose tokens were not the text itself

    def is_same(self, text: str) -> bool:
        """Does the library give the same tokens as the tokenizer's ``encode``? Some classes change tokens in Python."""
        for special in (False, True):
            wanted = self.tokenizer.encode(text, special=special)
            for way in (self.encode, self.encode_with_positions):
                (found,) = way([text], special=special)
                if not (np.array_equal(wanted.ids, found.ids) and np.array_equal(wanted.char_end, found.ends)):
                    return False
        return True

    def encode(self, texts: Sequence[str], *, special: bool) -> list[EncodedWindow]:
        """Encodes windows. If the bytes of the tokens are the text itself, computes positions from these bytes."""
        positions, (least, share) = self.vocabulary.byte_positions, MOST_REFUSED
        adds_tokens = special and self.backend.num_special_tokens_to_add(False)
        if positions is None or adds_tokens or self._refused > max(least, self._encoded * share):
            return self.encode_with_positions(texts, special=special)
        self._prepare(texts)
        found = list[EncodedWindow | None]()
        encodings = _used_up(self.backend.encode_batch_fast(list(texts), add_special_tokens=False))
        for text, encoding in zip(texts, encodings, strict=True):
            ids = encoding.ids
            as_array = np.array(ids, dtype=np.int32)
            ends = positions.ends(text, ids, as_array)
            found.append(None if ends is None else EncodedWindow(text, as_array, _ascending(ends, text)))
        refused = [text for text, window in zip(texts, found, strict=True) if window is None]
        self._encoded, self._refused = self._encoded + sum(map(len, texts)), self._refused + sum(map(len, refused))
        others = iter(self.encode_with_positions(refused, special=False) if refused else ())
        return [next(others) if window is None else window for window in found]

    def encode_with_positions(self, texts: Sequence[str], *, special: bool) -> list[EncodedWindow]:
        self._prepare(texts)
        found = []
        encodings = _used_up(self.backend.encode_batch(list(texts), add_special_tokens=special))
        for text, encoding in zip(texts, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.int32)
            offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(ids))
            found.append(EncodedWindow(text, ids, _ascending(offsets[1::2], text)))
        return found

    def is_uncrossable(self, window: EncodedWindow, i: int) -> bool:
        if not self.vocabulary.has_plain_names:
            return super().is_uncrossable(window, i)
        return self.vocabulary.never_side_by_side(int(window.ids[i - 1]), int(window.ids[i]))


def window_encoder(tokenizer: TextTokenizer, text: str) -> WindowEncoder:
    """Returns the fastest encoder with the tokenizer's own tokens; ``text`` is the start of the text to encode."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        library = LibraryEncoder(tokenizer)
        if all(map(library.is_same, (PROBE, ENDS, text[:SAMPLE]))):
            return library
    return WindowEncoder(tokenizer)


def _used_up(encodings: list[Any]) -> Iterator[Any]:
    """Yields each encoding and drops it from the list, because an encoding may take tens of megabytes."""
    encodings.reverse()
    while encodings:
        yield encodings.pop()


def _ascending(ends: Ints, text: str) -> Ints:
    found: Ints = np.minimum(np.maximum.accumulate(ends), len(text)) if len(ends) else ends
    return found


# ── seams ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def find_seam(
    left: EncodedWindow, right: EncodedWindow, encoder: WindowEncoder, sizes: Sizes
) -> tuple[int, int] | None:
    """Returns (i, j): tokens of ``left`` before i and of ``right`` from j on encode both windows; None if no seam."""
    shift = len(left.text) - sizes.overlap  # where the right window begins in the left window
    skipped = int(np.searchsorted(left.ends, shift, side="right"))
    mine = left.ends[skipped:] - shift
    theirs = right.ends[: int(np.searchsorted(right.ends, sizes.overlap, side="right"))]
    common = np.intersect1d(mine, theirs)
    common = common[(common > 0) & (common < sizes.overlap)]
    nearest = common[np.argsort(np.abs(common - sizes.overlap // 2), kind="stable")][:TRIED]
    for end in nearest.tolist():
        i = skipped + int(np.searchsorted(mine, end, side="right"))
        j = int(np.searchsorted(theirs, end, side="right"))
        if i < len(left.ids) and j < len(right.ids) and encoder.is_uncrossable(right, j):
            run = _equal_tokens(left, right, i, j, shift)
            if _is_inside(right, j, run, encoder, sizes.margin):
                return i, j
    return None


def _equal_tokens(left: EncodedWindow, right: EncodedWindow, i: int, j: int, shift: int) -> tuple[int, int]:
    """Returns how many tokens in a row are equal in both windows directly before a boundary, and directly after it."""
    before, after = min(i, j), min(len(left.ids) - i, len(right.ids) - j)
    mine, theirs = slice(i - before, i + after), slice(j - before, j + after)
    same: Bools = left.ids[mine] == right.ids[theirs]
    same &= left.ends[mine] - shift == right.ends[theirs]
    return _leading(same[:before][::-1]), _leading(same[before:])


def _leading(same: Bools) -> int:
    return len(same) if same.all() else int(np.argmin(same))


def _is_inside(window: EncodedWindow, j: int, run: tuple[int, int], encoder: WindowEncoder, margin: int) -> bool:
    """Do both encodings agree on enough tokens around ``j``? ``run`` counts those before it, and those from it on."""
    ends, (before, after) = window.ends, run
    began = int(ends[j - before - 1]) if before < j else 0
    at, ended = int(ends[j - 1]), int(ends[j + after - 1])
    if at - began < margin or ended - at < margin:
        return False
    for side in (range(j - 1, j - before, -1), range(j + 1, j + after)):
        others = (k for k in side if encoder.is_uncrossable(window, k))
        if len(list(islice(others, WORDS))) < WORDS:
            return False
    return True


# ── texts ────────────────────────────────────────────────────────────────────────────────────────────────────────────
Labelled = tuple[TextWindow, EncodedWindow]


class LongTextEncoder:
    """Encodes texts one after the other, and reads ahead: two batches of windows are in memory."""

    def __init__(self, tokenizer: TextTokenizer, *, special: bool, sizes: Sizes | None = None) -> None:
        self.tokenizer, self.special, self.sizes = tokenizer, special, sizes or Sizes()
        self.encoder: WindowEncoder | None = None  # chosen when the first text is read
        self._uncut = 0  # characters of the longest part that could not be cut

    def encode(self, texts: Iterable[Iterable[str]]) -> Iterator[Iterator[EncodedWindow]]:
        """Yields for each text, given in pieces, its tokens in parts. Read all its parts before the next text."""
        labelled = self._encoded(self._windows(texts))
        for first in labelled:
            yield self._parts(*first, _until_last(first[0], labelled))

    @property
    def notes(self) -> tuple[str, ...]:
        if self._uncut < NOTED:
            return ()
        return (f"no safe place to cut {self._uncut:,} characters of the text: the tokenizer encoded them at once",)

    def _windows(self, texts: Iterable[Iterable[str]]) -> Iterator[TextWindow]:
        for text in texts:
            pieces = iter(text)
            begins = next(pieces, "")
            if self.encoder is None:
                self.encoder = window_encoder(self.tokenizer, begins)
            if self.encoder.any_cut:
                self.sizes = replace(self.sizes, overlap=0)
            yield from windows_of(chain([begins], pieces), self.sizes)

    def _encoded(self, windows: Iterator[TextWindow]) -> Iterator[Labelled]:
        """Yields all windows in order with their tokens. Encodes the next batch while the caller uses the last one."""
        with ThreadPoolExecutor(1) as thread:
            batch: list[TextWindow] = []
            pending: Future[list[EncodedWindow]] | None = None
            for following in self._batches(windows):
                future = thread.submit(self._encode_batch, following)
                if pending is not None:
                    yield from zip(batch, pending.result(), strict=True)
                batch, pending = following, future
            if pending is not None:
                yield from zip(batch, pending.result(), strict=True)

    def _batches(self, windows: Iterator[TextWindow]) -> Iterator[list[TextWindow]]:
        most = min(2 * workers(), MOST_WINDOWS) * self.sizes.longest
        batch, size = list[TextWindow](), 0
        for window in windows:
            if batch and (size + len(window.text) > most or len(batch) == MOST_TEXTS):
                yield batch
                batch, size = [], 0
            batch.append(window)
            size += len(window.text)
        if batch:
            yield batch

    def _encode_batch(self, batch: list[TextWindow]) -> list[EncodedWindow]:
        """Encodes a batch of windows. Only windows that are a whole text get their special tokens here."""
        whole, parts = ([window.text for window in batch if window.is_whole is kind] for kind in (True, False))
        of_whole, of_parts = iter(self._encode(whole, special=self.special)), iter(self._encode(parts))
        return [next(of_whole if window.is_whole else of_parts) for window in batch]

    def _encode(self, texts: Sequence[str], *, special: bool = False) -> list[EncodedWindow]:
        assert self.encoder is not None, "no text was read yet"
        return self.encoder.encode(texts, special=special) if texts else []

    # ── one text ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _parts(
        self, window: TextWindow, first: EncodedWindow, rest: Iterator[EncodedWindow]
    ) -> Iterator[EncodedWindow]:
        if window.is_whole:
            yield first
            return
        added = self._added_to(window.text[:SAMPLE])
        if added is None:
            text = "".join([first.text, *(following.text[self.sizes.overlap :] for following in rest)])
            self._uncut = max(self._uncut, len(text))
            yield from self._encode([text], special=self.special)
            return
        before, after = added
        yield EncodedWindow("", before, np.zeros(len(before), np.int64))
        yield from self._joined(first, rest)
        yield EncodedWindow("", after, np.zeros(len(after), np.int64))

    def _joined(self, held: EncodedWindow, following: Iterator[EncodedWindow]) -> Iterator[EncodedWindow]:
        begin = done = 0  # the first token that was not yielded yet, and the first character that this token may own
        for right in following:
            seam = self._seam(held, right)
            if seam is None:
                held = self._widened(held, right, following, begin)
                continue
            i, j = seam
            yield _between(held, begin, i, done)
            begin, done = j, int(right.ends[j - 1]) if j else 0
            held = right
        yield _between(held, begin, len(held.ids), done)

    def _seam(self, left: EncodedWindow, right: EncodedWindow) -> tuple[int, int] | None:
        assert self.encoder is not None
        if self.encoder.any_cut:
            return len(left.ids), 0
        return find_seam(left, right, self.encoder, self.sizes)

    def _widened(
        self, held: EncodedWindow, right: EncodedWindow, following: Iterator[EncodedWindow], begin: int
    ) -> EncodedWindow:
        """Joins a window with the following ones into a window at least twice as long, if the text is that long."""
        parts, length = [held.text], len(held.text)
        for more in chain([right], following):
            parts.append(more.text[self.sizes.overlap :])
            length += len(parts[-1])
            if length >= 2 * len(held.text):
                break
        (wide,) = self._encode(["".join(parts)])
        given = slice(begin)
        if not (
            np.array_equal(wide.ids[given], held.ids[given]) and np.array_equal(wide.ends[given], held.ends[given])
        ):
            raise ModelError(
                "this tokenizer gives other tokens to the same words if more text follows far behind them",
                fix="give the text as rows of a .jsonl file, each short enough to be encoded at once",
            )
        self._uncut = max(self._uncut, length)
        return wide

    def _added_to(self, sample: str) -> tuple[Ids, Ids] | None:
        """Returns the special tokens that the tokenizer adds before and after a text; None if it changes more."""
        (plain,), (full,) = (self._encode([sample], special=special) for special in (False, self.special))
        for lead in range(len(full.ids) - len(plain.ids) + 1):
            inside = slice(lead, lead + len(plain.ids))
            same = np.array_equal(full.ids[inside], plain.ids) and np.array_equal(full.ends[inside], plain.ends)
            if same and not full.ends[:lead].any():
                return full.ids[:lead], full.ids[lead + len(plain.ids) :]
        return None


def _until_last(window: TextWindow, labelled: Iterator[Labelled]) -> Iterator[EncodedWindow]:
    """Yields the windows of a text after its first one."""
    while not window.is_last:
        window, encoded = next(labelled)
        yield encoded


def _between(held: EncodedWindow, begin: int, end: int, done: int) -> EncodedWindow:
    """Returns tokens ``begin`` to ``end`` of a window with their text, which begins at the character ``done``."""
    stop = int(held.ends[end - 1]) if end > begin else done
    return EncodedWindow(held.text[done:stop], held.ids[begin:end], held.ends[begin:end] - done)
