"""Where the messages of a conversation stand in the text that a chat template writes."""

from __future__ import annotations

from itertools import pairwise

from scoremode.errors import ModelError
from scoremode.text.files import Message
from scoremode.text.slices import Slicing, Span
from scoremode.text.tokenizer import TextTokenizer

PROBES = ("\ue000", "\ue001")  # characters of private use: no template writes them


def assistant_turn(messages: list[Message], index: int, tokenizer: TextTokenizer, text: str) -> tuple[int, int] | None:
    """The assistant's part of a turn: everything that the template writes after it opens the turn.

    These are the assistant's words and the end-of-turn mark. None if the template rewrites earlier turns.
    """
    opened = tokenizer.render_chat(messages[:index], open_turn=True)
    closed = tokenizer.render_chat(messages[: index + 1], open_turn=False).rstrip()
    if text.startswith(opened) and text.startswith(closed) and len(closed) > len(opened):
        return len(opened), len(closed)
    return None


def message_slices(messages: list[Message], tokenizer: TextTokenizer, text: str, slicing: Slicing) -> list[Span] | None:
    """The slices of all messages, sorted: roles, and inside of the assistant's turns thinking, answer and tool call.

    None if a message cannot be found in the text, or if two overlap.
    """
    places: list[tuple[int, int, Message]] = []
    try:
        for index, message in enumerate(messages):
            found = None
            if message["role"] == "assistant":
                found = assistant_turn(messages, index, tokenizer, text)
                found = found or _rewritten_turn(messages, index, tokenizer, text)
            else:
                found = _own_words(messages, index, tokenizer, text)
            if found is None:
                return None
            places.append((*found, message))
    except ModelError:  # the template takes whole conversations only
        return None
    places.sort(key=lambda place: place[:2])  # some templates write the system's words into a later message
    if any(one[1] > other[0] for one, other in pairwise(places)):
        return None
    spans: list[Span] = []
    for begin, end, message in places:
        is_own = message["role"] == "assistant"
        spans += slicing.turn(text, begin, end) if is_own else [(begin, end, message["role"])]
    return spans


def _own_words(messages: list[Message], index: int, tokenizer: TextTokenizer, text: str) -> tuple[int, int] | None:
    """The place of a message's own words: where a probe stands in the same conversation with the probe instead."""
    probe, replaced = _with_probe(messages[index], text)
    other = tokenizer.render_chat([*messages[:index], replaced, *messages[index + 1 :]], open_turn=False)
    before, found, after = other.partition(probe)
    begin, end = len(before), len(text) - len(after)
    fits = found and begin <= end and text.startswith(before) and text.endswith(after)
    return (begin, end) if fits else None


def _rewritten_turn(messages: list[Message], index: int, tokenizer: TextTokenizer, text: str) -> tuple[int, int] | None:
    """As ``assistant_turn``, where the template writes a turn differently once another one follows.

    The words are found by a probe. What the template writes around them belongs to the turn if it is the same in both.
    """
    words = _own_words(messages, index, tokenizer, text)
    if words is None:
        return None
    begin, end = words
    opened = tokenizer.render_chat(messages[:index], open_turn=True)
    if len(opened) <= begin and text.startswith(opened):
        begin = len(opened)
    probe, replaced = _with_probe(messages[index], text)
    closing = tokenizer.render_chat([*messages[:index], replaced], open_turn=False).partition(probe)[2].rstrip()
    marks = (mark for mark in (closing, closing.lstrip()) if text.startswith(mark, end))
    return begin, end + len(next(marks, ""))


def _with_probe(message: Message, text: str) -> tuple[str, Message]:
    probe = next((one for one in PROBES if one not in text), PROBES[0])
    is_text = isinstance(message.get("content"), str)
    return probe, {**message, "content": probe if is_text else [{"type": "text", "text": probe}]}
