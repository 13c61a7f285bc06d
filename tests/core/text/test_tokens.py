"""Tokens: ids, their positions in the text, and the proof that two runs scored the same ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scoremode.core.models.facts import resolve
from scoremode.core.text.documents import Document, RereadDocuments, chat_document
from scoremode.core.text.files import Message
from scoremode.core.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TextTokenizer, owned_characters
from scoremode.core.text.tokens import Tokens, first_tokens, tokenize
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
    return tokenize([Document([text]) for text in texts], tokenizer, special=special)


# ── where tokens stand ───────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("text", SAMPLES)
def test_spans_follow_each_other_without_gap_or_overlap(tokenizer: TextTokenizer, text: str) -> None:
    encoding = tokenizer.encode(text, special=True)
    assert encoding.char_start.tolist() == [0, *encoding.char_end[:-1].tolist()]
    assert encoding.char_end[-1] == len(text)


@pytest.mark.parametrize("text", SAMPLES)
def test_words_of_all_tokens_sum_to_the_words_of_the_text(tokenizer: TextTokenizer, text: str) -> None:
    import re

    assert tokens_of(tokenizer, text).word_starts.sum() == len(re.findall(r"\S+", text))


@given(TEXT)
@settings(deadline=None)
def test_bytes_sum_for_any_text_over_bytes(text: str) -> None:
    tokens = tokens_of(ByteTokenizer(), text)
    assert (len(tokens), tokens.byte_len.sum()) == (len(text.encode()), len(text.encode()))


@given(text=TEXT)
@settings(deadline=None, max_examples=200)
def test_bytes_sum_for_any_text_over_real_tokenizers(
    llama: HuggingFaceTokenizer, bpe: HuggingFaceTokenizer, text: str
) -> None:
    assert tokens_of(llama, text).byte_len.sum() == tokens_of(bpe, text).byte_len.sum() == len(text.encode())


def test_a_character_cut_into_several_tokens_belongs_to_the_first() -> None:
    assert tokens_of(ByteTokenizer(), "a東b").byte_len.tolist() == [1, 3, 0, 0, 1]


def test_a_word_begins_in_the_token_that_owns_its_first_character(llama: HuggingFaceTokenizer) -> None:
    tokens = tokens_of(llama, "Once upon a time")
    begins = [llama.decode([int(i)]).strip()[:1] for i in tokens.ids[tokens.word_starts > 0]]
    assert begins == ["O", "u", "a", "t"]


def test_a_special_token_owns_nothing(llama: HuggingFaceTokenizer) -> None:
    encoding = llama.encode("Once", special=True)
    assert (encoding.ids[0], encoding.char_start[0], encoding.char_end[0]) == (llama.facts.bos, 0, 0)


@pytest.mark.parametrize(
    ("given", "owned"),
    [
        ([(0, 3), (4, 7)], [(0, 3), (3, 7)]),  # some tokenizers exclude the space before a word from its offsets
        ([(0, 2), (2, 4), (0, 0)], [(0, 2), (2, 4), (4, 4)]),  # special tokens are at (0, 0) wherever they are
    ],
)
def test_offsets_with_gaps_become_spans_without(given: list[tuple[int, int]], owned: list[tuple[int, int]]) -> None:
    starts, ends = np.array(given).T
    encoding = owned_characters(np.arange(len(given), dtype=np.int32), starts, ends, owned[-1][1])
    assert list(zip(encoding.char_start.tolist(), encoding.char_end.tolist(), strict=True)) == owned


def test_a_token_touches_the_character_that_it_shares() -> None:
    encoding = ByteTokenizer().encode("a東", special=False)
    assert encoding.touches.tolist() == [0, 1, 1, 1]


def test_an_empty_text_has_no_tokens() -> None:
    assert len(ByteTokenizer().encode("", special=True).ids) == 0


# ── the stream ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_documents_follow_each_other_in_one_stream() -> None:
    tokens = tokens_of(ByteTokenizer(), "ab", "", "cde")
    assert (tokens.ids.tolist(), tokens.doc_starts.tolist()) == ([97, 98, 99, 100, 101], [0, 2, 2, 5])
    assert tokens.char_start.tolist() == [0, 1, 0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        tokens.ids[0] = 0


def test_each_document_gets_its_own_bos(llama: HuggingFaceTokenizer) -> None:
    tokens = tokens_of(llama, "One", "Two")
    assert [int(tokens.ids[s]) for s in tokens.doc_starts[:-1]] == [llama.facts.bos] * 2


def test_without_special_tokens_there_is_no_bos(llama: HuggingFaceTokenizer) -> None:
    assert llama.facts.bos not in tokens_of(llama, "One", special=False).ids


def test_no_documents_are_no_tokens() -> None:
    tokens = tokens_of(ByteTokenizer())
    assert (len(tokens), tokens.documents, tokens.doc_starts.tolist()) == (0, 0, [0])


def test_the_counts_of_the_source_travel_with_the_tokens() -> None:
    tokens = tokenize([Document(["ab"], source="one two ab")], ByteTokenizer(), special=True)
    assert (tokens.doc_bytes.tolist(), tokens.doc_words.tolist()) == ([10], [3])


def test_a_text_longer_than_the_models_context_is_not_truncated(llama: HuggingFaceTokenizer) -> None:
    assert llama.encode("once upon " * 2000, special=True).char_end[-1] == len("once upon " * 2000)


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


def test_smollm2_cuts_numbers_into_single_digits() -> None:
    """The GGUF does not say so; without it, every number gets other ids than in the original model."""
    tokenizer = HuggingFaceTokenizer.load(resolve("smollm2-135m"))
    encoding = tokenizer.encode("12345", special=True)
    assert np.diff(encoding.char_end, prepend=0).tolist() == [1] * 5


# ── the fingerprint ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_fingerprint_does_not_depend_on_the_folder(
    stories: Path, llama: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    copy = shutil.copytree(stories, tmp_path / "copy")
    assert HuggingFaceTokenizer.load(copy).facts == llama.facts


def test_an_added_token_changes_the_fingerprint(stories: Path, llama: HuggingFaceTokenizer) -> None:
    other = HuggingFaceTokenizer.load(stories)
    other.hf.add_tokens(["scoremode"])
    assert HuggingFaceTokenizer(other.hf, "other").facts.fingerprint != llama.facts.fingerprint


def test_adding_a_bos_or_not_changes_the_fingerprint(tiny: Path, tiny_bos: Path) -> None:
    """The same vocabulary, but different tokens."""
    a, b = HuggingFaceTokenizer.load(tiny).facts, HuggingFaceTokenizer.load(tiny_bos).facts
    assert (a.fingerprint != b.fingerprint, a.adds_bos, b.adds_bos) == (True, False, True)


def test_the_facts_of_stories260k_are_known(llama: HuggingFaceTokenizer) -> None:
    facts = llama.facts
    assert (facts.size, facts.bos, facts.eos, facts.adds_bos) == (512, 1, 2, True)


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


def test_there_is_a_piece_for_every_id(tokenizer: TextTokenizer) -> None:
    assert len(tokenizer.pieces()) == tokenizer.facts.size


# ── chat ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
CHAT: list[Message] = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]


def scored_text(found: Document) -> list[str]:
    assert found.scored_spans is not None
    text = found.read()
    return [text[a:b] for a, b in found.scored_spans]


def test_a_chat_is_what_the_template_writes(bpe: HuggingFaceTokenizer) -> None:
    found = chat_document(CHAT[:2], bpe, assistant_only=False)
    assert (found.read(), found.scored_spans) == ("<s>user: Hi there</s>\n<s>assistant: Hello</s>\n", None)


def test_only_the_assistants_tokens_are_targets(bpe: HuggingFaceTokenizer) -> None:
    found = chat_document(CHAT, bpe, assistant_only=True)
    assert scored_text(found) == ["Hello</s>", "See you</s>"]  # with the mark that ends a turn
    tokens = tokenize([found], bpe, special=False)
    assert tokens.target_mask is not None
    text = found.read()
    pieces = [text[a:b] for a, b in zip(tokens.char_start, tokens.char_end, strict=True)]
    kept = "".join(piece for piece, wanted in zip(pieces, tokens.target_mask, strict=True) if wanted)
    assert kept.replace(" ", "") == "Hello</s>Seeyou</s>"


def test_smollm2_scores_the_assistants_words_and_its_end_of_turn() -> None:
    tokenizer = HuggingFaceTokenizer.load(resolve("smollm2-135m"))
    assert scored_text(chat_document(CHAT[:2], tokenizer, assistant_only=True)) == ["Hello<|im_end|>"]


def test_the_tokens_of_a_template_are_not_given_a_second_bos(tiny_bos: Path, tmp_path: Path) -> None:
    from scoremode.core.text.corpus import load

    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    tokenizer = HuggingFaceTokenizer.load(tiny_bos)
    tokens = tokenize(RereadDocuments(load(str(path)), "join-lines", tokenizer), tokenizer, special=False)
    assert tokens.ids[:2].tolist().count(tokenizer.facts.bos) == 1


def test_a_chat_without_an_assistant_is_refused_where_only_its_tokens_count(bpe: HuggingFaceTokenizer) -> None:
    with pytest.raises(ModelError, match="no assistant turn"):
        chat_document(CHAT[:1], bpe, assistant_only=True)


def test_a_model_without_a_chat_template_says_so(llama: HuggingFaceTokenizer) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        chat_document(CHAT, llama, assistant_only=False)


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny: Path) -> None:
    """If a later turn changes the text of an earlier one, the assistant's tokens cannot be identified."""
    tokenizer = HuggingFaceTokenizer.load(tiny)
    tokenizer.hf.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    with pytest.raises(ModelError, match="rewrites earlier turns"):
        chat_document(CHAT, tokenizer, assistant_only=True)


