"""A tokenizer.json without Transformers gives what Transformers gives, or is not taken."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoremode.core.models.facts import resolve
from scoremode.core.text.files import Message
from scoremode.core.text.tokenizer import PROBE, HuggingFaceTokenizer, encode_many, ids_with_specials
from scoremode.core.text.tokenizer_file import TokenizerFile, load_transformers, require_bounded
from scoremode.errors import ModelError
from tests.core.text.tokenizers_at_hand import KINDS, text_to_train_on

TEXTS = [
    *(PROBE, "", " ", "  two  spaces ", "\r\n\t\n x", "<s> and </s> in <|im_start|> a text"),
    "東京 2024年 नमस्ते 안녕 e\u0301 \ufeff👩‍🔬 \U0001f9ff\ufffd",
    *text_to_train_on()[::40],
]


@pytest.fixture(params=["tiny", "tiny_bos", "smollm2-135m"])
def folder(request: pytest.FixtureRequest) -> Path:
    return resolve(request.param) if "-" in request.param else request.getfixturevalue(request.param)


def test_everything_is_as_by_transformers(folder: Path) -> None:
    alone = TokenizerFile.of(folder)
    assert alone is not None
    ours, theirs = HuggingFaceTokenizer(alone, "ours"), HuggingFaceTokenizer(load_transformers(folder), "theirs")
    _require_same(ours, theirs)
    chat: list[Message] = [{"role": "user", "content": "Hi"}]
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


# ── files of strangers ───────────────────────────────────────────────────────────────────────────────────────────────
DOUBLING = {"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PLAIN = {"type": "Replace", "pattern": {"String": "``"}, "content": '"'}
SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}


def _with(folder: Path, copy: Path, **parts: Any) -> Path:
    shutil.copytree(folder, copy)
    known = json.loads((copy / "tokenizer.json").read_bytes())
    (copy / "tokenizer.json").write_text(json.dumps(known | parts))
    return copy


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 28}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [DOUBLING] * 7}] * 4}},
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Prepend", "prepend": "ﷺ"}, {"type": "NFKD"}] * 28,
            }
        },
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LEVEL] * 28}},
        {"decoder": {"type": "Sequence", "decoders": [DOUBLING] * 28}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100_000,
            }
        },
    ],
)
def test_a_tokenizer_that_makes_a_text_endless_is_not_loaded(parts: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"may make a text .* times as long; get its tokenizer.json again"):
        HuggingFaceTokenizer.load(_with(tiny, tmp_path / "endless", **parts))


@pytest.mark.parametrize("normalizers", [[PLAIN, PLAIN, {"type": "NFKD"}, {"type": "Lowercase"}, SPACES], [SPACES] * 3])
def test_what_known_tokenizers_do_is_not_too_much(normalizers: list[Any], tiny: Path, tmp_path: Path) -> None:
    """As XLNet, ALBERT and CLIP have it."""
    folder = _with(tiny, tmp_path / "known", normalizer={"type": "Sequence", "normalizers": normalizers})
    assert HuggingFaceTokenizer.load(folder).encode("a b", special=True).ids.size
    for backend in KINDS.values():
        (tmp_path / "tokenizer.json").write_text(backend().to_str())
        require_bounded(tmp_path)


@pytest.mark.parametrize("number", [1 << 23, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, -1])
def test_an_id_that_no_vocabulary_has_is_refused(number: int, tiny: Path, tmp_path: Path) -> None:
    added = {"content": "<odd>", "id": number, "special": True, "normalized": False}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    model = json.loads((tiny / "tokenizer.json").read_bytes())["model"]
    for name, parts in {
        "added": {"added_tokens": [added]},
        "vocab": {"model": model | {"vocab": model["vocab"] | {"odd": number}}},
    }.items():
        folder = _with(tiny, tmp_path / name, **parts)
        with contextlib.suppress(ModelError):
            assert HuggingFaceTokenizer.load(folder).facts.size < 1 << 20  # the library chose another id
