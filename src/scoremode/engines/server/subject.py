"""A served model before it is scored: its identity, the connection to its server, and its tokens.

Its tokenizer is a local one that is compared with the server's own, or the server's own alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from scoremode.core.arguments import read_key, user_path
from scoremode.core.hub import offline_if_unreachable
from scoremode.core.models.facts import resolve
from scoremode.core.models.names import EMBEDDED
from scoremode.core.models.subject import Subject
from scoremode.core.text.files import Message
from scoremode.core.text.token_text import byte_level_piece, sentencepiece_piece, spelled
from scoremode.core.text.tokenizer import (
    PROBE,
    Encoding,
    HuggingFaceTokenizer,
    TextTokenizer,
    TokenizerFacts,
    owned_characters,
)
from scoremode.engines.server.forms import Form
from scoremode.engines.server.link import SMALL, Link, Reply
from scoremode.engines.server.served import ServerFacts, ServiceFacts, find_form, find_service, look
from scoremode.engines.server.server_options import PATIENCE, TIMEOUT, ServerOptions, root_of
from scoremode.errors import EngineError, ModelError, OptionError
from scoremode.values import Ids, Ints

HUB_SECONDS = 10.0  # to wait for the hub, which a machine beside a server may not reach
RESERVED = 2  # positions that a window leaves free: for its last target, and for the token that servers always generate

TOKENIZE, DETOKENIZE, TOKENS = "/tokenize", "/detokenize", "/v1/scoremode/tokens"
LARGEST_LIST = 64 << 20  # bytes
GIVE_TOKENIZER = "give the model's tokenizer with --tokenizer FOLDER"
PART = 1 << 20  # characters that are compared in one request
MOST_TEXTS, MOST_CHARACTERS = 256, 8 << 20  # that are compared; beyond, one text in 64 is
ONE_IN = 64
MOST_SPECIAL = 64  # tokens that a tokenizer puts before a text


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSubject(Subject):
    root: str  # its address
    options: ServerOptions
    served: ServerFacts
    form: Form | None  # None: a service gives scores in its own way
    service: ServiceFacts | None = None

    def connect(self, connections: int) -> Link:
        return connect(self.root, self.options, connections)

    def notes_with(self, notes: Iterable[str]) -> tuple[str, ...]:
        """Adds to notes on the server one on its tokenizer, if there is something to say."""
        assert isinstance(self.tokenizer, ComparedTokenizer | ServedTokenizer)
        return tuple(note for note in (*notes, self.tokenizer.note()) if note)


def connect(root: str, options: ServerOptions, connections: int) -> Link:
    """Makes a link to a server. The key is read only here, so that no value that is kept or shown contains it."""
    return Link(
        root,
        read_key(options.api_key_env),
        timeout=options.timeout or TIMEOUT,
        patience=options.patience or PATIENCE,
        connections=connections,
    )


def find_subject(address: str, model: str, options: ServerOptions, tokenizer: str | None) -> ServedSubject:
    """Ask a server for its identity. Only three tokens are scored."""
    root = root_of(address)
    link = connect(root, options, 1)
    served = look(link, model, first_contact=options.patience is None)  # with --patience, it may be starting
    service, form = find_service(link), None
    room = served.max_model_len
    if service is None:
        form, first = find_form(link, served.model)
        served = replace(served, system_fingerprint=first.fingerprint)
        room = None if room is None else room - RESERVED
    # equal for one model served in one way, wherever that is; the weights themselves are out of sight
    identity = {"model": served.model, "root": served.root, "system_fingerprint": served.system_fingerprint}
    text_tokenizer = _tokenizer(model, tokenizer, TokenService(link, served, lists_tokens=service is not None))
    return ServedSubject(
        name=model,
        tokenizer=text_tokenizer,
        fingerprint=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        vocabulary=None if service is None else service.vocabulary,
        context_length=room if service is None else service.max_model_len,
        root=root,
        options=options,
        served=served,
        form=form and replace(form, last=text_tokenizer.facts.size - 1),
        service=service,
    )


def _tokenizer(model: str, name: str | None, service: TokenService) -> ComparedTokenizer | ServedTokenizer:
    """The tokenizer that was named, else the model's own if it is at hand, else the server's."""
    if name is not None:
        return ComparedTokenizer(HuggingFaceTokenizer.load(_folder(name)), service)
    is_here = model == EMBEDDED or user_path(model).is_dir()
    source = _folder(model) if is_here else _on_hub(model)
    if source is not None:
        return ComparedTokenizer(HuggingFaceTokenizer.load(source), service)
    if service.exists:
        return ServedTokenizer(service)
    raise ModelError(
        f"the server has no /tokenize, and the tokenizer of '{model}' is not here",
        fix="give it with --tokenizer FOLDER, or a name on the hub",
    )


def _on_hub(name: str) -> str | Path | None:
    """Where to load a model's tokenizer from: a folder in the hub's cache, or its name on the hub; None: nowhere."""
    if name.count("/") != 1 or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    from huggingface_hub import HfApi, try_to_load_from_cache

    cached_path = try_to_load_from_cache(name, "tokenizer.json")
    if isinstance(cached_path, str):
        return Path(cached_path).parent
    try:
        with offline_if_unreachable():
            files = HfApi().model_info(name, timeout=HUB_SECONDS).siblings or ()
    except Exception:  # the hub client raises many kinds; all of them mean that the server must do
        return None
    return name if any(file.rfilename == "tokenizer.json" for file in files) else None


def _folder(name: str) -> str | Path:
    return resolve(name) if name == EMBEDDED else user_path(name) if user_path(name).is_dir() else name


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Tokenized(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]
    token_strs: list[str] | None = None


class TokenService:
    """``/tokenize`` and ``/detokenize`` of a server, where it has them."""

    def __init__(self, link: Link, served: ServerFacts, *, lists_tokens: bool = False) -> None:
        self.link, self.model = link, served.model
        self._lists_tokens = lists_tokens  # a scoring service does
        probe, _ = self._tokenized("a", special=False, names=False)
        self.exists = probe is not None and len(probe.tokens) > 0  # some servers have another service of that name

    def ask(self, text: str, *, special: bool, names: bool = False) -> tuple[Ids, list[str]]:
        """The ids of a text by the server's tokenizer, and with ``names`` also the tokens' names."""
        tokenized, reply = self._tokenized(text, special=special, names=names)
        if tokenized is None:
            raise EngineError(
                f"{self.link.root}{TOKENIZE} does not give tokens ({reply.status} {reply.words})", fix=GIVE_TOKENIZER
            )
        return np.array(tokenized.tokens, np.int32), tokenized.token_strs or []

    def _tokenized(self, text: str, *, special: bool, names: bool) -> tuple[Tokenized | None, Reply]:
        body = {"model": self.model, "prompt": text, "add_special_tokens": special, "return_token_strs": names}
        reply = self.link.post(TOKENIZE, body, largest=SMALL + 64 * len(text.encode()), final=frozenset({500, 501}))
        try:
            tokenized = msgspec.convert(reply.fields, Tokenized)
        except msgspec.ValidationError:
            return None, reply
        is_whole = not names or len(tokenized.token_strs or ()) == len(tokenized.tokens)
        return tokenized if is_whole else None, reply

    def listed(self, token: int) -> str | None:
        """A token's text from the server's list of all tokens; None if it has no list, or the token is not in it."""
        if not self._lists_tokens:
            return None
        return self._all_texts[token] if token < len(self._all_texts) else None

    def text_of(self, ids: Sequence[int]) -> str:
        reply = self.link.post(DETOKENIZE, {"model": self.model, "tokens": list(ids)}, largest=SMALL + 4096 * len(ids))
        text = reply.fields.get("prompt")
        if not isinstance(text, str):
            raise EngineError(
                f"{self.link.root}{DETOKENIZE} does not give text ({reply.status} {reply.words})", fix=GIVE_TOKENIZER
            )
        return text

    @cached_property
    def _all_texts(self) -> list[str]:
        reply = self.link.get(TOKENS, largest=LARGEST_LIST)
        texts = reply.fields.get("texts")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise EngineError(
                f"{self.link.root}{TOKENS} does not list tokens ({reply.status} {reply.words})",
                fix="use one version of scoremode on both sides",
            )
        return texts


class ComparedTokenizer:
    """A local tokenizer. The server encodes many of the same texts too, and must give the same ids."""

    def __init__(self, local: TextTokenizer, service: TokenService) -> None:
        self.local, self.service, self.facts = local, service, local.facts
        self.decode, self.pieces = local.decode, local.pieces
        self.token_text, self.render_chat = local.token_text, local.render_chat
        self.texts = self.compared = self.characters = 0
        if service.exists:
            self._compare(PROBE, local.encode(PROBE, special=False), special=False)

    def encode(self, text: str, *, special: bool) -> Encoding:
        encoding = self.local.encode(text, special=special)
        self.texts += 1
        is_early = self.compared < MOST_TEXTS and self.characters < MOST_CHARACTERS
        if self.service.exists and (is_early or self.texts % ONE_IN == 0):
            part = text[:PART]
            self._compare(part, encoding if part == text else self.local.encode(part, special=special), special=special)
            self.compared += 1
            self.characters += len(part)
        return encoding

    def _compare(self, text: str, ours: Encoding, *, special: bool) -> None:
        theirs, _ = self.service.ask(text, special=special)
        if np.array_equal(ours.ids, theirs):
            return
        shorter = min(len(theirs), len(ours.ids))
        differs = np.flatnonzero(ours.ids[:shorter] != theirs[:shorter])
        at = int(differs[0]) if len(differs) else shorter
        both = " and ".join(str(int(ids[at])) if at < len(ids) else "nothing" for ids in (ours.ids, theirs))
        raise ModelError(
            f"the tokenizer here and the server's differ: token {at} of a text is {both}",
            fix="give the served model's own tokenizer with --tokenizer FOLDER",
        )

    def note(self) -> str:
        """A note for the run on how far the two tokenizers were compared."""
        if not self.service.exists:
            return "the server has no /tokenize: that the tokenizer is the served model's could not be verified"
        if self.compared == self.texts and self.characters < MOST_CHARACTERS:
            return ""
        return (
            f"the server's tokenizer gave the same ids for {self.compared} of {self.texts} texts "
            f"({self.characters:,} characters); the rest was not compared"
        )


class ServedTokenizer:
    """The server's own tokenizer. It finds tokens in a text by their names, which must spell the text.

    A server does not say how many ids it has: ``facts.size`` is just large enough for the ids of a probe.
    """

    def __init__(self, service: TokenService) -> None:
        self.service = service
        self._texts: dict[int, str] = {}  # of tokens whose names were seen
        plain, full = (service.ask(PROBE, special=special)[0] for special in (False, True))
        front = _front(full, plain)
        adds_bos = front is not None and front > 0
        identity = json.dumps([plain.tolist(), full.tolist(), service.model])
        self.facts = TokenizerFacts(
            fingerprint=hashlib.sha256(f"served tokenizer {identity}".encode()).hexdigest(),
            size=1 + int(max(plain.max(initial=0), full.max(initial=0))),
            bos=int(full[0]) if adds_bos else None,
            eos=None,
            adds_bos=adds_bos,
        )

    def encode(self, text: str, *, special: bool) -> Encoding:
        ids, names = self.service.ask(text, special=False, names=True)
        pieces = _pieces(text, names)
        if pieces is None:
            raise ModelError(
                "the tokens of the server's tokenizer do not spell the text, so their places in it are unknown",
                fix=GIVE_TOKENIZER,
            )
        self._texts.update(zip(ids.tolist(), map(spelled, pieces), strict=True))
        spans = _spans(text, pieces)
        full = self.service.ask(text, special=True)[0] if special else ids
        front = _front(full, ids)
        if front is None:
            raise ModelError("the server's tokenizer changes its tokens when it adds special ones", fix=GIVE_TOKENIZER)
        behind = len(full) - front - len(ids)
        starts, ends = (
            np.concatenate([np.zeros(front, np.int64), edge, np.full(behind, len(text), np.int64)]) for edge in spans
        )
        return owned_characters(full, starts, ends, len(text))

    def note(self) -> str:
        return "tokenized by the server"

    def decode(self, ids: Sequence[int]) -> str:
        return self.service.text_of(ids)

    def token_text(self, token: int) -> str:
        """The text of a token: from the server's list, else from its name, else as it is decoded after another token.

        Many tokenizers would remove the leading space of a token that is decoded alone.
        """
        listed = self.service.listed(token)
        if listed is not None:
            return listed
        if token not in self._texts:
            before, both = (self.service.text_of([*self._other, *more]) for more in ([], [token]))
            self._texts[token] = both[len(before) :] if both.startswith(before) else self.service.text_of([token])
        return self._texts[token]

    @cached_property
    def _other(self) -> list[int]:
        return [int(token) for token in self.service.ask("a", special=False)[0][-1:]]

    def pieces(self) -> list[bytes]:
        raise ModelError("a server does not list its tokens", fix=GIVE_TOKENIZER)

    def render_chat(self, messages: list[Message], *, open_turn: bool) -> str:
        raise OptionError("chat rows need the model's chat template", fix=GIVE_TOKENIZER)


def _front(full: Ids, plain: Ids) -> int | None:
    """The number of special tokens in ``full`` before the ``plain`` tokens of a text; None if those are not in it."""
    places = range(min(MOST_SPECIAL, len(full) - len(plain)) + 1)
    return next((at for at in places if np.array_equal(full[at : at + len(plain)], plain)), None)


def _pieces(text: str, names: list[str]) -> list[bytes] | None:
    """The bytes of each token, from its name; None if they do not spell the text."""
    for to_bytes in (byte_level_piece, sentencepiece_piece):
        pieces = [to_bytes(name) for name in names]
        if b"".join(pieces) in (text.encode(), b" " + text.encode()):  # some tokenizers put a space in front
            return pieces
    return None


def _spans(text: str, pieces: list[bytes]) -> tuple[Ints, Ints]:
    """Where each token begins and ends in the text, in characters.

    A token that begins inside a character begins with that character, as in the offsets of local tokenizers.
    """
    wanted = text.encode()
    edges = np.cumsum([0, *(len(piece) for piece in pieces)])
    edges = np.maximum(edges - (edges[-1] - len(wanted)), 0)
    begun = np.concatenate([[0], np.cumsum((np.frombuffer(wanted, np.uint8) & 0xC0) != 0x80)]).astype(np.int64)
    starts = begun[np.minimum(edges[:-1] + 1, len(wanted))] - 1
    return np.maximum(starts, 0), begun[edges[1:]]
