"""How a tokenizer encodes windows of a long text, and what is known about the places where windows may be joined.

A boundary between two tokens is "apart" if no token can reach across it, whatever stands further away:

word   the two tokens belong to different words of the tokenizer's own pre-tokenizer. A model (BPE, Unigram, WordPiece)
       gives the ids of each word from that word alone. A word itself depends on what stands before it only by where
       the word before it ends, unless the pre-tokenizer's pattern looks back; then this is a check, not a proof.
pair   no token of the vocabulary contains the two characters that meet here, side by side. So BPE can never merge
       across, and Unigram has no token there. (Unigram adds up scores: two segmentations that are equally good to the
       last bit might be told apart in another way in a longer text. There this is a check, not a proof.)
space  a tokenizer that only gives ids and positions: a space or a newline follows a word. This is a check alone.

Words and positions are a third of a library's work. Where the bytes of tokens give the positions (byte_pieces.py) it is
asked for ids alone, and windows are joined where a pair is in no token; if there is no such place, it is asked in full.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import numpy as np

from scoremode.text.byte_pieces import BytePieces
from scoremode.text.tokenizer import PROBE, HuggingFaceTokenizer, TextTokenizer
from scoremode.values import Ids, Ints

SAMPLE = 4096  # characters of a text on which the quick way is compared with the tokenizer's own call
LOOKS_BACK = b"(?<"  # in the pattern of a pre-tokenizer
ENDS = "a \n  b\n\n   \nc  \t d\u00a0\r\n x"  # white space whose positions tokenizers count in different ways
TRIED, MOST_REFUSED = 1 << 20, 1 / 8  # characters; where tokens are not the text more often, asking twice is no gain
Apart = Callable[[int], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A window as tokens."""

    text: str
    ids: Ids  # (n,)
    ends: Ints  # (n,) each token owns the characters up to here
    apart: tuple[Apart, ...]  # ways to know that no token reaches across the boundary before a token; the best first
    in_full: bool = True  # are these all the ways that the coder has?


class Coder(Protocol):
    """Encodes many windows at once."""

    exact: bool  # is a boundary that is apart a proof? Else long stretches must agree
    any_cut: bool  # is every cut right?

    def encode(self, texts: Sequence[str], *, special: bool) -> list[Coded]: ...

    def encode_in_full(self, texts: Sequence[str], *, special: bool) -> list[Coded]:
        """The same tokens, with all ways to know where they are apart."""
        ...


_FAST: WeakKeyDictionary[HuggingFaceTokenizer, FastCoder] = WeakKeyDictionary()
"""What is known about a vocabulary stays known from one text to the next."""


