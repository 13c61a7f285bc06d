"""Tokens: ids, their positions in the text, and the proof that two runs scored the same ones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scoremode.core.models.facts import resolve
from scoremode.core.text.documents import Document, RereadDocuments, chat_document, count_words
from scoremode.core.text.files import Message
from scoremode.core.text.slices import Slicing
from scoremode.core.text.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    TextTokenizer,
    encode_many,
    ids_with_specials,
    owned_characters,
)
from scoremode.core.text.tokens import SpelledIds, Tokens, first_tokens, lone_bytes, tokenize, tokens_of_ids
from scoremode.errors import CorpusError, ModelError, OptionError

SAMPLES = [
    *("Once upon a time, there was a little girl named Lily.", "  leading and trailing  "),
    *("naïve “déjà-vu” — 東京 2024年 👩‍🔬\n\n\ttabs\r\nand lines", "<s> a special token in the text </s>"),
    *("\x07 control \x00 characters \x1b[31m", "\n", " ", "e\u0301 combining"),
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def llama(stories: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(stories)


@pytest.fixture(scope="module")
def bpe(tiny: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(tiny)


@pytest.fixture(params=["bytes", "llama", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    found: TextTokenizer = ByteTokenizer() if request.param == "bytes" else request.getfixturevalue(request.param)
    return found


def tokens_of(tokenizer: TextTokenizer, *texts: str, special: bool = True) -> Tokens:
    return tokenize([Document(text) for text in texts], tokenizer, special=special)


# ── where tokens stand ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("text", SAMPLES)
def test_spans_follow_each_other_without_gap_or_overlap(tokenizer: TextTokenizer, text: str) -> None:
    encoding = tokenizer.encode(text, special=True)
    assert encoding.char_start.tolist() == [0, *encoding.char_end[:-1].tolist()]
    assert encoding.char_end[-1] == len(text)
    assert tokens_of(tokenizer, text).word_starts.sum() == len(re.findall(r"\S+", text))


@given(text=TEXT)
@example("\x7f\x80\u07ff\u0800\uffff\U00010000")  # where one byte more begins
@settings(deadline=None, max_examples=200)
def test_bytes_sum_for_any_text(llama: HuggingFaceTokenizer, bpe: HuggingFaceTokenizer, text: str) -> None:
    for tokenizer in (ByteTokenizer(), llama, bpe):
        assert tokens_of(tokenizer, text).byte_len.sum() == len(text.encode())


def test_a_character_cut_into_several_tokens_belongs_to_the_first_and_all_touch_it() -> None:
    assert tokens_of(ByteTokenizer(), "a東b").byte_len.tolist() == [1, 3, 0, 0, 1]
    assert ByteTokenizer().encode("a東", special=False).touches.tolist() == [0, 1, 1, 1]


def test_a_word_begins_in_the_token_that_owns_its_first_character(llama: HuggingFaceTokenizer) -> None:
    tokens = tokens_of(llama, "Once upon a time")
    begins = [llama.decode([int(i)]).strip()[:1] for i in tokens.ids[tokens.word_starts > 0]]
    assert begins == ["O", "u", "a", "t"]


def test_each_document_gets_its_own_bos_which_owns_nothing(llama: HuggingFaceTokenizer) -> None:
    facts = llama.facts
    assert (facts.size, facts.bos, facts.eos, facts.adds_bos) == (512, 1, 2, True)
    tokens = tokens_of(llama, "One", "Two")
    assert [int(tokens.ids[s]) for s in tokens.doc_starts[:-1]] == [facts.bos] * 2
    assert facts.bos not in tokens_of(llama, "One", special=False).ids
    encoding = llama.encode("once upon " * 2000, special=True)  # longer than the context, and not truncated
    assert (encoding.char_start[0], encoding.char_end[0], encoding.char_end[-1]) == (0, 0, 20_000)


@pytest.mark.parametrize(
    ("begins", "ends", "owned"),
    [
        ([0, 4], [3, 7], [(0, 3), (3, 7)]),  # some tokenizers exclude the space before a word from its offsets
        ([0, 2, 0], [2, 4, 0], [(0, 2), (2, 4), (4, 4)]),  # special tokens have (0, 0) wherever they are
    ],
)
def test_every_character_is_owned_by_one_token(
    begins: list[int], ends: list[int], owned: list[tuple[int, int]]
) -> None:
    ids = np.arange(len(begins), dtype=np.int32)
    encoding = owned_characters(ids, np.array(begins), np.array(ends), max(ends))
    assert list(zip(encoding.char_start.tolist(), encoding.char_end.tolist(), strict=True)) == owned


# ── the stream ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_documents_follow_each_other_in_one_stream() -> None:
    tokens = tokens_of(ByteTokenizer(), "ab", "", "cde")
    assert (tokens.ids.tolist(), tokens.doc_starts.tolist()) == ([97, 98, 99, 100, 101], [0, 2, 2, 5])
    assert tokens.char_start.tolist() == [0, 1, 0, 1, 2], "from each document's own beginning"
    with pytest.raises(ValueError, match="read-only"):
        tokens.ids[0] = 0
    none = tokens_of(ByteTokenizer())
    assert (len(none), none.documents, none.doc_starts.tolist()) == (0, 0, [0])
    counted = tokenize([Document("ab", source="one two ab")], ByteTokenizer(), special=True)
    assert (counted.doc_bytes.tolist(), counted.doc_words.tolist()) == ([10], [3])


def test_a_tokenizer_that_was_saved_with_truncation_does_not_truncate(stories: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stories, tmp_path / "cut"))
    saved = json.loads((folder / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    saved["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    text = "Once upon a time there was a little girl. " * 3
    found = HuggingFaceTokenizer.load(folder).encode(text, special=True).ids
    assert found.tolist() == HuggingFaceTokenizer.load(stories).encode(text, special=True).ids.tolist()


# ── the fingerprint ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_fingerprint_is_that_of_the_tokens_not_of_the_folder(
    stories: Path, llama: HuggingFaceTokenizer, tiny: Path, tiny_bos: Path, tmp_path: Path
) -> None:
    assert HuggingFaceTokenizer.load(Path(shutil.copytree(stories, tmp_path / "copy"))).facts == llama.facts
    other = HuggingFaceTokenizer.load(stories)
    other.hf.add_tokens(["scoremode"])
    assert HuggingFaceTokenizer(other.hf, "other").facts.fingerprint != llama.facts.fingerprint
    a, b = HuggingFaceTokenizer.load(tiny).facts, HuggingFaceTokenizer.load(tiny_bos).facts
    assert (a.fingerprint != b.fingerprint, a.adds_bos, b.adds_bos) == (True, False, True)


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ModelError, match="no offsets"):
        HuggingFaceTokenizer(Slow(), "slow")


# ── pieces ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("text", ["Once upon a time", "naïve 東京"])
def test_the_pieces_of_ids_make_the_text(tokenizer: TextTokenizer, text: str) -> None:
    pieces = tokenizer.pieces()
    ids = tokenizer.encode(text, special=False).ids
    assert b"".join(pieces[i] for i in ids).removeprefix(b" ") == text.encode()  # SentencePiece adds a space
    assert len(pieces) == tokenizer.facts.size


# ── chat ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
CHAT: list[Message] = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]


def scored_text(found: Document) -> list[str]:
    assert found.scored_spans is not None
    text = found.text
    return [text[a:b] for a, b in found.scored_spans]


def test_a_chat_is_what_the_template_writes_and_the_assistant_ends_its_turn(bpe: HuggingFaceTokenizer) -> None:
    found = chat_document(CHAT[:2], bpe, Slicing(), assistant_only=False)
    assert found.text == "<s>user: Hi there</s>\n<s>assistant: Hello</s>\n"
    assert found.scored_spans is None
    assert scored_text(chat_document(CHAT, bpe, Slicing(), assistant_only=True)) == ["Hello</s>", "See you</s>"]


def test_smollm2_scores_the_assistants_words_and_its_end_of_turn() -> None:
    tokenizer = HuggingFaceTokenizer.load(resolve("smollm2-135m"))
    assert scored_text(chat_document(CHAT[:2], tokenizer, Slicing(), assistant_only=True)) == ["Hello<|im_end|>"]


def test_the_tokens_of_a_template_are_not_given_a_second_bos(tiny_bos: Path, tmp_path: Path) -> None:
    from scoremode.core.text.corpus import load

    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    tokenizer = HuggingFaceTokenizer.load(tiny_bos)
    tokens = tokenize(RereadDocuments(load(str(path)), "join-lines", tokenizer), tokenizer, special=False)
    assert tokens.ids[:2].tolist().count(tokenizer.facts.bos) == 1


REWRITES = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "turns", "words"),
    [
        (None, 1, "no assistant turn"),
        ("", 4, "no chat template"),
        (REWRITES + "{% if add_generation_prompt %}>{% endif %}", 4, "rewrites earlier turns"),
        ("{{ raise_exception('roles must alternate') }}", 4, "roles must alternate"),
    ],
)
def test_chats_whose_assistant_cannot_be_found_are_refused(
    tiny: Path, template: str | None, turns: int, words: str
) -> None:
    """If a later turn changes the text of an earlier one, the assistant's tokens cannot be identified."""
    tokenizer = HuggingFaceTokenizer.load(tiny)
    tokenizer.hf.chat_template = tokenizer.hf.chat_template if template is None else template or None
    with pytest.raises(ModelError, match=words):
        chat_document(CHAT[:turns], tokenizer, Slicing(), assistant_only=True)


