"""Text ─▶ ids: one interface for Hugging Face tokenizers and bytes, each with a fingerprint.

Positions come from the tokenizer's offsets, extended so that no character is lost: a token owns every character from
the end of the token before it to its own end. So the space before a word belongs to the word's token whether or not
the tokenizer trims its offsets, and the bytes of all tokens sum to the bytes of the text. If one character is split
into several tokens, the first of them owns it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from scoremode.core import free_memory
from scoremode.core.reading import megabytes, require_memory, require_plain_files
from scoremode.core.text.files import Message
from scoremode.core.text.token_text import byte_level_piece, sentencepiece_piece, spelled, unnamed
from scoremode.core.text.tokenizer_loading import (
    LARGEST_ID,
    is_general,
    load_transformers,
    require_bounded,
    unusable,
)
from scoremode.errors import ModelError, ScoremodeError, print_line
from scoremode.values import Ids, Ints


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What must be equal for two runs to be comparable token by token."""

    fingerprint: str  # sha256 of the vocabulary and the ids of a probe text
    size: int  # ids are 0 .. size-1
    bos: int | None
    eos: int | None
    adds_bos: bool  # does encoding insert a BOS at the start?


# digits, spaces, scripts, an emoji of several code points and a control character: tokenizers differ on these
PROBE = "In 1999, 12345 cats\tsaid:  “déjà-vu”!\n\n東京 2024年 — naïve 👩‍🔬 don't\x07 <s> _x_ "

# Memory that a tokenizer needs while it encodes one text: per byte of the text (copies, and the origin of each byte)
# and per token (its name, its position, and Python's lists of them). The estimate is 1.05 to 1.8 times the measured
# peak of SentencePiece-like and byte-level BPE on prose, code and Japanese (tokenizers 0.23).
BYTES_PER_BYTE, BYTES_PER_TOKEN = 120, 420

SMALL_TEXT, LARGE_TEXT = 200_000, 2_000_000  # characters; below always fits into memory, above is announced

MOST_TOKENS = 32  # of one character

SAMPLES, SAMPLE_LENGTH = 16, 4096  # samples of a text from which its number of tokens is estimated


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """A text as tokens: their ids, and the characters that each token owns."""

    ids: Ids  # (n,)
    char_start: Ints  # (n,)
    char_end: Ints  # (n,) ascending
    touches: Ints  # (n,) the first character that the token covers in part; before char_start if one is shared


@dataclass(frozen=True, slots=True, eq=False)
class EncodedTexts(Encoding):
    """Several texts as tokens. Positions are those in ``joined``, so that NumPy computes them for all texts at once."""

    joined: str  # all texts, one after the other
    starts: Ints  # (texts + 1,) text i is joined[starts[i] : starts[i + 1]]
    bounds: Ints  # (texts + 1,) the tokens of text i are bounds[i] … bounds[i + 1]


@runtime_checkable
class TextTokenizer(Protocol):
    """What scoremode needs from a tokenizer."""

    facts: TokenizerFacts

    def encode(self, text: str, *, special: bool) -> Encoding: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def pieces(self) -> list[bytes]:
        """The bytes that each id represents inside a text, (size,)."""
        ...

    def token_text(self, token: int) -> str:
        """What one id stands for inside a text, with its leading space; the name of a special token."""
        ...

    def render_chat(self, messages: list[Message], *, open_turn: bool) -> str: ...


