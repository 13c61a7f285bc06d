"""The tokenizer of a folder, by the library ``tokenizers`` alone where that is enough: a plan then needs no torch.

Many classes of Transformers change what tokenizer.json says. The file is read as it is only if Transformers wrote it
for its general class, which takes it unchanged, beside settings that do not concern plain text.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from scoremode.core.hub import offline_if_unreachable
from scoremode.core.reading import read_file
from scoremode.errors import ModelError

GENERAL_CLASS = "TokenizersBackend"
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
WITHOUT_EFFECT = ("backend", "is_local", "local_files_only", "model_max_length", "tokenizer_class")  # on plain text
MORE_FILES = ("added_tokens.json", "special_tokens_map.json")
PARTS = (("normalizer", "pre_tokenizer", "post_processor"), ("decoder",))
"""Of a tokenizer.json: what may make a text longer on its way to tokens, and on the way back."""

LONGER = ("ByteLevel", "NFC", "NFD", "BertNormalizer", "Lowercase")
GROWTH = {**dict.fromkeys(LONGER, 4), **dict.fromkeys(("NFKC", "NFKD", "Precompiled"), 18)}
"""How many characters a part makes of one, at most; those that are not listed make one."""
MOST_GROWTH = 20_000  # the parts of XLNet's tokenizer have 9,000

MOST_IDS = 100_000  # in larger vocabularies, Transformers repairs the patterns of some models


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
        with quiet_transformers(), contextlib.nullcontext() if Path(folder).is_dir() else offline_if_unreachable():
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:
        raise unusable(folder, error) from None


def is_general(tokenizer: Any) -> bool:
    """Does the class of a tokenizer render chat templates as Transformers does for all classes?"""
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template


def unusable(folder: str | Path, error: Exception) -> ModelError:
    """The error for a tokenizer that the library could not load or use."""
    reason = str(error).strip().split("\n")[0][:200]
    return ModelError(
        f"the tokenizer in {folder} could not be loaded ({type(error).__name__}: {reason})",
        fix="check that the folder contains tokenizer.json, or name another folder with --tokenizer",
    )


def require_bounded(folder: Path) -> None:
    """Refuses a tokenizer.json that may make a short text too large for any memory. It is asked before it is loaded."""
    try:
        parts = msgspec.json.decode(read_file(folder / "tokenizer.json"), type=dict[str, msgspec.Raw])
        growth = max(_growth([msgspec.json.decode(parts[name]) for name in way if name in parts]) for way in PARTS)
    except (OSError, ValueError, RecursionError):  # the library says what is wrong
        return
    if growth > MOST_GROWTH:
        message = f"the tokenizer in {folder} may make a text {growth:.3g} times as long"
        raise ModelError(message, fix="get its tokenizer.json again, or name another folder with --tokenizer")


def _growth(part: Any) -> float:
    """How many times as long a part of a tokenizer, or several in a row, may make a text."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    if isinstance(single := part.get("single"), list):
        return len(single)  # of a template, which may repeat the text
    replaced = part.get("pattern")
    written = max(1.0, _most_written(replaced, str(part.get("content", "")))) if isinstance(replaced, dict) else 1.0
    return GROWTH.get(str(part.get("type")), 1) * written * _growth([p for p in part.values() if isinstance(p, list)])


def _most_written(pattern: dict[str, Any], content: str) -> float:
    """Characters that are written for each one that is replaced; also between any two, where nothing is a match."""
    if "String" in pattern:
        return len(content) / max(1, len(str(pattern["String"])))
    with contextlib.suppress(re.error):  # the library knows more patterns than Python
        return len(content) + (1 if re.match(str(pattern.get("Regex")), "") else 0)
    return 1 + len(content)


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
            about, model = (json.loads(read_file(folder / name)) for name in ("tokenizer_config.json", "config.json"))
            special_tokens = {name: about.get(name) for name in NAMED}
            general = about["tokenizer_class"] == GENERAL_CLASS and model["model_type"] == "llama"
            if (
                not general
                or not isinstance(about.get("model_max_length", 0), int | float)
                or set(about) - set(NAMED + WITHOUT_EFFECT)
                or any((folder / n).exists() for n in MORE_FILES)
            ):
                return None
            return TokenizerFile._as_it_is(folder, special_tokens)
        except Exception:  # the library raises a plain Exception for a damaged file
            return None

    @staticmethod
    def _as_it_is(folder: Path, special_tokens: Mapping[str, str | None]) -> TokenizerFile | None:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids = {name: backend.token_to_id(token) for name, token in special_tokens.items() if token is not None}
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
        batch = {"input_ids": [encoding.ids for encoding in encodings]}
        return batch | {"offset_mapping": [e.offsets for e in encodings]} if return_offsets_mapping else batch
