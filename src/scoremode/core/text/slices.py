"""Slices: a name for each part of a text, such as thinking or answer, and for each token the slice in which it begins.

spans of characters come from         rules of the user (--slice NAME=START..END), in any text
                                      messages of a chat: their roles, and in the assistant's turns known markers
a token belongs to                    the slice of its first character; one that only continues a character, to that
                                      character's; the end-of-text token of a tokenizer, to the slice before it
where spans overlap                   the rule that was given first wins, then the next; rules win over roles
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from scoremode.core.text.files import is_text
from scoremode.errors import CorpusError, OptionError
from scoremode.values import Ids, Ints

Span = tuple[int, int, str]
"""The first character, the one after the last, and the name of the slice."""

CodedSpan = tuple[int, int, int]
"""The same with the code of the name."""

REST = "rest"  # of a plain text: what is in no slice
TEMPLATE = "template"  # of a chat: what the template writes around the messages
THINKING, ANSWER, TOOL_CALL, PROMPT = "thinking", "answer", "tool call", "prompt"
UNDIVIDED = "not divided"
ORDER = (PROMPT, "system", "user", THINKING, ANSWER, TOOL_CALL, "tool", TEMPLATE, REST, UNDIVIDED)  # in tables
LIKE = "as in --slice 'thinking=<think>..</think>'"
LONGEST_NAME = 40
MOST_NAMES, OTHER_ROLES = 64, "other roles"  # a file may have any number of roles

Mark = tuple[str, str, *tuple[str, ...]]
TURN_MARKS: tuple[Mark, ...] = (
    (THINKING, "<think>", "</think>"),
    (THINKING, "<thinking>", "</thinking>"),
    (THINKING, "[THINK]", "[/THINK]"),
    (THINKING, "<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss, as some calls of tools below
    (THINKING, "<|START_THINKING|>", "<|END_THINKING|>"),
    (TOOL_CALL, "<tool_call>", "</tool_call>"),
    (TOOL_CALL, "<|START_ACTION|>", "<|END_ACTION|>"),
    (TOOL_CALL, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    (TOOL_CALL, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    (TOOL_CALL, "<|channel|>commentary to=", "<|call|>"),
    (TOOL_CALL, "<|channel|>analysis to=", "<|call|>"),
    (TOOL_CALL, " to=functions.", "<|call|>"),
    (TOOL_CALL, "<|python_tag|>", "<|eom_id|>", "<|eot_id|>"),  # Llama 3
    (TOOL_CALL, "[TOOL_CALLS]"),  # Mistral: up to the end of the turn
)
"""What models write around their thinking and their calls of tools: slice, start, and its ends; none: with the turn."""

LONGEST_MARK = 64  # characters in front of a turn in which a marker may stand, with white space after it


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class SliceRule:
    """A slice that a user defined: from each START to the next END, both included."""

    name: str
    start: str
    end: str

    def __str__(self) -> str:
        return f"{self.name}={self.start}..{self.end}"


def read_rules(rules: str | Sequence[str] | None) -> tuple[SliceRule, ...]:
    """Reads rules as ``--slice`` takes them.

    >>> read_rules("thinking=<think>..</think>")
    (SliceRule(name='thinking', start='<think>', end='</think>'),)
    """
    return tuple(map(_read_rule, [rules] if isinstance(rules, str) else rules or ()))


def _read_rule(text: str) -> SliceRule:
    if not is_text(text):
        raise OptionError("--slice is not UTF-8", fix=f"give text in UTF-8, {LIKE}")
    name, equals, marks = text.partition("=")
    start, dots, end = marks.partition("..")
    if not (equals and dots and name.strip() and start and end):
        raise OptionError(f"--slice {text} is not NAME=START..END", fix=LIKE)
    if ".." in end or end.startswith("."):
        raise OptionError(f"--slice {text} has more than one '..', so START and END are not clear", fix=LIKE)
    if name.strip() in (REST, UNDIVIDED) or len(name) > LONGEST_NAME:
        why = "is too long" if len(name) > LONGEST_NAME else "has another meaning in tables"
        raise OptionError(f"--slice: the name '{name[:LONGEST_NAME]}' {why}", fix=f"choose another, {LIKE}")
    return SliceRule(name.strip(), start, end)


# ── one pass over documents ──────────────────────────────────────────────────────────────────────────────────────────
class Slicing:
    """The slices of all documents of one pass: their names, and what a reader of the result should know."""

    def __init__(self, rules: Sequence[SliceRule] = ()) -> None:
        self.rules = tuple(rules)
        names = dict.fromkeys([*(rule.name for rule in rules), *ORDER])
        self._codes = {name: code for code, name in enumerate(names)}
        self._found, self._unclosed = [0] * len(rules), [0] * len(rules)
        self.undivided = 0  # conversations whose messages cannot be found in the text of the template
        self._open_turns = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of slices, in the order of their codes. Most of them may have no token."""
        return tuple(self._codes)

    def code(self, name: str) -> int:
        if name not in self._codes and len(self._codes) >= MOST_NAMES:
            name = OTHER_ROLES
        return self._codes.setdefault(name, len(self._codes))

    def document(self, text: str, spans: Iterable[Span] = (), outside: str = REST) -> DocumentSlices:
        """The slices of one document, by rules; ``spans`` are known already, and sorted. Rules win over them."""
        coded_spans = [(begin, end, self.code(name)) for begin, end, name in spans]
        by_rule = [self._matches(number, text) for number in range(len(self.rules))]
        return DocumentSlices(self, self.code(outside), [coded_spans, *reversed(by_rule)])

    def _matches(self, number: int, text: str) -> list[CodedSpan]:
        """The spans of a rule: from each START to the next END; one without an END goes to the end of the text."""
        rule, spans, at = self.rules[number], list[CodedSpan](), 0
        while (begin := text.find(rule.start, at)) >= 0:
            end = text.find(rule.end, begin + len(rule.start))
            at = len(text) if end < 0 else end + len(rule.end)
            spans.append((begin, at, self.code(rule.name)))
            self._unclosed[number] += end < 0
        self._found[number] += len(spans)
        return spans

    def turn(self, text: str, begin: int, end: int) -> list[Span]:
        """The slices of what an assistant wrote: thinking and calls of tools between known markers, else the answer."""
        spans, at = list[Span](), begin
        before = text[max(0, begin - LONGEST_MARK) : begin].rstrip()
        # the prompt opened it
        mark: Mark | None = next((mark for mark in TURN_MARKS if before.endswith(mark[1])), None)
        while at < end:
            if mark is None:
                starts: list[tuple[int, Mark]] = [(text.find(mark[1], at, end), mark) for mark in TURN_MARKS]
                first, mark = min((start for start in starts if start[0] >= 0), default=(end, None))
                spans += [(at, first, ANSWER)] if at < first else []
                at = first
            else:
                name, _, *closes = mark
                ends = [position + len(close) for close in closes if (position := text.find(close, at, end)) >= 0]
                self._open_turns += bool(closes) and not ends
                after = min(ends, default=end)
                spans.append((at, after, name))
                at, mark = after, None
        return spans

    def finish(self) -> tuple[str, ...]:
        """Returns notes, after the last document. Refuses a rule that matches nowhere."""
        for rule, matches in zip(self.rules, self._found, strict=True):
            if not matches:
                fix = f"check its START ({rule.start!r}), or leave it out"
                raise CorpusError(f"--slice {rule} matches nothing in the text", fix=fix)
        notes = [
            f"slice {rule.name}: {count} of {matches} not closed by {rule.end}, so to the end of the document"
            for rule, matches, count in zip(self.rules, self._found, self._unclosed, strict=True)
            if count
        ]
        if self._open_turns:
            notes.append(
                f"turns of the assistant that end inside of thinking or of a call of a tool: {self._open_turns}"
            )
        if self.undivided:
            why = "because the chat template changes their messages"
            notes.append(f"conversations that are not divided into roles, {why}: {self.undivided}")
        return tuple(notes)


class DocumentSlices:
    """Where the slices of one document lie. Of spans that overlap, those of a later layer win."""

    def __init__(self, slicing: Slicing, outside: int, layers: Sequence[Sequence[CodedSpan]]) -> None:
        self.slicing, self._outside = slicing, outside
        self._layers = [np.array(layer, np.int64).T for layer in layers if layer]

    def label(self, starts: Ints, ends: Ints) -> Ids:
        """The code of each token's slice, for tokens with the characters that they own."""
        codes = np.full(len(starts), self._outside, np.int32)
        at = np.where(ends > starts, starts, np.maximum(starts - 1, 0))
        for begins, stops, layer_codes in self._layers:
            index = np.searchsorted(begins, at, side="right") - 1
            inside = (index >= 0) & (at < stops[index])
            codes[inside] = layer_codes[index[inside]]
        return codes