# ── memory and loudness ──────────────────────────────────────────────────────────────────────────────────────────────
def test_a_text_that_does_not_fit_in_memory_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = HuggingFaceTokenizer.load(tiny)
    text = "The quick brown fox. " * 20_000
    monkeypatch.setattr("scoremode.core.free_memory.available", lambda: 50_000_000)
    with pytest.raises(CorpusError, match="needs about 168 MB of memory, and 50 MB are free; give a smaller file"):
        tokenizer.encode(text, special=True)
    assert len(tokenizer.encode(text[:10_000], special=True).ids) > 0


def test_transformers_is_as_loud_afterwards_as_it_was(tiny: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_info()
    logging.enable_progress_bar()  # another test may have disabled it
    try:
        HuggingFaceTokenizer.load(tiny)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, True)
    finally:
        logging.set_verbosity(before)


def test_stored_ids_are_spelled_with_split_characters_whole_and_lone_bytes_counted() -> None:
    ids = np.frombuffer("é".encode()[1:] + "aé".encode() + b"\xff", np.uint8).astype(np.int32)
    spelled = SpelledIds.of(np.append(ids, 300), ByteTokenizer().pieces())
    assert (spelled.text, spelled.lone, spelled.ends.tolist()) == ("�aé�", 2, [1, 2, 3, 3, 4, 4])
    assert spelled.byte_len.tolist() == [1, 1, 2, 0, 1, 0]
    tokens = tokens_of_ids([np.append(ids, 300)] * 2, [spelled] * 2, ByteTokenizer())
    assert (tokens.doc_starts.tolist(), tokens.doc_bytes.tolist(), tokens.doc_words.tolist()) == (
        [0, 6, 12],
        [5, 5],
        [1, 1],
    )
    assert tokens.word_starts.tolist() == [1, 0, 0, 0, 0, 0] * 2
    assert lone_bytes(1) == "1 byte of the stored tokens are not UTF-8, and are shown as �"


