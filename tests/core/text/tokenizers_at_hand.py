"""Small tokenizers of every kind, trained here, and words in many scripts to try them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from scoremode.core.text.tokenizer import HuggingFaceTokenizer

WORDS = [
    "the river",
    "of small towns",
    "don't",
    "Привет мир",
    "река течёт",
    "καλημέρα κόσμε",
    "نهر صغير",
    "שלום עולם",
    "नमस्ते दुनिया",
    "今天天气很好",
    "日本語の文章です",
    "안녕하세요 세계",
    "สวัสดีชาวโลก",
    "👩‍🔬",
    "👍🏽",
    "e\u0301a\u0308\u0323",
    "1,234,567.89",
    "12345678901234567890",
    "http://x.y/z?a=1",
]
JOINTS = [" ", "  ", "\n", "\r\n", "\t", "\n\n", " \n \n   ", "", ", ", ". ", "\u3000", "\u200d", "\u00a0", "      "]
SPECIAL = ["<s>", "</s>", "[UNK]", "<extra>", "▁", "_", "\x07", "\ufeff"]
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def text_to_train_on() -> list[str]:
    return [joint.join(WORDS[i:] + WORDS[:i]) for joint in JOINTS for i in range(len(WORDS))]


def _trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(text_to_train_on(), trainer)
    tokenizer.add_tokens([AddedToken("<extra>", lstrip=True, rstrip=True, normalized=False)])
    return tokenizer


def _byte_level(pattern: str | None, *, prefix_space: bool = False) -> Tokenizer:
    made = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=pattern is None)
    split = pattern and pre_tokenizers.Split(Regex(pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, level]) if split else level
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(
        made, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    )


def gpt2() -> Tokenizer:
    return _byte_level(None, prefix_space=True)


def gpt4() -> Tokenizer:
    made = _byte_level(GPT4)
    made.normalizer = normalizers.NFC()
    return made


def wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made = _trained(made, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "<s>", "</s>"]))
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>")
    made = _trained(made, trainer)
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return made


def plain_bpe() -> Tokenizer:
    """As Llama 2's: no pre-tokenizer, a whole text is one word, and a space is put in front of it."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # for the training: no merge across spaces
    made = _trained(made, trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"]))
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def stripping() -> Tokenizer:
    """Words by white space alone; white space at the ends of a text is taken away first."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFD(), normalizers.StripAccents()])
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _trained(made, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"]))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    made.__name__: made for made in (gpt2, gpt4, wordpiece, unigram, plain_bpe, stripping)
}


def wrapped(backend: Tokenizer) -> HuggingFaceTokenizer:
    from transformers import PreTrainedTokenizerFast

    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "made here")
