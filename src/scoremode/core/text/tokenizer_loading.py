"""A folder with a tokenizer ─▶ Transformers' tokenizer. A file that would fill the memory is refused before that."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from scoremode.core.reading import read_file
from scoremode.core.strict_json import read_object
from scoremode.errors import ModelError

PARTS = (("normalizer", "pre_tokenizer", "post_processor"), ("decoder",))
"""Of a tokenizer.json: what may make a text longer on its way to tokens, and on the way back."""

LONGER = ("ByteLevel", "NFC", "NFD", "BertNormalizer", "Lowercase")
GROWTH = {**dict.fromkeys(LONGER, 4), **dict.fromkeys(("NFKC", "NFKD", "Precompiled"), 18)}
"""How many characters a part makes of one, at most; those that are not listed make one."""
MOST_GROWTH = 20_000  # the parts of XLNet's tokenizer have 9,000
LARGEST_ID = 1 << 22  # the largest vocabularies have a million tokens


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
    """The tokenizer that ``AutoTokenizer`` makes of a folder, or of a name on the hub."""
    from scoremode.core.hub import offline_if_unreachable

    try:
        with quiet_transformers(), contextlib.nullcontext() if Path(folder).is_dir() else offline_if_unreachable():
            if not trust_remote_code and _has_general_class(Path(folder)):
                from transformers import TokenizersBackend

                return TokenizersBackend.from_pretrained(str(folder))
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:
        raise unusable(folder, error) from None


def _has_general_class(folder: Path) -> bool:
    """Would ``AutoTokenizer`` choose the general class? To ask it takes seconds, because it imports torch."""
    try:
        settings, model = (read_object(folder / name) for name in ("tokenizer_config.json", "config.json"))
    except (OSError, ValueError):  # Transformers says what is wrong
        return False
    is_general_class = settings.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in settings
    return is_general_class and model.get("model_type") == "llama"  # of other types, the class may be replaced


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


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = []  # ids, or pieces and their scores


def require_bounded(folder: Path) -> None:
    """Refuses a tokenizer.json that may fill any memory: by a text that becomes longer, or by the size of an id."""
    try:
        parts = msgspec.json.decode(read_file(folder / "tokenizer.json"), type=dict[str, msgspec.Raw])
        growth = max(_growth([msgspec.json.decode(parts[name]) for name in way if name in parts]) for way in PARTS)
        vocabulary = msgspec.json.decode(parts["model"], type=_Model).vocab
        largest = max(vocabulary.values(), default=0) if isinstance(vocabulary, dict) else 0
    except (OSError, ValueError, KeyError, RecursionError):  # the library says what is wrong
        return
    if growth > MOST_GROWTH or largest > LARGEST_ID:
        reason = f"has the id {largest:,}" if largest > LARGEST_ID else f"may make a text {growth:.3g} times as long"
        fix = "get its tokenizer.json again, or name another folder with --tokenizer"
        raise ModelError(f"the tokenizer in {folder} {reason}", fix=fix)


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