def test_a_template_that_refuses_a_row_is_quoted(tiny: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(tiny)
    tokenizer.hf.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ModelError, match="roles must alternate"):
        chat_document(CHAT, tokenizer, assistant_only=False)


def test_a_message_that_bytes_cannot_write_is_refused() -> None:
    with pytest.raises(ModelError):
        chat_document([{"role": "user"}], ByteTokenizer(), assistant_only=False)


# ── content in parts ─────────────────────────────────────────────────────────────────────────────────────────────────
PARTS: list[Message] = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("Look at ", "this")]}]
AS_TEXT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
AS_JSON = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | tojson }}\n{% endfor %}"
JOINED = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}\n{% endfor %}"
ONLY_STRINGS = "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% endif %}\n{% endfor %}"
ONLY_THE_FIRST = "{% for m in messages %}{{ m['content'][0]['text'] }}\n{% endfor %}"
IN_PARTS = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [AS_TEXT, AS_JSON, JOINED, ONLY_STRINGS, ONLY_THE_FIRST])
def test_parts_are_refused_where_the_template_would_print_or_drop_them(tiny: Path, template: str) -> None:
    """``{{ m['content'] }}`` of a list is "[{'type': 'text', …", which would be scored as if it were text."""
    tokenizer = HuggingFaceTokenizer.load(tiny)
    tokenizer.hf.chat_template = template
    with pytest.raises(ModelError, match=r"does not support content that is a list of parts|refused a row"):
        chat_document(PARTS, tokenizer, assistant_only=False)


