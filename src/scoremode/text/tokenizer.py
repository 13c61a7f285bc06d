"""Text ─▶ ids: one interface for Hugging Face tokenizers and bytes, each with a fingerprint.

Positions come from the tokenizer's offsets, extended so that no character is lost: a token owns every character from
the end of the token before it to its own end. So the space before a word belongs to the word's token whether or not
the tokenizer trims its offsets, and the bytes of all tokens sum to the bytes of the text. If one character is split
into several tokens, the first of them owns it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scoremode.errors import CorpusError, ModelError, ScoremodeError
from scoremode.text import memory
from scoremode.text.corpus import Message
from scoremode.text.token_text import spelled, unnamed
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

SMALL_TEXT = 200_000  # characters; a shorter text always fits into memory

SAMPLES, SAMPLE_LENGTH = 16, 4096  # samples of a text from which its number of tokens is estimated


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """One text as tokens: ids and, for each, the characters it owns."""

    ids: Ids  # (n,)
    char_start: Ints  # (n,)
    char_end: Ints  # (n,)
    touches: Ints  # (n,) the first character that the token covers in part; before char_start if one is shared


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


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Show only errors of Transformers and no progress bars inside the block; restore its settings afterwards."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


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
        self.hf = tokenizer
        self.facts = self._facts()

    @staticmethod
    def load(folder: str | Path, *, trust_remote_code: bool = False) -> HuggingFaceTokenizer:
        from transformers import AutoTokenizer

        try:
            with quiet_transformers():
                tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
                return HuggingFaceTokenizer(tokenizer, str(folder))
        except ScoremodeError:
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0][:200]
            raise ModelError(
                f"the tokenizer in {folder} could not be loaded ({type(error).__name__}: {reason})",
                fix="check that the folder contains tokenizer.json, or name another folder with --tokenizer",
            ) from None

    def _facts(self) -> TokenizerFacts:
        vocabulary: dict[str, int] = self.hf.get_vocab()
        with_special = self.hf(PROBE, add_special_tokens=True)["input_ids"]
        plain = self.hf(PROBE, add_special_tokens=False)["input_ids"]
        by_id = sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))
        bos = self.hf.bos_token_id
        return TokenizerFacts(
            fingerprint=hash_vocabulary(by_id, [with_special, plain]),
            size=max(vocabulary.values(), default=-1) + 1,
            bos=bos,
            eos=self.hf.eos_token_id,
            adds_bos=bos is not None and with_special[:1] == [bos] and plain[:1] != [bos],
        )

    def encode(self, text: str, *, special: bool) -> Encoding:
        self.require_memory(text)
        return self._encode(text, special=special)

    def require_memory(self, text: str) -> None:
        """Refuse a text that does not fit into memory: the library would abort the process when memory runs out."""
        if len(text) < SMALL_TEXT:
            return
        left = memory.available()
        if left is None:
            return
        step = len(text) // SAMPLES
        samples = [text[at : at + SAMPLE_LENGTH] for at in range(0, step * SAMPLES, step)]
        share = sum(len(self._encode(s, special=False).ids) for s in samples) / sum(map(len, samples))
        size = len(text) if text.isascii() else len(text.encode())
        needed = int(BYTES_PER_BYTE * size + BYTES_PER_TOKEN * share * len(text))
        if needed > left:
            raise CorpusError(
                f"splitting a text of {_megabytes(size)} into tokens needs about {_megabytes(needed)} of memory, "
                f"and {_megabytes(left)} are free",
                fix="give a smaller file, fewer lines with --num-samples, or the text as many rows of a .jsonl file",
            )

    def ids(self, text: str, *, special: bool) -> Ids:
        """The ids alone, in about half the time."""
        self.require_memory(text)
        self.use_whole_texts()
        return np.asarray(self.hf(text, add_special_tokens=special, verbose=False)["input_ids"], dtype=np.int32)

    def use_whole_texts(self) -> None:
        """Switch off truncation and padding, which a tokenizer's file may ask for."""
        backend = self.hf.backend_tokenizer
        if backend.truncation is not None:  # to set either copies the tokenizer
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()

    def _encode(self, text: str, *, special: bool) -> Encoding:
        self.use_whole_texts()
        # through __call__, not the backend: some classes add their special tokens in Python
        encoded = self.hf(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return owned_characters(ids, offsets[:, 0], offsets[:, 1], len(text))

    def pieces(self) -> list[bytes]:
        names = self.hf.convert_ids_to_tokens(list(range(self.facts.size)))
        special = set(self.hf.all_special_ids)  # they represent no text, whatever their names look like
        return [b"" if name is None or i in special else self._piece(i, name) for i, name in enumerate(names)]

    def token_text(self, token: int) -> str:
        name = self.hf.convert_ids_to_tokens(token)
        return unnamed(token) if name is None else spelled(self._piece(token, name))

    def _piece(self, token: int, name: str) -> bytes:
        """The bytes of a token. The name of one that was added to the vocabulary is plain text."""
        return name.encode() if token in self._added else self._to_bytes(name)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.hf.added_tokens_decoder)

    @cached_property
    def _to_bytes(self) -> Callable[[str], bytes]:
        return byte_level_piece if "ByteLevel" in str(self.hf.backend_tokenizer.decoder) else sentencepiece_piece

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def render_chat(self, messages: list[Message], *, open_turn: bool) -> str:
        if not self.hf.chat_template:
            raise ModelError("this model has no chat template", fix="choose a text field with --field")
        if any(isinstance(m.get("content"), list) for m in messages):
            require_parts(messages, lambda turns: self._rendered(turns, open_turn=False))
        return self._rendered(messages, open_turn=open_turn)

    def _rendered(self, messages: list[Message], *, open_turn: bool) -> str:
        try:
            return str(self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=open_turn))
        except Exception as error:  # templates raise their own errors, and Python's
            raise _template_refused(error) from None


