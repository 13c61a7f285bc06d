"""Folders with a tokenizer: what Transformers makes of them, and files of strangers that are refused."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from scoremode.core.models.facts import resolve
from scoremode.core.text.tokenizer import HuggingFaceTokenizer
from scoremode.core.text.tokenizer_loading import require_bounded
from scoremode.errors import ModelError
from tests.core.text.tokenizers_at_hand import KINDS

CLASS = {"tokenizer_class": "LlamaTokenizer"}


def everything(tokenizer: Any) -> tuple[Any, ...]:
    return type(tokenizer), repr(tokenizer), tokenizer.chat_template, tokenizer.backend_tokenizer.to_str()


@pytest.mark.parametrize("name", ["tiny", "tiny_bos", "smollm2-135m"])
def test_the_shortcut_gives_the_tokenizer_that_transformers_chooses(name: str, request: pytest.FixtureRequest) -> None:
    folder = resolve(name) if "-" in name else request.getfixturevalue(name)
    ours, theirs = HuggingFaceTokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert everything(ours.hf) == everything(theirs)
    assert ours.facts == HuggingFaceTokenizer(theirs, "theirs").facts


@pytest.mark.parametrize(
    ("file", "change"),
    [
        *(("tokenizer_config.json", change) for change in (CLASS, {"add_bos_token": True}, {"eos_token": "new"})),
        ("config.json", {"model_type": "qwen2"}),
        ("config.json", {"model_type": "mistral", "transformers_version": "4.57.0"}),
        ("added_tokens.json", {"<more>": 600}),
    ],
)
def test_no_setting_of_a_folder_is_overlooked(file: str, change: dict[str, Any], tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "changed"))
    before = json.loads((folder / file).read_bytes()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(before | change))
    assert everything(HuggingFaceTokenizer.load(folder).hf) == everything(AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named_with_its_folder(file: str, tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "damaged"))
    (folder / file).write_text("{")
    with pytest.raises(ModelError, match=f"the tokenizer in {folder} could not be loaded"):
        HuggingFaceTokenizer.load(folder)


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