def test_parts_are_read_where_the_template_takes_them(tiny: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(tiny)
    tokenizer.hf.chat_template = IN_PARTS
    assert chat_document(PARTS, tokenizer, assistant_only=False).read() == "user: Look at this"


def test_bytes_take_parts() -> None:
    assert chat_document(PARTS, ByteTokenizer(), assistant_only=False).read() == "user: Look at this\n"


# ── memory and loudness ──────────────────────────────────────────────────────────────────────────────────────────────
def test_a_text_that_does_not_fit_in_memory_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = HuggingFaceTokenizer.load(tiny)
    text = "The quick brown fox. " * 20_000
    monkeypatch.setattr("scoremode.core.free_memory.available", lambda: 50_000_000)
    with pytest.raises(CorpusError, match="of memory, and 50 MB are free; give a smaller file"):
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


@pytest.mark.parametrize("limit", [1, 3, 4, 7, 100])
def test_the_first_tokens_of_each_document_are_those_of_shorter_documents(limit: int) -> None:
    """With bytes, a shortened text is its first bytes: every column is that of the shortened texts."""
    texts = ["one two three", "", "ab", "déjà vu"]
    cut, count = first_tokens(tokenize([Document([text]) for text in texts], ByteTokenizer(), special=False), limit)
    assert count == sum(len(text.encode()) > limit for text in texts)
    for number, text in enumerate(texts):
        here = slice(*cut.doc_starts[number : number + 2])
        assert cut.ids[here].tolist() == list(text.encode()[:limit])
        assert cut.byte_len[here].sum() == cut.doc_bytes[number]


def test_a_document_that_was_joined_is_not_cut() -> None:
    joined = Document(["one two"], joined_at=(4,))
    with pytest.raises(OptionError, match="joins all texts"):
        first_tokens(tokenize([joined], ByteTokenizer(), special=False), 3)
    with pytest.raises(OptionError, match="leaves no text"):
        first_tokens(tokenize([Document(["one two"])], ByteTokenizer(), special=False), 0)


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_white_space_is_what_regular_expressions_call_so() -> None:
    """Every code point, so that word counts are those of lm-evaluation-harness."""
    import re
    import sys

    from scoremode.core.text.documents import SPACES

    matched = [point for point in range(sys.maxunicode + 1) if re.match(r"\s", chr(point))]
    assert matched == np.flatnonzero(SPACES).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 1 << 18])
def test_words_are_counted_as_by_a_regular_expression(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """However the text is cut into blocks."""
    import re

    from scoremode.core.text import documents, tokens

    monkeypatch.setattr(documents, "CHARACTERS", size)
    for text in ("", " ", "one", " one  two\n", "a\u2003b\x1fc", "日本 語\u3000です", "x" * 5 + "\t" * 5, "👩‍🔬 a\r\n"):
        counter = documents.WordCounter()
        counter.add(text)
        assert counter.count == 1 + len(re.findall(r"\s+", text)), repr(text)
        starts = tokens.word_starts_in(text, ByteTokenizer().encode(text, special=False).char_end)
        assert int(starts.sum()) == len(re.findall(r"\S+", text)), repr(text)