class ByteTokenizer:
    """Ids are UTF-8 bytes: for the table engine and for tests, which need known tokens without a model."""

    each_character_alone = True  # a text may be cut anywhere

    def __init__(self) -> None:
        fingerprint = hashlib.sha256(b"scoremode bytes 256").hexdigest()
        self.facts = TokenizerFacts(fingerprint=fingerprint, size=256, bos=None, eos=None, adds_bos=False)

    def encode(self, text: str, *, special: bool) -> Encoding:
        ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
        ends = np.cumsum((ids & 0xC0) != 0x80)  # a byte that continues a character does not begin a new one
        return owned_characters(ids, ends - 1, ends, len(text))

    def pieces(self) -> list[bytes]:
        return [bytes([value]) for value in range(256)]

    def token_text(self, token: int) -> str:
        return spelled(bytes([token])) if token < 256 else unnamed(token)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def render_chat(self, messages: list[Message], *, open_turn: bool) -> str:
        if any("content" not in m for m in messages):
            raise ModelError("a chat row has a message without 'content'", fix="check the row")
        turns = "".join(f"{m['role']}: {_content(m)}\n" for m in messages)
        return turns + "assistant: " if open_turn else turns


def hash_vocabulary(by_id: Iterable[tuple[str, int]], probes: list[list[int]]) -> str:
    """The fingerprint of a tokenizer: its tokens in the order of their ids, and the ids of the probe text."""
    hasher = hashlib.sha256()
    for token, index in by_id:
        hasher.update(f"{index}\0{token}\0".encode("utf-8", "surrogatepass"))
    hasher.update(json.dumps(probes).encode())
    return hasher.hexdigest()


def render_template(template: str, messages: list[Message], *, open_turn: bool, special: Mapping[str, str]) -> str:
    """A conversation as a chat template in Jinja writes it; ``special`` are the names of BOS and EOS."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=open_turn, **special
        )
        return str(rendered[0])
    except Exception as error:  # templates raise their own errors, and Python's
        raise _template_refused(error) from None


def _template_refused(error: Exception) -> ModelError:
    reason = f"{type(error).__name__}: {error}"[:200]
    return ModelError(f"the chat template refused a row ({reason})", fix="check the roles in the row")


def require_parts(messages: list[Message], render: Callable[[list[Message]], str]) -> None:
    """Refuse lists of parts if the template supports only text: it would print or drop them."""
    marked, count = [], 0
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = [{**part, "text": f"part{count + i}part"} for i, part in enumerate(content)]
            count += len(content)
        marked.append({**message, "content": content})
    shown = render(marked)
    as_code = re.search(r"""["']text["']\s*:\s*["']part\d+part""", shown)
    if as_code or any(f"part{i}part" not in shown for i in range(count)):
        raise ModelError(
            "this model's chat template does not support content that is a list of parts",
            fix='give the content as one string, as in {"role": "user", "content": "…"}',
        )


def _content(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _megabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def owned_characters(ids: Ids, starts: Ints, ends: Ints, length: int) -> Encoding:
    """Make spans without gaps or overlaps: each from the end of the token before to the token's own end."""
    bounds = np.zeros(len(ids) + 1, np.int64)
    owned_starts, owned_ends = bounds[:-1], bounds[1:]  # views of one array: a token begins where the last one ended
    np.maximum.accumulate(ends, out=owned_ends)
    np.minimum(owned_ends, length, out=owned_ends)
    touches = np.minimum(starts, owned_starts)
    np.copyto(touches, owned_starts, where=ends <= starts)
    return Encoding(ids, owned_starts, owned_ends, touches)


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level tokenizers use for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def byte_level_piece(name: str) -> bytes:
    """The bytes of a token, from its name in a byte-level vocabulary."""
    if all(character in _BYTES for character in name):
        return bytes(_BYTES[character] for character in name)
    return name.encode()  # an added token, whose name is plain text


def sentencepiece_piece(name: str) -> bytes:
    """The bytes of a token, from its name in a vocabulary that marks spaces with ▁."""
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return bytes([int(match[1], 16)])
    return name.replace("▁", " ").encode()
