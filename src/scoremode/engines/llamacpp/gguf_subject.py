"""Describes a GGUF file by its header, and tokenizes with the file's own tokenizer, as llama.cpp applies it.

The header also says, about, how much memory llama.cpp takes beside the weights.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.core.disk.files import remembered_sha256
from scoremode.core.models.gguf import GgufFacts, gguf_constants, read_gguf
from scoremode.core.models.subject import Subject
from scoremode.core.text.chat_templates import render_template
from scoremode.core.text.files import Message
from scoremode.core.text.token_text import spelled, unnamed
from scoremode.core.text.tokenizer import (
    PROBE,
    Encoding,
    HuggingFaceTokenizer,
    TextTokenizer,
    TokenizerFacts,
    hash_vocabulary,
    owned_characters,
)
from scoremode.engines.llamacpp.library import Library, freed_with, library
from scoremode.engines.llamacpp.llamacpp_options import LlamaCppParameters
from scoremode.errors import CorpusError, ModelError
from scoremode.values import Ids, Ints

UNUSED, CONTROL = 1 << 1, 1 << 3  # attributes of a token in llama.cpp
NO_VOCABULARY, SENTENCEPIECE = 0, 1  # llama.cpp's types of vocabularies; NO_VOCABULARY has a size but no tokens
LONGEST_INPUT = 2**31 - 2  # llama.cpp counts bytes in 32 bits


def gguf_subject(model: str, tokenizer: str | None) -> Subject:
    """Returns the model in a GGUF file, as far as its header describes it."""
    facts = read_gguf(model)
    _require_sound(facts)
    files = {path.name: remembered_sha256(path) for path in facts.files}
    sizes, template = facts.sizes, facts.values.get("tokenizer.chat_template")
    if tokenizer is not None:
        chosen: TextTokenizer = HuggingFaceTokenizer.load(tokenizer)
    else:
        chosen = LlamaTokenizer(facts.files[0], template if isinstance(template, str) else None)
    return Subject(
        name=model,
        tokenizer=chosen,
        fingerprint=hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(),
        vocabulary=facts.vocabulary or facts.number("vocab_size"),
        context_length=facts.number("context_length"),
        hidden_size=facts.number("embedding_length"),
        dtype=facts.quantization,
        weight_bytes=sizes.bytes,
        bits_per_weight=sizes.bits_per_weight,
        files=files,
        format=f"GGUF {facts.quantization}",
        sizes=sizes,
    )


def _require_sound(facts: GgufFacts) -> None:
    """Refuses values in a header that would make llama.cpp end the process."""
    layers = facts.values.get(f"{facts.architecture}.block_count")
    if isinstance(layers, int) and not 0 < layers <= len(facts.tensors):
        raise ModelError(
            f"{facts.files[0]} has {len(facts.tensors)} tensors, and its header says {layers} layers",
            fix="download it again",
        )
    for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        epsilon = facts.values.get(f"{facts.architecture}.{key}", 0.0)
        if not isinstance(epsilon, float) or not 0 <= epsilon < math.inf:  # written so that NaN is refused
            raise ModelError(f"{facts.files[0]} is damaged: its {key} is {epsilon}", fix="download it again")


class LlamaTokenizer:
    """Tokenizes with llama.cpp. The name of a special token in a text becomes that token, as with Hugging Face."""

    def __init__(self, path: Path, template: str | None = None) -> None:
        self._llama: Library = library()
        self._template, self.name = template, str(path)
        call = self._llama.call
        parameters = call.llama_model_default_params()
        parameters.vocab_only = True
        self._model = self._llama.load(path, parameters)
        freed_with(self).callback(call.llama_model_free, self._model)
        self._vocab = call.llama_model_get_vocab(self._model)
        self.facts = self._facts()

    def _facts(self) -> TokenizerFacts:
        call, vocab = self._llama.call, self._vocab
        count = call.llama_vocab_n_tokens(vocab)
        if count < 1 or call.llama_vocab_type(vocab) == NO_VOCABULARY:
            raise ModelError(f"{self.name} has no tokenizer", fix="name one with --tokenizer")
        # converters fill the vocabulary up to the size of the head with ids that have no token
        while count > 1 and call.llama_vocab_get_attr(vocab, count - 1) & UNUSED:
            count -= 1
        names = [(call.llama_vocab_get_text(vocab, i) or b"").decode("utf-8", "replace") for i in range(count)]
        if call.llama_vocab_type(vocab) == SENTENCEPIECE:
            self._require_bytes(set(names))
        both = [self._ids(PROBE, special=special).tolist() for special in (True, False)]
        bos, eos = call.llama_vocab_bos(vocab), call.llama_vocab_eos(vocab)
        return TokenizerFacts(
            fingerprint=hash_vocabulary(((name, i) for i, name in enumerate(names)), both),
            size=count,
            bos=bos if bos >= 0 else None,
            eos=eos if eos >= 0 else None,
            adds_bos=bos >= 0 and both[0][:1] == [bos] and both[1][:1] != [bos],
        )

    def _require_bytes(self, names: set[str]) -> None:
        """Refuses a vocabulary that lacks a byte's token: llama.cpp would end the process when it needs that token."""
        missing = [b for b in range(256) if f"<0x{b:02X}>" not in names and (b > 127 or chr(b) not in names)]
        if missing:
            raise ModelError(
                f"the vocabulary of {self.name} lacks the token <0x{missing[0]:02X}> of a byte",
                fix="name a Hugging Face tokenizer with --tokenizer",
            )

    def _ids(self, text: str, *, special: bool) -> Ids:
        raw = text.encode()
        if len(raw) > LONGEST_INPUT:
            raise CorpusError("llama.cpp cannot tokenize a text of 2 GB", fix="give the text as several files")
        room, count = len(raw) + 16, -1
        while count < 0:
            ids = np.empty(room, np.int32)
            place = ids.ctypes.data_as(ctypes.c_void_p)
            count = int(self._llama.call.llama_tokenize(self._vocab, raw, len(raw), place, room, special, True))
            if count < 0 and not LONGEST_INPUT >= -count > room:
                raise CorpusError("llama.cpp cannot tokenize this text", fix="name a tokenizer with --tokenizer")
            room = -count  # it put spaces after special tokens, and needs so many ids
        return ids[:count].copy()

    def encode(self, text: str, *, special: bool) -> Encoding:
        ids = self._ids(text, special=special)
        starts, ends = self._characters(text, ids, special=special)
        return owned_characters(ids, starts, ends, len(text))

    def _characters(self, text: str, ids: Ids, *, special: bool) -> tuple[Ints, Ints]:
        """Finds where tokens begin and end, in characters; raises an error if the tokens do not spell the text."""
        raw = text.encode()
        begin, end = self._bytes_covered(raw, ids, special=special)
        if text.isascii():
            return begin, end
        first = np.frombuffer(raw, np.uint8) & 0xC0 != 0x80  # where a character begins
        number = np.concatenate([np.cumsum(first, dtype=np.int64) - 1, [len(text)]])  # index of each byte's character
        empty = end <= begin
        starts: Ints = number[begin]
        ends: Ints = np.where(empty, starts, number[np.maximum(end, 1) - 1] + 1)
        return starts, ends

    def _bytes_covered(self, raw: bytes, ids: Ids, *, special: bool) -> tuple[Ints, Ints]:
        lead, tail = self._added(ids, special=special)
        inner = ids[lead : len(ids) - tail]
        lengths = self._lengths[inner]
        pieces = self._shown
        if b"".join([pieces[i] for i in inner.tolist()]) != raw:
            lengths = self._matched(raw, inner)
        ends = np.concatenate([np.zeros(lead, np.int64), np.cumsum(lengths), np.full(tail, len(raw), np.int64)])
        begins = np.concatenate([np.zeros(lead, np.int64), ends[lead : len(ids)][: len(inner)] - lengths])
        return np.concatenate([begins, np.full(tail, len(raw), np.int64)]), ends

    def _added(self, ids: Ids, *, special: bool) -> tuple[int, int]:
        """Returns how many tokens llama.cpp put before and after the text."""
        if not special:
            return 0, 0
        call, vocab = self._llama.call, self._vocab
        lead = int(call.llama_vocab_get_add_bos(vocab) and ids[:1].tolist() == [self.facts.bos])
        tail = int(call.llama_vocab_get_add_eos(vocab) and len(ids) > lead and ids[-1:].tolist() == [self.facts.eos])
        return lead, tail

    def _matched(self, raw: bytes, ids: Ids) -> Ints:
        """Counts the bytes of the text that each token covers, if llama.cpp put spaces before the text or its parts."""
        lengths, at = np.zeros(len(ids), np.int64), 0
        for i, token in enumerate(ids.tolist()):
            piece = self._shown[token]
            if not raw.startswith(piece, at):
                if not (piece[:1] == b" " and raw.startswith(piece[1:], at)):
                    break
                piece = piece[1:]
            lengths[i] = len(piece)
            at += len(piece)
        if at != len(raw):
            near = raw[at : at + 30].decode("utf-8", "replace")
            raise CorpusError(
                f"the tokens of {self.name} do not spell the text: they differ from it at {near!r}",
                fix="name a Hugging Face tokenizer with --tokenizer",
            )
        return lengths

    @cached_property
    def _shown(self) -> list[bytes]:
        """The bytes that each id stands for; a special token stands for the bytes of its name."""
        return [self._piece(i, special=True) for i in range(self._llama.call.llama_vocab_n_tokens(self._vocab))]

    @cached_property
    def _lengths(self) -> Ints:
        return np.array([len(piece) for piece in self._shown], np.int64)

    def _piece(self, token: int, *, special: bool) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            length = self._llama.call.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if length >= 0:
                return buffer.raw[:length]
            room = -length

    def pieces(self) -> list[bytes]:
        call, vocab = self._llama.call, self._vocab
        shown = self._shown[: self.facts.size]
        return [b"" if call.llama_vocab_get_attr(vocab, i) & CONTROL else piece for i, piece in enumerate(shown)]

    def token_text(self, token: int) -> str:
        return spelled(self._shown[token]) if token < len(self._shown) else unnamed(token)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._shown[i] for i in ids).decode("utf-8", "replace")

    def render_chat(self, messages: list[Message], *, open_turn: bool) -> str:
        if not self._template:
            raise ModelError("this model has no chat template", fix="choose a text field with --field")

        tokens = {"bos_token": self.facts.bos, "eos_token": self.facts.eos}
        special: dict[str, Any] = {name: self.decode([token]) for name, token in tokens.items() if token is not None}
        return render_template(str(self._template), messages, open_turn=open_turn, special=special)