class HuggingFaceTokenizer:
    """A fast tokenizer of Transformers."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"the tokenizer of {name} has no offsets (it is a slow tokenizer)",
                fix="convert it to tokenizer.json, or name another with --tokenizer",
            )
        dropout = getattr(tokenizer.backend_tokenizer.model, "dropout", None)
        if dropout:
            raise ModelError(
                f"the tokenizer of {name} leaves out merges at random (dropout {dropout:g}): its tokens vary",
                fix="set dropout to null in its tokenizer.json",
            )
        self.hf = tokenizer  # of Transformers
        self.facts = self._facts()

    @staticmethod
    def load(folder: str | Path, *, trust_remote_code: bool = False) -> HuggingFaceTokenizer:
        """The tokenizer of a folder, or of a name on the hub."""
        if Path(folder).is_dir():
            require_plain_files(Path(folder))
            require_bounded(Path(folder))
        tokenizer = load_transformers(folder, trust_remote_code=trust_remote_code)
        try:
            return HuggingFaceTokenizer(tokenizer, str(folder))
        except ScoremodeError:
            raise
        except Exception as error:
            raise unusable(folder, error) from None

    @property
    def backend(self) -> Any:
        """The tokenizer of the library ``tokenizers``."""
        return self.hf.backend_tokenizer

    def _facts(self) -> TokenizerFacts:
        vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        with_special, plain = (self.ids_together([PROBE], special=special)[0] for special in (True, False))
        by_id = sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))
        size = max(vocabulary.values(), default=-1) + 1
        if size > LARGEST_ID:
            raise ValueError(f"it has the id {size - 1:,}")
        if len(plain) > MOST_TOKENS * len(PROBE):
            raise ValueError(f"it makes {len(plain):,} tokens of {len(PROBE)} characters")
        bos = self.hf.bos_token_id
        return TokenizerFacts(
            fingerprint=hash_vocabulary(by_id, [with_special, plain]),
            size=size,
            bos=bos,
            eos=self.hf.eos_token_id,
            adds_bos=bos is not None and with_special[:1] == [bos] and plain[:1] != [bos],
        )

    def encode(self, text: str, *, special: bool) -> Encoding:
        return self.encode_together([text], special=special)

    def encode_together(self, texts: Sequence[str], *, special: bool) -> EncodedTexts:
        """Encodes several texts, each as ``encode`` does, in a fraction of the time."""
        batch = self._called(texts, special=special, return_offsets_mapping=True)
        starts, bounds = _edges(map(len, texts)), _edges(map(len, batch["input_ids"]))
        count = int(bounds[-1])
        ids = np.fromiter(chain.from_iterable(batch["input_ids"]), np.int32, count)
        pairs = chain.from_iterable(chain.from_iterable(batch["offset_mapping"]))
        offsets = np.fromiter(pairs, np.int64, 2 * count).reshape(-1, 2)
        offsets += np.repeat(starts[:-1], np.diff(bounds))[:, None]
        return _owned(ids, offsets[:, 0], offsets[:, 1], joined="".join(texts), starts=starts, bounds=bounds)

    def ids_together(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """The ids of several texts without positions, in about half the time of ``encode_together``."""
        ids: list[list[int]] = self._called(texts, special=special)["input_ids"]
        return ids

    def ids(self, text: str, *, special: bool) -> Ids:
        return np.array(self.ids_together([text], special=special)[0], dtype=np.int32)

    def _called(self, texts: Sequence[str], *, special: bool, **more: bool) -> Any:
        for text in texts:
            if len(text) >= SMALL_TEXT:
                self._require_memory(text)
        if self.backend.truncation is not None:  # a file may ask for it, and for padding; to set either copies
            self.backend.no_truncation()
        if self.backend.padding is not None:
            self.backend.no_padding()
        unused = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        # through __call__, not the backend: some classes add their special tokens in Python
        return self.hf(list(texts), add_special_tokens=special, **unused, **more)

    def _require_memory(self, text: str) -> None:
        """Raises CorpusError if a text needs more memory than is free: the library would abort the process."""
        step = len(text) // SAMPLES
        samples = [text[at : at + SAMPLE_LENGTH] for at in range(0, step * SAMPLES, step)]
        share = len(self.encode_together(samples, special=False).ids) / sum(map(len, samples))
        size = len(text) if text.isascii() else len(text.encode())
        needed = int(BYTES_PER_BYTE * size + BYTES_PER_TOKEN * share * len(text))
        require_memory(f"splitting a text of {megabytes(size)} into tokens", needed, free_memory.available())
        if len(text) >= LARGE_TEXT:
            print_line(
                f"scoremode: a text of {megabytes(size)} is split into tokens at once, "
                f"which needs about {megabytes(needed)} of memory"
            )

    def pieces(self) -> list[bytes]:
        names = map(self.backend.id_to_token, range(self.facts.size))
        special = set(self.hf.all_special_ids)  # they represent no text, whatever their names look like
        return [b"" if name is None or i in special else self._piece(i, name) for i, name in enumerate(names)]

    def token_text(self, token: int) -> str:
        name = self.backend.id_to_token(token)
        return unnamed(token) if name is None else spelled(self._piece(token, name))

    def _piece(self, token: int, name: str) -> bytes:
        """The bytes of a token. If it was added to the vocabulary, they are those of its name."""
        return name.encode() if token in self._added else self._to_bytes(name)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def _to_bytes(self) -> Callable[[str], bytes]:
        return byte_level_piece if "ByteLevel" in str(self.backend.decoder) else sentencepiece_piece

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def render_chat(self, messages: list[Message], *, open_turn: bool) -> str:
        from scoremode.core.text.chat_templates import refused_row, render_template

        if not self.hf.chat_template:
            raise ModelError("this model has no chat template", fix="choose a text field with --field")
        try:
            if not is_general(self.hf):
                return str(self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_turn))
            if not messages:
                raise ValueError("an empty conversation")
            template = self.hf.get_chat_template()
        except Exception as error:  # templates raise their own errors, and Python's
            raise refused_row(f"{type(error).__name__}: {error}") from None
        return render_template(template, messages, open_turn=open_turn, special=self.hf.special_tokens_map)


class ByteTokenizer:
    """Makes each UTF-8 byte an id: for the table engine and for tests, which need known tokens without a model."""

    def __init__(self) -> None:
        fingerprint = hashlib.sha256(b"scoremode bytes 256").hexdigest()
        self.facts = TokenizerFacts(fingerprint=fingerprint, size=256, bos=None, eos=None, adds_bos=False)

    def encode(self, text: str, *, special: bool) -> Encoding:
        return self.encode_together([text], special=special)

    def encode_together(self, texts: Sequence[str], *, special: bool) -> EncodedTexts:
        joined, starts = "".join(texts), _edges(map(len, texts))
        ids = np.frombuffer(joined.encode(), dtype=np.uint8).astype(np.int32)
        ends = np.cumsum((ids & 0xC0) != 0x80)  # a byte that continues a character does not begin a new one
        bounds = starts if joined.isascii() else _edges(len(text.encode()) for text in texts)
        return _owned(ids, ends - 1, ends, joined=joined, starts=starts, bounds=bounds)

    def pieces(self) -> list[bytes]:
        return [bytes([value]) for value in range(256)]

    def token_text(self, token: int) -> str:
        return spelled(bytes([token])) if token < 256 else unnamed(token)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def render_chat(self, messages: list[Message], *, open_turn: bool) -> str:
        turns = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return turns + "assistant: " if open_turn else turns


def hash_vocabulary(by_id: Iterable[tuple[str, int]], probes: list[list[int]]) -> str:
    """The fingerprint of a tokenizer: its tokens in the order of their ids, and the ids of the probe text."""
    hasher = hashlib.sha256()
    for token, index in by_id:
        hasher.update(f"{index}\0{token}\0".encode("utf-8", "surrogatepass"))
    hasher.update(json.dumps(probes).encode())
    return hasher.hexdigest()


def owned_characters(ids: Ids, starts: Ints, ends: Ints, length: int) -> Encoding:
    """Gives tokens spans without gaps or overlaps: each from the end of the token before to the token's own end."""
    return _owned(ids, starts, ends, joined="", starts=np.array([0, length]), bounds=np.array([0, len(ids)]))


