"""Many short texts at a time ─▶ their tokens: the same as one by one, in a fraction of the time.

The texts are joined in memory, and every position is a position in the joined text. So whatever is computed per token
is computed for all texts in one call of NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from scoremode.text.tokenizer import SMALL_TEXT, ByteTokenizer, HuggingFaceTokenizer, TextTokenizer
from scoremode.values import Ids, Ints


@dataclass(frozen=True, slots=True, eq=False)
class EncodedTexts:
    """Several texts as tokens, without special tokens; see ``Encoding`` for what the positions mean."""

    joined: str  # all texts, one after the other
    starts: Ints  # (texts + 1,) text i is joined[starts[i] : starts[i + 1]]
    bounds: Ints  # (texts + 1,) the tokens of text i are bounds[i] … bounds[i + 1]
    ids: Ids  # (n,)
    char_start: Ints  # (n,) in ``joined``, like the others
    char_end: Ints  # (n,) ascending
    touches: Ints  # (n,)


def encode_many(tokenizer: TextTokenizer, texts: Sequence[str]) -> EncodedTexts:
    """The tokens of several texts, each exactly as ``tokenizer.encode(text, special=False)`` gives them.

    >>> found = encode_many(ByteTokenizer(), ["ab", "é"])
    >>> found.ids.tolist(), found.bounds.tolist(), found.char_end.tolist()
    ([97, 98, 195, 169], [0, 2, 4], [1, 2, 3, 3])
    """
    joined = "".join(texts)
    starts = _bounds(list(map(len, texts)))
    if isinstance(tokenizer, ByteTokenizer):
        ids = np.frombuffer(joined.encode(), dtype=np.uint8).astype(np.int32)
        ends = np.cumsum((ids & 0xC0) != 0x80)  # a byte that continues a character does not begin a new one
        bounds = starts if joined.isascii() else _bounds([len(text.encode()) for text in texts])
        return _owned(joined, starts, bounds, ids, begin=ends - 1, end=ends)
    if isinstance(tokenizer, HuggingFaceTokenizer) and all(len(text) < SMALL_TEXT for text in texts):
        found = _called(tokenizer, texts, special=False, offsets=True)
        bounds = _bounds(list(map(len, found["input_ids"])))
        count = int(bounds[-1])
        ids = np.fromiter(chain.from_iterable(found["input_ids"]), np.int32, count)
        pairs = chain.from_iterable(chain.from_iterable(found["offset_mapping"]))
        offsets = np.fromiter(pairs, np.int64, 2 * count).reshape(-1, 2)
        shift = np.repeat(starts[:-1], np.diff(bounds))
        return _owned(joined, starts, bounds, ids, begin=offsets[:, 0] + shift, end=offsets[:, 1] + shift)
    return _one_by_one(tokenizer, texts, joined, starts)


def ids_with_specials(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]] | None:
    """The ids of several texts with the tokenizer's special tokens; None if it never adds any."""
    if isinstance(tokenizer, ByteTokenizer):
        return None
    if isinstance(tokenizer, HuggingFaceTokenizer) and all(len(text) < SMALL_TEXT for text in texts):
        found: list[list[int]] = _called(tokenizer, texts, special=True, offsets=False)["input_ids"]
        return found
    return [tokenizer.encode(text, special=True).ids.tolist() for text in texts]


def _called(tokenizer: HuggingFaceTokenizer, texts: Sequence[str], *, special: bool, offsets: bool) -> Any:
    backend = tokenizer.hf.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    # through __call__, not the backend: some classes add their special tokens in Python
    return tokenizer.hf(
        list(texts),
        add_special_tokens=special,
        return_offsets_mapping=offsets,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )


def _one_by_one(tokenizer: TextTokenizer, texts: Sequence[str], joined: str, starts: Ints) -> EncodedTexts:
    found = [tokenizer.encode(text, special=False) for text in texts]
    columns: dict[str, Ints] = {
        name: np.concatenate([getattr(one, name) + at for one, at in zip(found, starts[:-1], strict=True)])
        for name in ("char_start", "char_end", "touches")
    }
    ids = np.concatenate([one.ids for one in found])
    return EncodedTexts(joined, starts, _bounds([len(one.ids) for one in found]), ids, **columns)


def _bounds(lengths: Sequence[int]) -> Ints:
    found = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=found[1:])
    return found


def _owned(joined: str, starts: Ints, bounds: Ints, ids: Ids, *, begin: Ints, end: Ints) -> EncodedTexts:
    """As ``owned_characters``, for all texts at once: no token reaches into another text, so one pass serves all."""
    counts = np.diff(bounds)
    ends: Ints = np.maximum.accumulate(np.minimum(end, np.repeat(starts[1:], counts)))
    own: Ints = np.empty_like(ends)  # a token begins where the last one ended; the first one, where its text begins
    own[1:] = ends[:-1]
    own[bounds[:-1][counts > 0]] = starts[:-1][counts > 0]
    touches = np.where(end <= begin, own, np.minimum(begin, own))
    return EncodedTexts(joined, starts, bounds, ids, own, ends, touches)
