"""The text of a token is a function of its id, for every kind of tokenizer; bytes of half characters are shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from scoremode.core.text.token_text import byte_level_piece, joined, owned, spelled
from scoremode.core.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TextTokenizer
from tests.core.text.tokenizers_at_hand import KINDS, wrapped

PIECES = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁upon", "upon", "Once", "▁Once", "▁a", "a"]
TEXT = "Once upon a 東 time"


def sentencepiece(scheme: str) -> HuggingFaceTokenizer:
    """A vocabulary with byte fallback; the space in front is put there by a normalizer, by Metaspace, or not at all."""
    made = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(PIECES)}, [], byte_fallback=True, unk_token="<unk>")
    )
    if scheme == "normalizer":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        spaces = decoders.Replace("▁", " ")
        made.decoder = decoders.Sequence(
            [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1)]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    made.add_special_tokens([AddedToken("<s>", special=True)])
    made.add_tokens([AddedToken("naïve", normalized=False)])
    return wrapped(made)


def test_the_alphabet_of_bytes_is_that_of_the_tokenizers() -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(byte_level_piece(character) for character in alphabet) == [bytes([byte]) for byte in range(256)]
    for text in ("naïve 東\n", "\x00\x7f\xad ¡ÿ"):
        ((piece, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        assert byte_level_piece(piece) == text.encode()


@pytest.mark.parametrize("scheme", ["normalizer", "always", "first", "never"])
def test_tokens_of_sentencepiece_keep_their_spaces_and_bytes(scheme: str) -> None:
    tokenizer = sentencepiece(scheme)
    ids = {piece: i for i, piece in enumerate(PIECES)}
    shown = {piece: tokenizer.token_text(ids[piece]) for piece in ("▁upon", "upon", "▁", "<0x0A>", "<0xE6>", "<s>")}
    assert shown == {"▁upon": " upon", "upon": "upon", "▁": " ", "<0x0A>": "\n", "<0xE6>": "<0xE6>", "<s>": "<s>"}
    assert tokenizer.token_text(len(PIECES)) == "naïve"
    assert tokenizer.token_text(len(PIECES) + 1) == f"<id {len(PIECES) + 1}>"


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_the_pieces(kind: str) -> None:
    """``pieces`` has no text for special tokens; all others have the same bytes."""
    backend = KINDS[kind]()
    if kind == "gpt4":  # an added token is plain text, also if its characters are names of bytes
        backend.add_tokens(["café"])
    tokenizer = wrapped(backend)
    texts = [tokenizer.token_text(i) for i in range(tokenizer.facts.size)]
    for text, piece in zip(texts, tokenizer.pieces(), strict=True):
        assert piece in (b"", text.encode()) or spelled(piece) == text
    if kind == "gpt4":
        assert {" ", "\n", "café", "<0xE9>", "<extra>"} <= set(texts)
        assert any(text[:1] == " " and text[1:].isalpha() for text in texts)


@pytest.mark.parametrize("kind", ["bytes", "gpt4", "normalizer", "always", "first", "never"])
def test_joined_texts_are_the_text_but_for_a_space_in_front(kind: str) -> None:
    tokenizer: TextTokenizer
    tokenizer = ByteTokenizer() if kind == "bytes" else wrapped(KINDS[kind]()) if kind in KINDS else sentencepiece(kind)
    ids = tokenizer.encode(TEXT, special=False).ids.tolist()
    texts = [tokenizer.token_text(i) for i in ids]
    assert joined(texts).removeprefix(" ") == TEXT
    assert "東" in "".join(owned(texts))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.data())
def test_cut_characters_are_joined_again_and_shown_once(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    texts = [spelled(piece) for piece in pieces]
    assert joined(texts) == text
    shown = owned(texts)
    assert len(shown) == len(texts)
    for own, piece in zip(shown, pieces, strict=True):
        assert own or not piece, "no token is invisible"