@pytest.mark.parametrize("limit", [1, 3, 4, 7, 100])
def test_the_first_tokens_of_each_document_are_those_of_shorter_documents(limit: int) -> None:
    """With bytes, a shortened text is its first bytes: every column is that of the shortened texts."""
    texts = ["one two three", "", "ab", "déjà vu"]
    cut, count = first_tokens(tokenize([Document(text) for text in texts], ByteTokenizer(), special=False), limit)
    assert count == sum(len(text.encode()) > limit for text in texts)
    for number, text in enumerate(texts):
        here = slice(*cut.doc_starts[number : number + 2])
        assert cut.ids[here].tolist() == list(text.encode()[:limit])
        assert cut.byte_len[here].sum() == cut.doc_bytes[number]


def test_a_document_that_was_joined_is_not_cut() -> None:
    joined = Document("one two", joined_at=(4,))
    with pytest.raises(OptionError, match="joins all texts"):
        first_tokens(tokenize([joined], ByteTokenizer(), special=False), 3)


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "text", ["", " ", "one", " one  two\n", "a\u2003b\x1fc", "日本 語\u3000です", "\t\tx\t", "👩‍🔬 a\r\n"]
)
def test_words_are_counted_as_by_lm_eval_and_begin_in_a_token(text: str) -> None:
    assert count_words(text) == len(re.split(r"\s+", text))
    tokens = tokens_of(ByteTokenizer(), text)
    begins = [i for i, c in enumerate(text) if not c.isspace() and (i == 0 or text[i - 1].isspace())]
    assert np.repeat(tokens.char_start, tokens.word_starts).tolist() == begins