def _owned(ids: Ids, begin: Ints, end: Ints, *, joined: str, starts: Ints, bounds: Ints) -> EncodedTexts:
    """As ``owned_characters``, for several texts in one pass: no token reaches into another text."""
    counts = np.diff(bounds)
    ends: Ints = np.maximum.accumulate(np.minimum(end, np.repeat(starts[1:], counts)))
    # a token begins where the last one ended; the first one, where its text begins
    char_start: Ints = np.empty_like(ends)
    char_start[1:] = ends[:-1]
    char_start[bounds[:-1][counts > 0]] = starts[:-1][counts > 0]
    touches = np.where(end <= begin, char_start, np.minimum(begin, char_start))
    return EncodedTexts(ids, char_start, ends, touches, joined, starts, bounds)


def _edges(lengths: Iterable[int]) -> Ints:
    """Where each of several parts begins, and where the last one ends."""
    return np.cumsum([0, *lengths], dtype=np.int64)


# ── many texts ───────────────────────────────────────────────────────────────────────────────────────────────────────
def encode_many(tokenizer: TextTokenizer, texts: Sequence[str], *, special: bool = False) -> EncodedTexts:
    """The tokens of several texts, each exactly as ``tokenizer.encode`` gives them.

    >>> encoding = encode_many(ByteTokenizer(), ["ab", "é"])
    >>> encoding.ids.tolist(), encoding.bounds.tolist(), encoding.char_end.tolist()
    ([97, 98, 195, 169], [0, 2, 4], [1, 2, 3, 3])
    """
    if isinstance(tokenizer, ByteTokenizer) or (isinstance(tokenizer, HuggingFaceTokenizer) and _are_short(texts)):
        return tokenizer.encode_together(texts, special=special)
    encodings, starts = [tokenizer.encode(text, special=special) for text in texts], _edges(map(len, texts))
    placed = list(zip(encodings, starts[:-1], strict=True))
    return EncodedTexts(
        ids=np.concatenate([encoding.ids for encoding in encodings]),
        char_start=np.concatenate([encoding.char_start + at for encoding, at in placed]),
        char_end=np.concatenate([encoding.char_end + at for encoding, at in placed]),
        touches=np.concatenate([encoding.touches + at for encoding, at in placed]),
        joined="".join(texts),
        starts=starts,
        bounds=_edges(len(encoding.ids) for encoding in encodings),
    )


def ids_with_specials(tokenizer: TextTokenizer, texts: Sequence[str]) -> list[list[int]] | None:
    """The ids of several texts with the tokenizer's special tokens; None if it never adds any."""
    if isinstance(tokenizer, ByteTokenizer):
        return None
    if isinstance(tokenizer, HuggingFaceTokenizer) and _are_short(texts):
        return tokenizer.ids_together(texts, special=True)
    return [tokenizer.encode(text, special=True).ids.tolist() for text in texts]


def _are_short(texts: Sequence[str]) -> bool:
    return all(len(text) < SMALL_TEXT for text in texts)