def coder_for(tokenizer: TextTokenizer, text: str) -> Coder:
    """The quickest coder for a tokenizer; ``text`` is the beginning of what will be encoded."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        fast = _FAST.get(tokenizer) or _FAST.setdefault(tokenizer, FastCoder(tokenizer))
        return fast if all(map(fast.is_same, (PROBE, ENDS, text))) else PlainCoder(tokenizer)
    return PlainCoder(tokenizer, any_cut=bool(getattr(tokenizer, "each_character_alone", False)))


class PlainCoder:
    """Any tokenizer, through its own ``encode``."""

    exact = False

    def __init__(self, tokenizer: TextTokenizer, *, any_cut: bool = False) -> None:
        self.tokenizer, self.any_cut = tokenizer, any_cut

    def encode(self, texts: Sequence[str], *, special: bool) -> list[Coded]:
        return [self._coded(text, special=special) for text in texts]

    encode_in_full = encode

    def _coded(self, text: str, *, special: bool) -> Coded:
        found = self.tokenizer.encode(text, special=special)
        ends = found.char_end

        def after_a_word(i: int) -> bool:
            at = int(ends[i - 1])
            return 0 < at < len(text) and text[at].isspace() and not text[at - 1].isspace()

        return Coded(text, found.ids, ends, (after_a_word,))


class FastCoder:
    """A fast tokenizer of Transformers, through its library: all cores, and the words of its pre-tokenizer."""

    any_cut = False

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = ref(tokenizer)  # a strong one would keep it in _FAST forever
        self.backend = tokenizer.hf.backend_tokenizer
        splitter = self.backend.pre_tokenizer
        self.exact = splitter is None or LOOKS_BACK not in splitter.__getstate__()
        self._encoded = self._refused = 0  # characters; those whose tokens were not the text itself

    @property
    def tokenizer(self) -> HuggingFaceTokenizer:
        found = self._tokenizer()
        assert found is not None, "the tokenizer is gone"
        return found

    def is_same(self, text: str) -> bool:
        """Does the library give what the tokenizer's own call gives? Some classes change its answer in Python."""
        for special in (False, True):
            wanted = self.tokenizer.encode(text[:SAMPLE], special=special)
            for way in (self.encode, self.encode_in_full):
                found = way([text[:SAMPLE]], special=special)[0]
                if not (np.array_equal(wanted.ids, found.ids) and np.array_equal(wanted.char_end, found.ends)):
                    return False
        return True

    def encode(self, texts: Sequence[str], *, special: bool) -> list[Coded]:
        bare = not special or not self.backend.num_special_tokens_to_add(False)
        if not bare or self._bytes is None or self._refused > max(TRIED, self._encoded) * MOST_REFUSED:
            return self.encode_in_full(texts, special=special)
        self._get_ready(texts)
        encodings = _used_up(self.backend.encode_batch_fast(list(texts), add_special_tokens=False))
        found = [self._from_bytes(text, encoding.ids) for text, encoding in zip(texts, encodings, strict=True)]
        refused = [text for text, coded in zip(texts, found, strict=True) if coded is None]
        self._encoded, self._refused = self._encoded + _length(texts), self._refused + _length(refused)
        others = iter(self.encode_in_full(refused, special=False) if refused else ())
        return [next(others) if coded is None else coded for coded in found]

    def encode_in_full(self, texts: Sequence[str], *, special: bool) -> list[Coded]:
        self._get_ready(texts)
        encodings = _used_up(self.backend.encode_batch(list(texts), add_special_tokens=special))
        return [self._coded(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def _get_ready(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.tokenizer.require_memory(text)
        self.tokenizer.use_whole_texts()

    def _from_bytes(self, text: str, ids: list[int]) -> Coded | None:
        """A window without the library's positions and words, if the tokens are the text itself."""
        assert self._bytes is not None
        as_array = np.array(ids, dtype=np.int32)
        ends = self._bytes.ends(text, ids, as_array)
        if ends is None:
            return None
        ends = np.minimum(np.maximum.accumulate(ends), len(text)) if len(ids) else ends
        return Coded(text, as_array, ends, (self._no_such_pair(as_array),), in_full=False)

    def _coded(self, text: str, encoding: Any) -> Coded:
        ids = np.array(encoding.ids, dtype=np.int32)
        offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(ids))
        ends = np.minimum(np.maximum.accumulate(offsets[1::2]), len(text)) if len(ids) else offsets
        word, no_such_pair = encoding.token_to_word, self._no_such_pair(ids)

        def other_word(i: int) -> bool:
            return bool(word(i - 1) != word(i))

        def either(i: int) -> bool:
            return other_word(i) or no_such_pair(i)

        return Coded(text, ids, ends, (other_word, either) if self._merges else (other_word,))

    def _no_such_pair(self, ids: Ids) -> Apart:
        return lambda i: (self._last[ids[i - 1]] << 32 | self._first[ids[i]]) not in self._pairs

    @cached_property
    def _bytes(self) -> BytePieces | None:
        return BytePieces.of(self.backend, self._names) if self._merges else None

    @cached_property
    def _merges(self) -> bool:
        """Is the model one whose tokens are runs of its own characters?"""
        model = self.model
        plain = not any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"))
        return model.get("type") in ("BPE", "Unigram") and plain

    @cached_property
    def model(self) -> dict[str, Any]:
        """What the library says about its model, without the vocabulary."""
        names = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
        model = self.backend.model
        return {"type": type(model).__name__, **{name: getattr(model, name, None) for name in names}}

    @cached_property
    def _names(self) -> list[str]:
        return [name or "" for name in map(self.backend.id_to_token, range(self.tokenizer.facts.size))]

    @cached_property
    def _first(self) -> list[int]:
        return [ord(name[0]) if name else 0 for name in self._names]

    @cached_property
    def _last(self) -> list[int]:
        return [ord(name[-1]) if name else 0 for name in self._names]

    @cached_property
    def _pairs(self) -> frozenset[int]:
        """Two characters that stand side by side in some token, as one number each."""
        found: set[int] = {0}  # an id without a name: nothing is known about it
        for name in self._names:
            points = [*map(ord, name)]
            found.update(a << 32 | b for a, b in pairwise(points))
        return frozenset(found)


def _length(texts: Sequence[str]) -> int:
    return sum(map(len, texts))


def _used_up(encodings: list[Any]) -> Iterator[Any]:
    """Each in turn, forgotten as soon as the next is asked for: one may take tens of megabytes."""
    encodings.reverse()
    while encodings:
        yield encodings.pop()


def definition(tokenizer: TextTokenizer) -> str | None:
    """A hash of all that decides a tokenizer's ids, for a cache; None if that is not known.

    The fingerprint is not enough: two tokenizers with one vocabulary may cut a text differently.
    """
    if getattr(tokenizer, "each_character_alone", False):
        return tokenizer.facts.fingerprint
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    from importlib.metadata import version

    hasher = hashlib.sha256(tokenizer.facts.fingerprint.encode())
    tokenizer.use_whole_texts()
    hasher.update(tokenizer.hf.backend_tokenizer.to_str().encode())
    kind = type(tokenizer.hf)
    known = [f"{kind.__module__}.{kind.__qualname__}", version("tokenizers"), version("transformers")]
    hasher.update(json.dumps(known).encode())
    return hasher.hexdigest()
