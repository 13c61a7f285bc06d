"""Chat templates: the text that Transformers gives, and no more time and memory than a conversation needs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from scoremode.core.text import chat_templates
from scoremode.core.text.chat_templates import SECONDS, render_template
from scoremode.core.text.documents import as_template_takes, chat_document
from scoremode.core.text.slices import Slicing
from scoremode.core.text.tokenizer import HuggingFaceTokenizer
from scoremode.errors import ModelError

CHAT: list[Any] = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "Hi\u2028 „you“ 👩‍🔬\n"},
    {
        "role": "assistant",
        "content": "<think>\nno\n</think>\n\nYes.",
        "tool_calls": [{"name": "f", "arguments": {"x": 1.5}}],
    },
    {"role": "user", "content": "And?", "name": None},
]
CHATML = (
    "{%- for message in messages %}\n    {{- '<|im_start|>' + message.role + '\\n' "
    "+ message.content + '<|im_end|>\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% endif %}{{ bos_token }}{% for m in messages %}"
    "{% if loop.first and system is defined %}<<SYS>>{{ system }}<</SYS>>{% endif %}"
    "{{ '[INST] ' ~ m['content'] | trim ~ ' [/INST]' if m.role == 'user' else ' ' ~ m.content ~ eos_token }}"
    "{% endfor %}"
)
THINKS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if loop.index0 < ns.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% continue %}{% endif %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% if m.tool_calls %}{{ m.tool_calls | tojson(indent=2) }}{% endif %}{% endfor %}"
    "{{ tools is none }}{{ strftime_now('%Y') }}{{ undefined_name }}"
)


LLAMA_3 = (
    "{{- bos_token }}{% for message in messages %}{% if 'tool_calls' in message %}{{- '<|start_header_id|>assistant' ~ "
    "message.tool_calls[0].function.name ~ '<|eot_id|>' }}{% else %}{{- '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
)
QWEN_3 = (
    "{% for message in messages %}{% if message.content is string %}{% set content = message.content %}{% else %}"
    "{% set content = '' %}{% endif %}{{ '<|im_start|>' + message.role + '\n' + content }}{% if message.tool_calls %}"
    "{{ '<tool_call>' ~ message.tool_calls[0].function | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
)
OF_PARTS = (  # as those of models that see images
    "{% for message in messages %}{{ '<start_of_turn>' + message.role + '\n' }}{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if 'image_url' in part %}"
    "<image>{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "{% if message.tool_calls %}<call>{% endif %}<end_of_turn>{% endfor %}"
)
PARTS_ALONE = OF_PARTS.replace("message.content is string", "false")
OF_USERS = OF_PARTS.replace("message.content is string", "message.role != 'user'")  # Llama 3.2 joins no other parts
DEEPSEEK = (
    "{% for m in messages %}{% if m['content'] is none %}<calls>{{ m.tool_calls[0].function.name }}{% else %}"
    "{{ m.role + m['content'] }}{% endif %}{% endfor %}"
)
AS_JSON = "{% for message in messages %}{{ message.content | tojson }}{% endfor %}"
PARTS: list[Any] = [{"type": "text", "text": "One type\n"}, {"type": "text", "text": "Two"}]
CALL: Any = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("template", "joined"),
    [
        *((template, {"user", "assistant"}) for template in (None, CHATML, LLAMA, LLAMA_3, QWEN_3, DEEPSEEK, AS_JSON)),
        *((template, set()) for template in (OF_PARTS, PARTS_ALONE)),
        (OF_USERS, {"assistant"}),
    ],
)
def test_parts_are_the_templates_or_joined(template: str | None, joined: set[str], tiny: Path) -> None:
    """A template that prints a list as Python does, drops it, or fails, gets the texts with a newline in between."""
    tokenizer = HuggingFaceTokenizer.load(tiny)
    tokenizer.hf.chat_template = template or tokenizer.hf.chat_template
    chat: list[Any] = [{"role": role, "content": PARTS} for role in ("user", "assistant")]
    expected = [{**m, "content": "One type\n\nTwo"} if m["role"] in joined else m for m in chat]
    theirs = tokenizer.hf.apply_chat_template(expected, tokenize=False)
    document = chat_document(chat, tokenizer, Slicing(()), assistant_only=False)
    assert document.text == theirs
    assert document.text.count("One type") == document.text.count("Two") == 2
    assert as_template_takes(CHAT, tokenizer, open_turn=False) is CHAT


@pytest.mark.parametrize("template", [None, CHATML, LLAMA, LLAMA_3, QWEN_3, OF_PARTS, PARTS_ALONE, DEEPSEEK])
def test_null_beside_tool_calls_is_never_written_as_a_word(template: str | None, tiny: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(tiny)
    tokenizer.hf.chat_template = template or tokenizer.hf.chat_template
    chat: list[Any] = [{"role": "user", "content": "Call f."}, CALL]
    text = chat_document(chat, tokenizer, Slicing(()), assistant_only=False).text
    assert "None" not in text
    stays = template in (DEEPSEEK, QWEN_3)
    expected = chat if stays else [chat[0], {**CALL, "content": ""}]
    assert text == tokenizer.hf.apply_chat_template(expected, tokenize=False)


@pytest.mark.parametrize("template", [None, CHATML, LLAMA, THINKS])
@pytest.mark.parametrize("open_turn", [False, True])
def test_honest_templates_give_what_transformers_gives(template: str | None, open_turn: bool, tiny: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(tiny)
    tokenizer.hf.chat_template = template or tokenizer.hf.chat_template
    theirs = tokenizer.hf.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=open_turn)
    assert tokenizer.render_chat(CHAT, open_turn=open_turn) == theirs
    with pytest.raises(ModelError, match="empty conversation"):
        tokenizer.render_chat([], open_turn=open_turn)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'x' * 2000000000 }}", "the text is too long"),
        ("{{ 'x'.ljust(10 ** 8) }}", "the text is too long"),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "too long",
        ),
        ("{{ [[]] * 1000000000 }}", "the text is too long"),
        ("{{ '\ud800' }}", "surrogates not allowed"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ " + "(" * 50_000 + "}}", "RecursionError|TemplateSyntaxError"),
    ],
)
def test_what_a_template_may_not_do_is_one_line(template: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        render_template(template, CHAT, open_turn=False, special={})


def test_a_template_without_end_is_stopped_and_the_next_row_is_rendered() -> None:
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(ModelError, match=f"it takes more than {SECONDS} seconds"):
        render_template(loop, CHAT, open_turn=False, special={})
    assert render_template(CHATML, CHAT[:1], open_turn=True, special={}).endswith("assistant\n")


def test_a_process_that_was_stopped_or_belongs_to_another_is_not_used() -> None:
    render_template("a", CHAT, open_turn=False, special={})
    worker, _ = chat_templates._worker()
    assert isinstance(worker, subprocess.Popen)
    worker.kill()
    worker.wait()
    with pytest.raises(ModelError, match="its process ended"):
        render_template("b", CHAT, open_turn=False, special={})
    assert render_template("c", CHAT, open_turn=False, special={}) == "c"


def test_a_long_conversation_is_rendered() -> None:
    long: list[Any] = [{"role": "user", "content": "words " * 1_000_000}] * 5
    assert len(render_template(CHATML, long, open_turn=False, special={})) > 30_000_000


def test_what_a_library_prints_is_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text('print(\'{"text": "printed"}\')')
    monkeypatch.syspath_prepend(str(tmp_path))
    chat_templates._worker.cache_clear()
    assert [render_template(word, CHAT, open_turn=False, special={}) for word in ("a", "b")] == ["a", "b"]