# ── memory, estimated from the header ─────────────────────────────────────────────────────────────────────────────────
def cache_bytes(facts: GgufFacts, choices: LlamaCppParameters, tokens: int) -> int:
    """The bytes of the keys and values of so many tokens, about."""
    types, sizes = gguf_constants().GGMLQuantizationType, gguf_constants().GGML_QUANT_SIZES
    width, layers = facts.number("embedding_length") or 0, facts.number("block_count") or 0
    heads = facts.number("attention.head_count") or 1
    shared = facts.number("attention.head_count_kv") or heads
    total = 0
    for key, kind in (("key", choices.cache_type_k), ("value", choices.cache_type_v)):
        count, size = sizes[types[kind.upper()]]  # numbers and bytes of a block
        total += layers * tokens * shared * (facts.number(f"attention.{key}_length") or width // heads) * size // count
    return total


def memory_of(facts: GgufFacts, vocabulary: int, choices: LlamaCppParameters, longest: int) -> int:
    """The bytes of the logits of a decode, of keys and values, and of the largest intermediate results, about."""
    width, heads = facts.number("embedding_length") or 0, facts.number("attention.head_count") or 1
    logits = min(longest, choices.n_batch) * vocabulary * 4
    together = min(longest, choices.n_ubatch)
    inner = facts.number("feed_forward_length") or 4 * width
    attention = 0 if choices.flash_attn == "on" else heads * longest
    cache = cache_bytes(facts, choices, longest)
    return logits + cache + together * (attention + 2 * inner + 4 * width) * 4