def test_bytes_and_words_of_tokens_do_not_depend_on_how_many_are_counted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [Document(text) for text in ("Thé 東京 👩‍🔬 words,  and\nmore ASCII words here", "", "second né")]
    at_once = tokenize(texts, ByteTokenizer(), special=False)
    monkeypatch.setattr("scoremode.core.text.tokens.BLOCK", 7)
    again = tokenize(texts, ByteTokenizer(), special=False)
    for name in ("ids", "char_start", "char_end", "byte_len", "word_starts"):
        assert np.array_equal(getattr(again, name), getattr(at_once, name)), name
    assert int(again.byte_len.sum()) == sum(d.source_bytes for d in texts)


TEXTS = [
    "The quick brown fox",
    "",
    "é",
    "In 1999, 12345 cats\tsaid:  “déjà-vu”!\n\n東京 2024年 — naïve 👩‍🔬 don't\x07 <s> _x_ ",
    " ",
    "x" * 500,
    "The quick brown fox",
]


def check(tokenizer: TextTokenizer, texts: list[str]) -> None:
    found = encode_many(tokenizer, texts)
    assert found.joined == "".join(texts)
    for i, text in enumerate(texts):
        alone, at, here = tokenizer.encode(text, special=False), found.starts[i], slice(*found.bounds[i : i + 2])
        assert np.array_equal(found.ids[here], alone.ids)
        for name in ("char_start", "char_end", "touches"):
            assert np.array_equal(getattr(found, name)[here] - at, getattr(alone, name)), name
    full = ids_with_specials(tokenizer, texts)
    expected = [tokenizer.encode(text, special=True).ids.tolist() for text in texts]
    plain = [tokenizer.encode(text, special=False).ids.tolist() for text in texts]
    assert (plain if full is None else full) == expected


def test_bytes() -> None:
    check(ByteTokenizer(), TEXTS)
    check(ByteTokenizer(), ["plain", "ASCII", ""])


@pytest.mark.parametrize("name", ["tiny", "tiny_bos"])
def test_a_tokenizer_of_hugging_face(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    check(HuggingFaceTokenizer.load(folder), TEXTS)


def test_any_other_tokenizer_is_asked_text_by_text() -> None:
    class Other:
        def __init__(self) -> None:
            self.inner = ByteTokenizer()
            self.facts = self.inner.facts
            self.encode, self.decode, self.pieces = self.inner.encode, self.inner.decode, self.inner.pieces
            self.render_chat, self.token_text = self.inner.render_chat, self.inner.token_text

    check(Other(), TEXTS)
