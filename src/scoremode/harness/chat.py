"""Conversations as the model's own chat template writes them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from scoremode.errors import ModelError, OptionError, print_line
from scoremode.text.tokenizer import TextTokenizer


def hugging_face_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer of Transformers behind one of ours, which the harness asks for its templates; None if none is."""
    return getattr(getattr(tokenizer, "local", tokenizer), "hf", None)


def render(
    tokenizer: TextTokenizer,
    hugging_face: Any,
    messages: list[dict[str, Any]],
    open_turn: bool,
    more: Mapping[str, Any],
) -> str:
    """The conversation with the beginning of an answer; without ``open_turn`` the last message is left open instead."""
    if hugging_face is None:
        if more:
            raise OptionError(
                f"{next(iter(more))}: this tokenizer's chat template takes no arguments", fix="leave it out"
            )
        return _opened(tokenizer.render_chat(messages, open_turn=open_turn), messages, open_turn)
    if not hugging_face.chat_template:
        raise ModelError("this model has no chat template", fix="leave --apply_chat_template out")
    try:
        return _with_transformers(hugging_face, messages, open_turn, more)
    except Exception as error:  # templates raise their own errors, and Python's
        others = [message for message in messages if message["role"] != "system"]
        if len(others) == len(messages):
            raise ModelError(f"the chat template refused a conversation ({error})", fix="check its roles") from None
        _say_once("scoremode: this chat template takes no system message: it was left out")
        return _with_transformers(hugging_face, others, open_turn, more)


def _with_transformers(hugging_face: Any, messages: list[dict[str, Any]], open_turn: bool, more: Any) -> str:
    return str(
        hugging_face.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=open_turn, continue_final_message=not open_turn, **more
        )
    )


def _opened(rendered: str, messages: list[dict[str, Any]], open_turn: bool) -> str:
    """A conversation cut after its last message, where that is to be continued."""
    if open_turn or not messages:
        return rendered
    last = str(messages[-1]["content"]).strip()
    at = rendered.rfind(last)
    if at < 0:
        raise ModelError("the chat template does not show the last message as it is", fix="leave the prefix out")
    with_spaces = str(messages[-1]["content"]).lstrip()
    return rendered[: at + len(with_spaces if rendered.startswith(with_spaces, at) else last)]


@cache
def _say_once(line: str) -> None:
    print_line(line)
