"""Texts after prompts ─▶ Tokens: a document for each, its prompt as context, and the tokens after it as targets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from scoremode.core.text.corpus import Corpus
from scoremode.core.text.documents import RereadDocuments
from scoremode.core.text.slices import ANSWER, PROMPT, SliceRule, Slicing
from scoremode.core.text.tokenizer import TextTokenizer
from scoremode.core.text.tokens import SpelledIds, Tokens, lone_bytes, tokens_of_ids
from scoremode.values import Ids, Ints, frozen


def tokens_of_texts(
    prompt: Ints,
    prompt_ids: Sequence[Ids],
    written: Sequence[Ids],
    tokenizer: TextTokenizer,
    *,
    rules: Sequence[SliceRule],
    notes: Sequence[str],
) -> tuple[RereadDocuments, Tokens]:
    """Makes documents and tokens with exactly the given ids.

    ``prompt`` numbers the prompt of each text: texts of one prompt are not independent. ``rules`` are slices.
    """
    known = tokenizer.pieces()
    ids = [np.concatenate(pair) for pair in zip(prompt_ids, written, strict=True)]
    spelled = [SpelledIds.of(one, known) for one in ids]
    empty, lone = sum(not len(one) for one in written), sum(one.lone for one in spelled)
    said = [f"{empty:,} of {len(ids):,} texts have no written token, and so no target"] if empty else []
    said += [lone_bytes(lone)] if lone else []
    texts = [one.text for one in spelled]
    size = sum(len(one.raw) for one in spelled)
    corpus = Corpus("texts after prompts", "documents", lambda: iter(texts), "", len(ids), size)  # never hashed
    tokens, slicing = tokens_of_ids(ids, spelled, tokenizer), Slicing(rules)
    lengths = np.diff(tokens.doc_starts)
    place = np.arange(len(tokens)) - np.repeat(tokens.doc_starts[:-1], lengths)
    tokens = replace(
        tokens,
        target_mask=frozen(place >= np.repeat([len(one) for one in prompt_ids], lengths)),
        doc_group=frozen(prompt),
        slices=frozen(_slices(slicing, prompt_ids, ids, tokenizer, known)),
        slice_names=slicing.names,
        notes=(*notes, *said, *slicing.finish()),
    )
    return RereadDocuments(corpus, "texts", tokenizer, rules=tuple(rules)), tokens


def _slices(
    slicing: Slicing, prompts: Sequence[Ids], ids: Sequence[Ids], tokenizer: TextTokenizer, known: list[bytes]
) -> Ids:
    """Returns the slice of every token. Markers may be special tokens, which have names and no text."""
    used = np.unique(np.concatenate(ids))
    named = [*known, *[b""] * (int(used.max(initial=-1)) + 1 - len(known))]
    for token in used.tolist():
        named[token] = named[token] or tokenizer.token_text(token).encode()
    found = []
    for prompt, one in zip(prompts, ids, strict=True):
        text = SpelledIds.of(one, named)
        begin = int(text.ends[len(prompt) - 1]) if len(prompt) else 0
        found.append(written_slices(slicing, text.text, text.ends, begin))
    return np.concatenate(found)


def written_slices(slicing: Slicing, text: str, char_end: Ints, written_from: int) -> Ids:
    """The codes of the tokens of a prompt and what a model wrote after it.

    ``text`` is both, ``char_end`` where each token ends in it, and ``written_from`` the first character that the model
    wrote. The prompt is the slice "prompt"; the rest is divided like a turn of an assistant in a chat.

    >>> slicing = Slicing()
    >>> codes = written_slices(slicing, "Hi<think>a</think>b", np.array([2, 10, 18, 19]), 2)
    >>> [slicing.names[code] for code in codes]
    ['prompt', 'thinking', 'thinking', 'answer']
    """
    prompt = [(0, written_from, PROMPT)] if written_from else []
    sliced = slicing.document(text, [*prompt, *slicing.turn(text, written_from, len(text))], outside=ANSWER)
    return sliced.label(np.concatenate([[0], char_end[:-1]]).astype(np.int64), char_end)


def tokens_digest(pieces: Sequence[bytes], ids: Iterable[Ids]) -> str:
    """A hash of the bytes that all used ids stand for. Equal hashes: two tokenizers agree on all of these tokens."""
    used = np.unique(np.concatenate([np.zeros(0, np.int32), *ids]))
    hasher = hashlib.sha256()
    for token in used.tolist():
        piece = pieces[token] if token < len(pieces) else b""
        hasher.update(f"{token}:{len(piece)}:".encode() + piece)
    return hasher.hexdigest()
