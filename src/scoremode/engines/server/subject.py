"""A served model before it is scored: who it is, how it is asked, and its tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from scoremode.engines.server.forms import Form
from scoremode.engines.server.link import Link
from scoremode.engines.server.served import ServerFacts, ServiceFacts, find_form, find_service, look
from scoremode.engines.server.server_options import PATIENCE, TIMEOUT, ServerOptions, read_key, root_of
from scoremode.engines.server.tokenizer import ComparedTokenizer, ServedTokenizer, TokenService
from scoremode.errors import ModelError
from scoremode.models.embedded import EMBEDDED
from scoremode.models.facts import resolve
from scoremode.models.subject import Subject
from scoremode.text.tokenizer import HuggingFaceTokenizer

HUB_SECONDS = 10.0  # to wait for the hub, which a machine beside a server may not reach
RESERVED = 2  # positions that a window leaves free: for its last target, and for the token that servers always generate


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSubject(Subject):
    """A model behind an address."""

    root: str  # its address
    options: ServerOptions
    served: ServerFacts
    form: Form | None  # None: a service gives scores in its own way
    service: ServiceFacts | None = None

    def connect(self, connections: int) -> Link:
        return connect(self.root, self.options, connections)

    def notes_with(self, notes: Iterable[str]) -> tuple[str, ...]:
        """Notes on the server, and one on its tokenizer if there is something to say."""
        assert isinstance(self.tokenizer, ComparedTokenizer | ServedTokenizer)
        return tuple(note for note in (*notes, self.tokenizer.note()) if note)


def connect(root: str, options: ServerOptions, connections: int) -> Link:
    """A link to a server. The key is read here, so that it is in no value that is kept or shown."""
    return Link(
        root,
        read_key(options.api_key_env),
        timeout=options.timeout or TIMEOUT,
        patience=options.patience or PATIENCE,
        connections=connections,
    )


def find_subject(address: str, model: str, options: ServerOptions, tokenizer: str | None) -> ServedSubject:
    """Ask a server who it is. Nothing is scored but three tokens."""
    root = root_of(address)
    link = connect(root, options, 1)
    served, service, form = look(link, model, first_contact=True), find_service(link), None
    room = served.max_model_len
    if service is None:
        form, first = find_form(link, served.model)
        served = replace(served, system_fingerprint=first.fingerprint)
        room = None if room is None else room - RESERVED
    # equal for one model served in one way, wherever that is; the weights themselves are out of sight
    known = {"model": served.model, "root": served.root, "system_fingerprint": served.system_fingerprint}
    return ServedSubject(
        name=model,
        tokenizer=_tokenizer(model, tokenizer, TokenService(link, served, lists_tokens=service is not None)),
        fingerprint=hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest(),
        vocabulary=None if service is None else service.vocabulary,
        context_length=room if service is None else service.max_model_len,
        root=root,
        options=options,
        served=served,
        form=form,
        service=service,
    )


def _tokenizer(model: str, named: str | None, service: TokenService) -> ComparedTokenizer | ServedTokenizer:
    """The tokenizer that was named, else the model's own if it is at hand, else the server's."""
    if named is not None:
        return ComparedTokenizer(HuggingFaceTokenizer.load(_folder(named)), service)
    is_here = model == EMBEDDED or Path(model).expanduser().is_dir()
    found = _folder(model) if is_here else _on_hub(model)
    if found is not None:
        return ComparedTokenizer(HuggingFaceTokenizer.load(found), service)
    if service.exists:
        return ServedTokenizer(service)
    raise ModelError(
        f"the server has no /tokenize, and the tokenizer of '{model}' is not here",
        fix="give it with --tokenizer FOLDER, or a name on the hub",
    )


def _on_hub(name: str) -> str | Path | None:
    """The tokenizer of a model on the hub: the folder that it was fetched into, else its name; None if it has none."""
    if name.count("/") != 1 or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    from huggingface_hub import HfApi, try_to_load_from_cache

    kept = try_to_load_from_cache(name, "tokenizer.json")
    if isinstance(kept, str):
        return Path(kept).parent
    found: SimpleQueue[set[str]] = SimpleQueue()

    def ask() -> None:
        try:
            told = HfApi().model_info(name, timeout=HUB_SECONDS)
            found.put({file.rfilename for file in told.siblings or ()})
        except Exception:  # the hub client raises many kinds; all of them mean that the server must do
            found.put(set())

    # in a thread, because the client's own limit is for each byte: a hub that hangs must not keep us
    threading.Thread(target=ask, daemon=True, name="scoremode-hub").start()
    with suppress(Empty):
        return name if "tokenizer.json" in found.get(timeout=HUB_SECONDS) else None
    return None


def _folder(name: str) -> str | Path:
    return resolve(name) if name == EMBEDDED else Path(name).expanduser() if Path(name).expanduser().is_dir() else name
