"""Slices: every token has the label of the character that it begins with, judged character by character."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from scoremode.core.models.facts import resolve
from scoremode.core.text.documents import Document, chat_document
from scoremode.core.text.files import Message
from scoremode.core.text.slices import Slicing, read_rules
from scoremode.core.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TextTokenizer
from scoremode.core.text.tokens import Tokens, first_tokens, tokenize
from scoremode.errors import CorpusError, OptionError
from tests.core.text.tokenizers_at_hand import KINDS, wrapped

RULES = ("é=<é>..</é>", "b=<b>..</b>")


@pytest.fixture(params=["bytes", "gpt2", "plain_bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    return ByteTokenizer() if request.param == "bytes" else wrapped(KINDS[request.param]())


def labelled(tokenizer: TextTokenizer, text: str, rules: Sequence[str]) -> Tokens:
    slices = Slicing(read_rules(rules)).document(text)
    return tokenize([Document(text, slices=slices)], tokenizer, special=False)


def names_in(tokens: Tokens) -> list[str]:
    assert tokens.slices is not None
    return [tokens.slice_names[code] for code in tokens.slices.tolist()]


def of_characters(text: str, rules: Sequence[str]) -> list[str]:
    """The slice of each character, by the definition: each rule alone, and the first rule wins."""
    found = ["rest"] * len(text)
    for rule in reversed(read_rules(rules)):
        at = 0
        while (begin := text.find(rule.start, at)) >= 0:
            closed = text.find(rule.end, begin + len(rule.start))
            at = len(text) if closed < 0 else closed + len(rule.end)
            found[begin:at] = [rule.name] * (at - begin)
    return found


def of_tokens(tokens: Tokens, characters: Sequence[str]) -> list[str]:
    """The slice of each token: that of its first character, or of the character that it continues."""
    pairs = zip(tokens.char_start.tolist(), tokens.char_end.tolist(), strict=True)
    return [characters[start if end > start else max(0, start - 1)] for start, end in pairs]


@pytest.mark.parametrize(
    "text",
    [
        "one <é>two</é> three <b>four</b> five",
        "<é>all of it, naïve 東京</é>",
        "<é></é><é></é>東<b>東</b>東",
        "a <é>b <b>c</é> d</b> e <é>open é",
        "<b><é>nested</é></b></b></é>",
        "👩‍🔬<é>👩‍🔬</é>👩‍🔬 <b>é</b>é",
    ],
)
def test_a_token_belongs_to_the_slice_that_it_begins_in(tokenizer: TextTokenizer, text: str) -> None:
    both = [rule for rule in RULES if rule[0] in text and f"<{rule[0]}>" in text]
    tokens = labelled(tokenizer, text, both)
    assert names_in(tokens) == of_tokens(tokens, of_characters(text, both))


def test_shortened_documents_keep_their_labels() -> None:
    tokens = labelled(ByteTokenizer(), "ab<b>cd</b>ef", ["b=<b>..</b>"])
    assert names_in(first_tokens(tokens, 6)[0]) == names_in(tokens)[:6]


def test_a_text_without_rules_has_no_slices() -> None:
    tokens = tokenize([Document("text")], ByteTokenizer(), special=False)
    assert tokens.slices is None
    assert tokens.slice_names == ()


def test_slices_that_are_not_closed_are_counted() -> None:
    notes = labelled(ByteTokenizer(), "<b>c</b> <b>d", ["b=<b>..</b>"]).notes
    assert notes == ("slice b: 1 of 2 not closed by </b>, so to the end of the document",)


def test_a_slice_that_matches_nowhere_is_refused() -> None:
    with pytest.raises(CorpusError, match=r"--slice a=<a>\.\.</a> matches nothing"):
        labelled(ByteTokenizer(), "no markers", ["a=<a>..</a>"])


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("x", "NAME=START..END"),
        ("a=..b", "NAME=START..END"),
        ("a=b..", "NAME=START..END"),
        ("=a..b", "NAME=START..END"),
        ("a=b", "NAME=START..END"),
        ("a=b...c", "more than one"),
        ("a=b..c..d", "more than one"),
        ("rest=a..b", "another meaning"),
        (f"{'n' * 41}=a..b", "too long"),
        ("a=\udcff..b", "UTF-8"),
    ],
)
def test_rules_that_are_not_clear_are_refused(rule: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        read_rules(rule)


# ── chats ────────────────────────────────────────────────────────────────────────────────────────────────────────────
CALL = "<think>Die Uhr fragen</think>Moment<tool_call>uhr()</tool_call>"
EVERY: list[Message] = [
    {"role": "system", "content": "Sei nett"},
    {"role": "user", "content": "Wie spät ist es?"},
    {"role": "assistant", "content": CALL},
    {"role": "tool", "content": "12:00"},
    {"role": "assistant", "content": "Zwölf."},
    {"role": "user", "content": ""},
]
THINKS_LAST = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ m['content'] | trim }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def texts_by_slice(
    messages: list[Message], tokenizer: TextTokenizer, *, assistant_only: bool = False
) -> dict[str, list[str]]:
    """The characters of each slice of a conversation, in runs."""
    slicing = Slicing()
    document = chat_document(messages, tokenizer, slicing, assistant_only=assistant_only)
    text, found = document.text, dict[str, list[str]]()
    assert document.slices is not None
    codes = document.slices.label(np.arange(len(text)), np.arange(1, len(text) + 1)).tolist()
    for place, (character, code) in enumerate(zip(text, codes, strict=True)):
        runs = found.setdefault(slicing.names[code], [])
        if place and codes[place - 1] == code:
            runs[-1] += character
        else:
            runs.append(character)
    return found


def test_every_role_is_a_slice() -> None:
    found = texts_by_slice(EVERY, HuggingFaceTokenizer.load(resolve("smollm2-135m")))
    assert found["system"] == ["Sei nett"]
    assert found["user"] == ["Wie spät ist es?"]
    assert found["thinking"] == ["<think>Die Uhr fragen</think>"]
    assert found["tool call"] == ["<tool_call>uhr()</tool_call>"]
    assert found["answer"] == ["Moment", "<|im_end|>", "Zwölf.<|im_end|>"]
    assert found["tool"] == ["12:00"]
    assert "".join(found["template"]).count("<|im_start|>") == len(EVERY)


def test_words_that_the_template_writes_too_are_found_in_their_place() -> None:
    words: list[Message] = [{"role": r, "content": r} for r in ("system", "user", "assistant")]
    found = texts_by_slice(words, HuggingFaceTokenizer.load(resolve("smollm2-135m")))
    assert (found["system"], found["user"], found["answer"]) == (["system"], ["user"], ["assistant<|im_end|>"])
    assert found["template"][1] == "<|im_end|>\n<|im_start|>user\n"


def test_the_assistants_turns_alone_have_the_same_slices(tiny: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(tiny)
    every, some = (texts_by_slice(EVERY, tokenizer, assistant_only=only) for only in (False, True))
    for name in ("thinking", "answer", "tool call"):
        assert every[name] == some[name]
    assert some.keys() == {"thinking", "answer", "tool call", "template"}


def test_a_template_that_rewrites_earlier_turns_is_divided_too(tiny: Path) -> None:
    """It writes thinking into the last turn alone, as templates of reasoning models do."""
    tokenizer = HuggingFaceTokenizer.load(tiny)
    tokenizer.hf.chat_template = THINKS_LAST
    found = texts_by_slice(EVERY[1:5], tokenizer)
    assert found["answer"] == ["Moment", "<|end|>", "Zwölf.<|end|>"]
    assert found["thinking"] == ["<think>Die Uhr fragen</think>", "<think></think>"]
    assert found["user"] == ["Wie spät ist es?"]


def test_a_template_that_hides_its_messages_is_not_divided(tiny: Path) -> None:
    tokenizer, slicing = HuggingFaceTokenizer.load(tiny), Slicing()
    tokenizer.hf.chat_template = "{% for m in messages %}{{ m['content'] | length }} {{ m['content'] }}{% endfor %}"
    document = chat_document(EVERY, tokenizer, slicing, assistant_only=False)
    tokens = tokenize([document], tokenizer, special=False)
    assert set(names_in(tokens)) == {"not divided"}
    assert tokens.notes == (
        "conversations that are not divided into roles, because the chat template changes their messages: 1",
    )


def test_thinking_that_the_prompt_opened_and_that_is_cut() -> None:
    slicing = Slicing()
    text = "Q<think>\nhm</think>a<think>cut"
    assert slicing.turn(text, 9, len(text)) == [(9, 19, "thinking"), (19, 20, "answer"), (20, 30, "thinking")]
    assert slicing.finish() == ("turns of the assistant that end inside of thinking or of a call of a tool: 1",)
    assert Slicing().turn("<think>hm", 7, 9) == [(7, 9, "thinking")]
    assert Slicing().turn("<|assistant|>yes<|end|>", 13, 23) == [(13, 23, "answer")]  # it ends other turns, too


def test_a_file_may_have_any_number_of_roles() -> None:
    slicing = Slicing()
    codes = [slicing.code(f"role {n}") for n in range(1000)]
    assert len(slicing.names) < 100
    assert slicing.names[codes[-1]] == "other roles"


# templates in the form of published ones: how the assistant's turn is opened, and what a model writes in it
TURNS = {
    "Qwen3": (
        "<|im_start|>assistant\n",
        [("thinking", "<think>\nhm\n</think>"), ("answer", "\n\nYes"), ("tool call", "<tool_call>\n{}\n</tool_call>")],
    ),
    "Qwen3, not thinking": ("<|im_start|>assistant\n<think>\n\n</think>\n\n", [("answer", "Yes<|im_end|>")]),
    "DeepSeek-R1": (
        "<｜Assistant｜><think>\n",
        [
            ("thinking", "hm</think>"),
            ("answer", "Yes"),
            ("tool call", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁calls▁end｜>"),
            ("answer", "<｜end▁of▁sentence｜>"),
        ],
    ),
    "DeepSeek-V3.1, not thinking": ("<｜Assistant｜></think>", [("answer", "Yes<｜end▁of▁sentence｜>")]),
    "Llama 3": (
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        [("tool call", "<|python_tag|>clock.call()<|eom_id|>")],
    ),
    "Llama 3, end of turn": (
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        [("answer", "Wait."), ("tool call", "<|python_tag|>{}<|eot_id|>")],
    ),
    "Mistral": ("[INST]Q[/INST]", [("answer", "Wait."), ("tool call", '[TOOL_CALLS][{"name": "f"}]</s>')]),
    "Mistral, thinking": (
        "[INST]Q[/INST]",
        [("thinking", "[THINK]hm[/THINK]"), ("answer", "Yes"), ("tool call", "[TOOL_CALLS]f[ARGS]{}</s>")],
    ),
    "gpt-oss": (
        "<|start|>assistant",
        [
            ("thinking", "<|channel|>analysis<|message|>hm<|end|>"),
            ("answer", "<|start|>assistant<|channel|>final<|message|>Yes<|return|>"),
        ],
    ),
    "gpt-oss, a tool": (
        "<|start|>assistant",
        [
            ("answer", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"),
            ("tool call", " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"),
        ],
    ),
    "gpt-oss, the channel names the tool": (
        "<|start|>assistant",
        [("tool call", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>")],
    ),
}


@pytest.mark.parametrize("model", TURNS)
def test_turns_as_published_templates_write_them(model: str) -> None:
    opened, parts = TURNS[model]
    text, slicing = opened + "".join(part for _, part in parts), Slicing()
    found = [(name, text[begin:end]) for begin, end, name in slicing.turn(text, len(opened), len(text))]
    assert found == parts
    assert slicing.finish() == ()
