"""Tokenizers as Transformers made them, kept in the cache folder: tokenizers/DIGEST/tokenizer.json.

Transformers turns the files of a checkpoint into a tokenizer of the library ``tokenizers``. Its classes replace parts
of it, add special tokens and repair patterns. All of that is in the result, which can be written as JSON. The next
command reads this JSON instead of importing Transformers, which takes seconds.

The ids are the same for three reasons. The digest covers every file in the folder but the weights, the folder's path
(Transformers looks for known names in it) and the versions of all libraries involved. A tokenizer is kept only if its
class leaves encoding and decoding to the general class, which passes texts to the library unchanged. And before it is
kept, its JSON is read again and must give the same JSON, and the same ids and positions of the texts in ODD_TEXTS.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from scoremode.disk.files import remembered_sha256, write_atomically
from scoremode.disk.folders import TOKENIZER_MARK, entry_folder
from scoremode.strict_json import read_object
from scoremode.text.tokenizer_file import TokenizerFile, load_transformers

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
        "libraries": {name: _version(name) for name in LIBRARIES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(entry: Path, folder: Path) -> TokenizerFile | None:
    """The kept tokenizer; None if there is none, or if the file is damaged."""
    from tokenizers import Tokenizer

    try:
        known = read_object(entry)
        definition, named = known["definition"], known["named"]
        if known["sha256"] != _checksum(definition, named):
            return None
        with suppress(OSError):  # a cache that is not writable is not pruned either
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
    with suppress(OSError):  # without a writable cache Transformers is asked again next time
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
