"""Chat templates: the text that Transformers gives, and no more time and memory than a conversation needs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from scoremode.core.text import chat_templates
from scoremode.core.text.chat_templates import SECONDS, render_template
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
