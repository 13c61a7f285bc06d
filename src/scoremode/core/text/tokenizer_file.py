"""Tokenizers by the library ``tokenizers`` alone, so that a plan needs neither Transformers nor torch.

Many classes of Transformers change what tokenizer.json says. So there are two ways to do without Transformers:

- Transformers wrote the file for its general class, which takes it as it is, beside settings that do not concern plain
  text. Then the file is read.
- Transformers has loaded the tokenizer before. Its result is kept as JSON in the cache folder,
  tokenizers/DIGEST/tokenizer.json, and read from there.

A kept tokenizer gives the same ids for three reasons. The digest covers every file in the folder but the weights, the
folder's path (Transformers looks for known names in it) and the versions of all libraries involved. A tokenizer is kept
only if its class leaves encoding and decoding to the general class, which passes texts to the library unchanged. And
before it is kept, its JSON is read again and must give the same JSON, and the same ids and positions of the texts in
ODD_TEXTS.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from scoremode.core.disk.files import remembered_sha256, write_atomically
from scoremode.core.disk.folders import TOKENIZER_MARK, entry_folder
from scoremode.core.installation import installed_versions
from scoremode.core.strict_json import read_object
from scoremode.errors import ModelError

GENERAL_CLASS = "TokenizersBackend"
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
WITHOUT_EFFECT = ("backend", "is_local", "local_files_only", "model_max_length", "tokenizer_class")  # on plain text
MORE_FILES = ("added_tokens.json", "special_tokens_map.json")
MOST_IDS = 100_000  # in larger vocabularies, Transformers repairs the patterns of some models
LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "protobuf", "tiktoken", "mistral-common")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
OURS = ("__call__", "_encode_plus", "_switch_to_input_mode", "decode", "_decode")
"""Methods between a caller and the library ``tokenizers`` that a class may replace."""

ODD_TEXTS = (
    "",
    " ",
    "  two  spaces ",
    "\r\n\t\n x",
    "<s> and </s> in <|im_start|> a [INST] text <unk>",
    "In 1999, 12345678 cats\u00a0said:  “déjà-vu”! don't\x07 DON'T _x_ ▁",
    "東京 2024年 नमस्ते 안녕 e\u0301 \ufeff👩‍🔬 \U0001f9ff\ufffd",
    "def f(x):\n    return x ** 2  # 😀\n",
)


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


def load_transformers(folder: str | Path, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:
        raise unusable(folder, error) from None


def unusable(folder: str | Path, error: Exception) -> ModelError:
    """The error for a tokenizer that the library could not load or use."""
    reason = str(error).strip().split("\n")[0][:200]
    return ModelError(
        f"the tokenizer in {folder} could not be loaded ({type(error).__name__}: {reason})",
        fix="check that the folder contains tokenizer.json, or name another folder with --tokenizer",
    )


class TokenizerFile:
    """The parts of a tokenizer that plain text needs, with the same names as in Transformers."""

    is_fast = True

    def __init__(self, folder: Path, backend: Any, bos: int | None, eos: int | None, special: list[int]) -> None:
        self.folder, self.backend_tokenizer = folder, backend
        self.bos_token_id, self.eos_token_id, self.all_special_ids = bos, eos, special

    @staticmethod
    def of(folder: Path) -> TokenizerFile | None:
        """The tokenizer of a folder; None if Transformers must load it, because it may change or refuse the file."""
        try:
            about, model = (
                json.loads((folder / name).read_bytes()) for name in ("tokenizer_config.json", "config.json")
            )
            named = {name: about.get(name) for name in NAMED}
            general = about["tokenizer_class"] == GENERAL_CLASS and model["model_type"] == "llama"
            if (
                not general
                or not isinstance(about.get("model_max_length", 0), int | float)
                or set(about) - set(NAMED + WITHOUT_EFFECT)
                or any((folder / n).exists() for n in MORE_FILES)
            ):
                return None
            return TokenizerFile._as_it_is(folder, named)
        except Exception:  # the library raises a plain Exception for a damaged file
            return None

    @staticmethod
    def _as_it_is(folder: Path, named: Mapping[str, str | None]) -> TokenizerFile | None:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids = {name: backend.token_to_id(token) for name, token in named.items() if token is not None}
        if backend.get_vocab_size() > MOST_IDS or set(ids.values()) - backend.get_added_tokens_decoder().keys():
            return None
        special = [token for token in dict.fromkeys(ids.values()) if token is not None]
        return TokenizerFile(folder, backend, ids.get("bos_token"), ids.get("eos_token"), special)

    @cached_property
    def transformers(self) -> Any:
        """The tokenizer of Transformers, for chat templates and for engines that want it."""
        return load_transformers(self.folder)

    def decode(self, ids: list[int], *, skip_special_tokens: bool, **_: bool) -> str:
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def __call__(
        self, texts: Sequence[str], *, add_special_tokens: bool, return_offsets_mapping: bool = False, **_: bool
    ) -> dict[str, list[Any]]:
        encodings = self.backend_tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        found = {"input_ids": [encoding.ids for encoding in encodings]}
        return found | {"offset_mapping": [e.offsets for e in encodings]} if return_offsets_mapping else found


# ── tokenizers that are kept ─────────────────────────────────────────────────────────────────────────────────────────
def load_tokenizer(folder: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Loads the tokenizer of a folder, by Transformers only if neither the file alone nor the cache is enough."""
    path = Path(folder)
    found = TokenizerFile.of(path)
    if found is not None or trust_remote_code or not path.is_dir():  # a model's own code may do anything
        return found or load_transformers(folder, trust_remote_code=trust_remote_code)
    entry = entry_folder("tokenizers", _identity(path)) / TOKENIZER_MARK
    return _read(entry, path) or _keep(entry, path, load_transformers(folder))


