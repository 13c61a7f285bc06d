"""A tokenizer.json without Transformers gives what Transformers gives, or is not taken."""

from __future__ import annotations

import json
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoremode.core.models.facts import resolve
from scoremode.core.text.tokenizer import PROBE, HuggingFaceTokenizer, encode_many, ids_with_specials
from scoremode.core.text.tokenizer_file import ODD_TEXTS, TokenizerFile, load_tokenizer, load_transformers
from scoremode.errors import ModelError
from tests.core.text.tokenizers_at_hand import JOINTS, KINDS, SPECIAL, WORDS, text_to_train_on

TEXTS = [PROBE, *ODD_TEXTS, "<s> and </s> in <|im_start|> a text", "\r\n\t x", *text_to_train_on()[::40]]


@pytest.fixture(params=["tiny", "tiny_bos", "smollm2-135m"])
def folder(request: pytest.FixtureRequest) -> Path:
    return resolve(request.param) if "-" in request.param else request.getfixturevalue(request.param)


def test_everything_is_as_by_transformers(folder: Path) -> None:
    alone = TokenizerFile.of(folder)
    assert alone is not None
    ours, theirs = HuggingFaceTokenizer(alone, "ours"), HuggingFaceTokenizer(load_transformers(folder), "theirs")
    _require_same(ours, theirs)
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    assert ours.render_chat(chat, open_turn=True) == theirs.render_chat(chat, open_turn=True)


def _require_same(ours: HuggingFaceTokenizer, theirs: HuggingFaceTokenizer) -> None:
    assert ours.facts == theirs.facts
    assert ours.pieces() == theirs.pieces()
    every = range(ours.facts.size + 3)
    assert [*map(ours.token_text, every)] == [*map(theirs.token_text, every)]
    for text in TEXTS:
        for special in (False, True):
            one, other = ours.encode(text, special=special), theirs.encode(text, special=special)
            for name in ("ids", "char_start", "char_end", "touches"):
                assert np.array_equal(getattr(one, name), getattr(other, name)), name
            assert ours.decode(one.ids.tolist()) == theirs.decode(other.ids.tolist())
    assert np.array_equal(encode_many(ours, TEXTS).ids, encode_many(theirs, TEXTS).ids)
    assert ids_with_specials(ours, TEXTS) == ids_with_specials(theirs, TEXTS)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer_config.json", {"eos_token": "not an added token"}),
        ("config.json", {"model_type": "qwen2"}),
        ("added_tokens.json", {}),
    ],
)
def test_what_transformers_may_change_is_left_to_it(
    file: str, change: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "changed"))
    assert TokenizerFile.of(folder) is not None
    known = json.loads((folder / file).read_bytes()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(known | change))
    assert TokenizerFile.of(folder) is None


def test_a_damaged_file_is_left_to_transformers_which_says_so(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "damaged"))
    (folder / "tokenizer.json").write_text("{")
    assert TokenizerFile.of(folder) is None


# ── tokenizers that Transformers has made before ─────────────────────────────────────────────────────────────────────
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "general class": ("llama", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "adds a BOS": ("llama", {"tokenizer_class": "TokenizersBackend", "add_bos_token": True, "bos_token": "<s>"}),
    "adds both": (
        "mistral",
        {"tokenizer_class": "PreTrainedTokenizerFast", "add_eos_token": True, **{"eos_token": "</s>"}},
    ),
    "a class of its own": ("qwen2", {"tokenizer_class": "Qwen2Tokenizer", "unk_token": "<s>", "eos_token": "</s>"}),
    "another class": ("gpt2", {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "unk_token": "</s>"}),
    "Llama's class": ("llama", {"tokenizer_class": "LlamaTokenizer", "legacy": False, "bos_token": "<s>"}),
    "a length": ("llama", {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4, "pad_token": "</s>"}),
    "more tokens": ("llama", {"additional_special_tokens": ["<|odd|>", "the"], "tokenizer_class": "TokenizersBackend"}),
}


@cache
def _trained(kind: str) -> str:
    return KINDS[kind]().to_str()


def _checkpoint(folder: Path, kind: str, config: str) -> Path:
    """Writes a folder with one of the tokenizers of tokenizers_at_hand, and a configuration that changes it."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(_trained(kind))
    model_type, about = CONFIGS[config]
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


PAIRS = [*((kind, "general class") for kind in KINDS), *zip([*KINDS, *KINDS], CONFIGS, strict=False)]


@pytest.mark.parametrize(("kind", "config"), dict.fromkeys(PAIRS))
def test_a_remembered_tokenizer_gives_the_ids_of_transformers(
    kind: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte-level, SentencePiece-like and byte-fallback tokenizers, and each thing that Transformers puts on top."""
    kept = _own_cache(tmp_path, monkeypatch)
    folder = _checkpoint(tmp_path / "model", kind, config)
    try:
        theirs = HuggingFaceTokenizer(load_transformers(folder), "theirs")
    except ModelError:
        with pytest.raises(ModelError):
            load_tokenizer(folder)
        return
    load_tokenizer(folder)
    assert len([*kept.glob("*/tokenizer.json")]) == 1, "every class here leaves encoding to the library"
    monkeypatch.setattr("scoremode.core.text.tokenizer_file.load_transformers", _not_asked)
    ours = HuggingFaceTokenizer(load_tokenizer(folder), "ours")
    _require_same(ours, theirs)
    texts = [joint.join([*words, odd]) for joint in JOINTS for odd in SPECIAL for words in pairwise(WORDS[::5])]
    for special in (False, True):
        assert ours.ids_together(texts, special=special) == theirs.ids_together(texts, special=special)


def _not_asked(*_: object, **__: object) -> Any:
    raise AssertionError("Transformers is asked again")


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder, and the file in the cache with its tokenizer."""
    kept = _own_cache(tmp_path, monkeypatch)
    folder = _checkpoint(tmp_path / "model", "gpt2", "general class")
    load_tokenizer(folder)
    return folder, next(kept.glob("*/tokenizer.json"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "added_tokens.json"])
def test_changed_files_are_read_again(name: str, remembered: tuple[Path, Path]) -> None:
    folder, entry = remembered
    path = folder / name
    path.write_text(path.read_text() + " " if path.exists() else "{}")
    load_tokenizer(folder)
    assert len([*entry.parent.parent.iterdir()]) == 2


@pytest.mark.parametrize("damage", ["{", '{"sha256": "0"}', "swapped"])
def test_a_damaged_entry_is_made_again(damage: str, remembered: tuple[Path, Path]) -> None:
    folder, entry = remembered
    before = entry.read_text()
    entry.write_text(before.replace('"bos": null', '"bos": 0') if damage == "swapped" else damage)
    assert entry.read_text() != before
    found = HuggingFaceTokenizer(load_tokenizer(folder), "again")
    assert entry.read_text() == before
    assert found.facts == HuggingFaceTokenizer(load_transformers(folder), "theirs").facts


def test_a_class_that_encodes_by_itself_is_not_remembered(
    remembered: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, entry = remembered
    entry.unlink()
    made = load_transformers(folder)

    class Shouting(type(made)):  # type: ignore[misc]
        def _encode_plus(self, text: Any, *more: Any, **others: Any) -> Any:
            return super()._encode_plus([one.upper() for one in text], *more, **others)

    Shouting.__module__ = "transformers.models.shouting"
    made.__class__ = Shouting
    monkeypatch.setattr("scoremode.core.text.tokenizer_file.load_transformers", lambda _: made)
    assert load_tokenizer(folder) is made
    assert not entry.exists()
