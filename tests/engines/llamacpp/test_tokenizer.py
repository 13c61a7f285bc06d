"""The tokenizer inside a GGUF file against the Hugging Face tokenizer it was made of, and against invariants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoremode.core.models.embedded import embedded_gguf
from scoremode.core.models.facts import resolve
from scoremode.core.models.names import EMBEDDED
from scoremode.core.text.files import Message
from scoremode.core.text.tokenizer import Encoding, HuggingFaceTokenizer, TextTokenizer
from scoremode.engines.llamacpp.gguf_subject import LlamaTokenizer, gguf_subject
from scoremode.errors import CorpusError, ModelError
from tests.gguf_files import CONTROL, gguf_of, sentencepiece_like
from tests.makers import SENTENCES, VOCABULARY, make_tiny_model

TEXTS = [
    "",
    "a",
    " ",
    "  two  spaces ",
    "\n\n\t",
    "é",
    "東京",
    "👩‍🔬",
    "x👩‍🔬y e\u0301 ﬁ",
    "don't 12345 I'LL",
    "a\0b",
    "<s>",
    "before <s> after</s>",
    "<s",
    "\u2581 mark",
    "\ufeffbom",
    *SENTENCES,
]


def assert_whole(found: Encoding, text: str) -> None:
    """Spans without gaps or overlaps, that are the text."""
    begins, ends = found.char_start.tolist(), found.char_end.tolist()
    assert begins == [0, *ends[:-1]][: len(begins)]
    assert (ends[-1:] or [0]) == [len(text)] or not len(found.ids)
    assert all(a <= b for a, b in zip(begins, ends, strict=True))
    assert "".join(text[a:b] for a, b in zip(begins, ends, strict=True)) == text
    assert (found.touches <= found.char_start).all()


def assert_same(ours: Encoding, theirs: Encoding) -> None:
    for name in ("ids", "char_start", "char_end", "touches"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "adds a BOS"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TextTokenizer, ...]:
    folder = make_tiny_model(tmp_path_factory.mktemp("hf"), adds_bos=request.param)
    made = gguf_of(folder, folder / "model.gguf")
    return gguf_subject(str(made), None).tokenizer, HuggingFaceTokenizer.load(folder)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_ids_and_positions_are_those_of_the_hugging_face_tokenizer(
    both: tuple[TextTokenizer, ...], text: str, special: bool
) -> None:
    ours, theirs = (tokenizer.encode(text, special=special) for tokenizer in both)
    assert_same(ours, theirs)
    assert_whole(ours, text)


def test_facts_pieces_and_chats_are_those_of_the_hugging_face_tokenizer(both: tuple[TextTokenizer, ...]) -> None:
    ours, theirs = both
    assert ours.facts == theirs.facts
    assert ours.pieces() == theirs.pieces()
    texts = [[tokenizer.token_text(i) for i in range(ours.facts.size)] for tokenizer in both]
    assert texts[0] == texts[1]
    ids = theirs.encode(SENTENCES[1], special=True).ids.tolist()
    assert ours.decode(ids) == theirs.decode(ids)
    chat: list[Message] = [{"role": "user", "content": "naïve?"}, {"role": "assistant", "content": "no"}]
    for open_turn in (True, False):
        assert ours.render_chat(chat, open_turn=open_turn) == theirs.render_chat(chat, open_turn=open_turn)


# ── SentencePiece ────────────────────────────────────────────────────────────────────────────────────────────────────
PIECES = ["▁", "a", "b", "e", "t", "h", "▁t", "he", "▁the", "ab", "▁a", "▁▁", "東"]


def spm(folder: Path, tiny: Path, **kind: bool) -> LlamaTokenizer:
    pad = [f"filler{i}" for i in range(VOCABULARY - 259 - len(PIECES))]
    made = gguf_of(tiny, folder / "spm.gguf", tokenizer=sentencepiece_like([*PIECES, *pad], **kind))
    return LlamaTokenizer(made)


@pytest.mark.parametrize("adds_space", [True, False])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_positions_of_a_tokenizer_with_bytes_and_a_leading_space(
    tmp_path: Path, tiny: Path, adds_bos: bool, adds_space: bool
) -> None:
    tokenizer = spm(tmp_path, tiny, adds_bos=adds_bos, adds_space=adds_space)
    assert tokenizer.facts.adds_bos == adds_bos
    assert (tokenizer.facts.bos, tokenizer.facts.eos, tokenizer.facts.size) == (1, 2, VOCABULARY)
    with pytest.raises(CorpusError, match="do not spell the text"):  # it reads ▁ as a space
        tokenizer.encode("\u2581 mark", special=True)
    for text in [*(t for t in TEXTS if "\u2581" not in t), "the the", "  the", "ab東👩‍🔬ab"]:
        for special in (True, False):
            found = tokenizer.encode(text, special=special)
            assert_whole(found, text)
            assert (found.ids[:1].tolist() == [1]) == (adds_bos and special) or text.startswith("<s>")


def test_an_emoji_of_several_tokens_is_owned_by_the_first(tmp_path: Path, tiny: Path) -> None:
    found = spm(tmp_path, tiny, adds_bos=False, adds_space=False).encode("a🔬b", special=False)
    assert found.ids.tolist()[1:5] == [3 + byte for byte in "🔬".encode()]
    assert found.char_start.tolist() == [0, 1, 2, 2, 2, 2]
    assert found.char_end.tolist() == [1, 2, 2, 2, 2, 3]
    assert found.touches.tolist() == [0, 1, 1, 1, 1, 2]


def test_stories260k_has_the_ids_and_positions_of_its_hugging_face_tokenizer(stories: Path, tmp_path: Path) -> None:
    import json

    stored = json.loads((stories / "tokenizer.json").read_text())["model"]["vocab"]
    by_id = sorted(stored, key=stored.__getitem__)

    def add(writer: Any) -> None:
        sentencepiece_like(by_id[259:])(writer)

    theirs = HuggingFaceTokenizer.load(stories)
    ours = LlamaTokenizer(gguf_of(stories, tmp_path / "stories.gguf", tokenizer=add))
    for text in ["Once upon a time", "Lily and Ben", " a  b", "the 👩‍🔬 cat", "é"]:
        one, other = ours.encode(text, special=True), theirs.encode(text, special=True)
        assert np.array_equal(one.ids, other.ids), text
        assert_whole(one, text)
        if text != "é":  # Hugging Face gives the letter to the space before it, which is a token of its own here
            assert np.array_equal(one.char_end, other.char_end), text
    assert [ours.token_text(i) for i in range(512)] == [theirs.token_text(i) for i in range(512)]


# ── the embedded model ───────────────────────────────────────────────────────────────────────────────────────────────
def test_the_embedded_gguf_has_the_tokenizer_of_the_embedded_model() -> None:
    ours: TextTokenizer = gguf_subject(str(embedded_gguf()), None).tokenizer
    theirs = HuggingFaceTokenizer.load(resolve(EMBEDDED))
    assert ours.facts == theirs.facts
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>", "x" * 5000, "naïve 1234567\r\n\u200d"]:
        assert_same(ours.encode(text, special=True), theirs.encode(text, special=True))


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_file_without_a_vocabulary_asks_for_a_tokenizer(tiny: Path, tmp_path: Path) -> None:
    bare = gguf_of(tiny, tmp_path / "bare.gguf", tokenizer=lambda writer: writer.add_tokenizer_model("none"))
    with pytest.raises(ModelError, match="--tokenizer"):
        LlamaTokenizer(bare)
    assert gguf_subject(str(bare), str(tiny)).tokenizer.encode("The", special=False).ids.size


def without_bytes(writer: Any) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "▁", "a", *(f"filler{i}" for i in range(VOCABULARY - 5))])
    writer.add_token_types([2, CONTROL, CONTROL, *[1] * (VOCABULARY - 3)])
    writer.add_token_scores([0.0] * VOCABULARY)


def test_a_vocabulary_without_bytes_is_refused_before_llamacpp_ends_the_process(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="lacks the token <0x00> of a byte"):
        LlamaTokenizer(gguf_of(tiny, tmp_path / "bytes.gguf", tokenizer=without_bytes))


def test_a_tokenizer_that_does_not_spell_the_text_is_refused(tiny: Path, tmp_path: Path) -> None:
    """llama.cpp drops characters that a byte-level vocabulary does not have."""

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["<s>", "</s>", "a", *(f"filler{i}" for i in range(VOCABULARY - 3))])
        writer.add_token_types([CONTROL, CONTROL, *[1] * (VOCABULARY - 2)])
        writer.add_token_merges(["a a"])

    tokenizer = LlamaTokenizer(gguf_of(tiny, tmp_path / "few.gguf", tokenizer=add))
    assert_whole(tokenizer.encode("aa", special=False), "aa")
    with pytest.raises(CorpusError, match="do not spell the text: they differ from it at 'xa'"):
        tokenizer.encode("axa", special=False)


def test_special_tokens_in_a_text_with_more_tokens_than_bytes(tmp_path: Path, tiny: Path) -> None:
    """After each special token comes a space of its own, here in front of a byte that has no token."""
    text = "<s>ü" * 40
    assert_whole(spm(tmp_path, tiny).encode(text, special=True), text)