def _identity(folder: Path) -> dict[str, Any]:
    """Everything that decides what Transformers makes of a folder."""
    files = (p for p in sorted(folder.iterdir()) if p.suffix not in WEIGHTS and p.is_file())
    return {
        "format": 1,
        "folder": str(folder.resolve()),
        "files": {path.name: remembered_sha256(path) for path in files},
        "libraries": dict.fromkeys(LIBRARIES) | installed_versions(LIBRARIES),
    }


def _read(entry: Path, folder: Path) -> TokenizerFile | None:
    """The kept tokenizer; None if there is none, or if the file is damaged."""
    from tokenizers import Tokenizer

    try:
        known = read_object(entry)
        definition, named = known["definition"], known["named"]
        if known["sha256"] != _checksum(definition, named):
            return None
        with contextlib.suppress(OSError):  # a cache that is not writable is not pruned either
            os.utime(entry)  # its last use
        return TokenizerFile(folder, Tokenizer.from_str(definition), **named)
    except Exception:  # the library raises a plain Exception for a definition that it does not understand
        return None


def _keep(entry: Path, folder: Path, loaded: Any) -> Any:
    """Keeps a tokenizer of Transformers. Returns it as a TokenizerFile, or unchanged if the two might differ."""
    if not _is_the_librarys_own(loaded):
        return loaded
    from tokenizers import Tokenizer

    definition = loaded.backend_tokenizer.to_str()
    named = {"bos": loaded.bos_token_id, "eos": loaded.eos_token_id, "special": list(loaded.all_special_ids)}
    found = TokenizerFile(folder, Tokenizer.from_str(definition), **named)
    if found.backend_tokenizer.to_str() != definition or not _agree(found, loaded):
        return loaded
    found.transformers = loaded
    known = {"sha256": _checksum(definition, named), "named": named, "definition": definition}
    with contextlib.suppress(OSError):  # without a writable cache Transformers is asked again next time
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(entry, json.dumps(known).encode())
    return found


def _checksum(definition: str, named: dict[str, Any]) -> str:
    return hashlib.sha256(f"{json.dumps(named)} {definition}".encode()).hexdigest()


def _is_the_librarys_own(loaded: Any) -> bool:
    """Does a tokenizer of Transformers pass texts to the library ``tokenizers`` and ids back, and nothing else?"""
    try:
        from transformers import TokenizersBackend
    except ImportError:  # before Transformers 5
        return False
    kind = type(loaded)
    if not issubclass(kind, TokenizersBackend) or not kind.__module__.startswith("transformers."):
        return False
    replaced = [name for name in OURS if getattr(kind, name, None) is not getattr(TokenizersBackend, name, None)]
    splits = loaded.split_special_tokens or loaded.backend_tokenizer.encode_special_tokens
    return not replaced and not splits


def _agree(found: TokenizerFile, loaded: Any) -> bool:
    """Do two tokenizers give the same ids and positions, with and without special tokens, and the same text back?"""
    for special in (False, True):
        asked = {"add_special_tokens": special, "return_offsets_mapping": True}
        try:
            ours, theirs = found(ODD_TEXTS, **asked), loaded(list(ODD_TEXTS), **asked, return_attention_mask=False)
        except Exception:  # a setting of the checkpoint is wrong; the error appears again when a text is encoded
            return False
        if any(ours[name] != theirs[name] for name in ours):
            return False
        for ids in ours["input_ids"]:
            back = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            if found.decode(ids, **back) != loaded.decode(ids, **back):
                return False
    return True
