"""Slices: a name for each part of a text, such as thinking or answer, and for each token the slice in which it begins.

spans of characters come from         rules of the user (--slice NAME=START..END), in any text
                                      messages of a chat: their roles, and in the assistant's turns known markers
a token belongs to                    the slice of its first character; one that only continues a character, to that
                                      character's; the end-of-text token of a tokenizer, to the slice before it
where spans overlap                   the rule that was given first wins, then the next; rules win over roles
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from scoremode.core.arguments import require_text
from scoremode.core.text.files import is_text
from scoremode.errors import CorpusError, OptionError
from scoremode.values import Ids, Ints

Span = tuple[int, int, str]
"""The first character, the one after the last, and the name of the slice."""

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


def read_rules(given: str | Sequence[str] | None) -> tuple[SliceRule, ...]:
    """Reads rules as ``--slice`` takes them.

    >>> read_rules("thinking=<think>..</think>")
    (SliceRule(name='thinking', start='<think>', end='</think>'),)
    """
    return tuple(map(_read_rule, [given] if isinstance(given, str) else given or ()))


def _read_rule(text: str) -> SliceRule:
    require_text("slice", text)
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

    def document(self, pieces: Iterable[str], spans: Iterable[Span] = (), outside: str = REST) -> SlicedText:
        """A document whose rules' slices are found while it is read; ``spans`` are known already, and sorted."""
        return SlicedText(self, pieces, spans, outside)

    def count(self, rule: int, found: int, *, unclosed: bool) -> None:
        self._found[rule] += found
        self._unclosed[rule] += unclosed

    def turn(self, text: str, begin: int, end: int) -> list[Span]:
        """The slices of what an assistant wrote: thinking and calls of tools between known markers, else the answer."""
        spans, at = list[Span](), begin
        before = text[max(0, begin - LONGEST_MARK) : begin].rstrip()
        mark: Mark | None = next((one for one in TURN_MARKS if before.endswith(one[1])), None)  # the prompt opened it
        while at < end:
            if mark is None:
                starts: list[tuple[int, Mark]] = [(text.find(one[1], at, end), one) for one in TURN_MARKS]
                first, mark = min((found for found in starts if found[0] >= 0), default=(end, None))
                spans += [(at, first, ANSWER)] if at < first else []
                at = first
            else:
                name, _, *closes = mark
                ends = [found + len(close) for close in closes if (found := text.find(close, at, end)) >= 0]
                self._open_turns += bool(closes) and not ends
                after = min(ends, default=end)
                spans.append((at, after, name))
                at, mark = after, None
        return spans

    def finish(self) -> tuple[str, ...]:
        """Returns notes, after the last document. Refuses a rule that matches nowhere."""
        for rule, found in zip(self.rules, self._found, strict=True):
            if not found:
                fix = f"check its START ({rule.start!r}), or leave it out"
                raise CorpusError(f"--slice {rule} matches nothing in the text", fix=fix)
        notes = [
            f"slice {rule.name}: {count} of {found} not closed by {rule.end}, so to the end of the document"
            for rule, found, count in zip(self.rules, self._found, self._unclosed, strict=True)
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


class SlicedText:
    """A document in pieces, and its slices as far as it was read. What a piece contains is labelled when it arrives."""

    def __init__(self, slicing: Slicing, pieces: Iterable[str], spans: Iterable[Span], outside: str) -> None:
        self.slicing, self._pieces, self._outside = slicing, pieces, slicing.code(outside)
        self._known = [(begin, end, slicing.code(name)) for begin, end, name in spans]
        self._layers: list[list[tuple[int, int, int]]] = [[] for _ in slicing.rules]  # one for each rule

    def __iter__(self) -> Iterator[str]:
        if not self.slicing.rules:
            yield from self._pieces
            return
        searches = [_Search(rule) for rule in self.slicing.rules]
        longest = max(len(mark) for rule in self.slicing.rules for mark in (rule.start, rule.end))
        held, at = "", 0  # characters that may be the beginning of a marker, and the place of the first of them
        for piece in self._pieces:
            held += piece
            self._search(searches, held, at)
            final = max(0, len(held) - longest + 1)
            if final:
                yield held[:final]
            held, at = held[final:], at + final
        for number, search in enumerate(searches):
            self.slicing.count(number, search.found, unclosed=search.opened is not None)
        if held:
            yield held

    def _search(self, searches: Sequence[_Search], text: str, at: int) -> None:
        for search, layer in zip(searches, self._layers, strict=True):
            code = self.slicing.code(search.rule.name)
            for begin, end in search.spans(text, at):
                if layer and layer[-1][0] == begin:
                    layer.pop()  # it was open until now
                layer.append((begin, end, code))

    def label(self, starts: Ints, ends: Ints) -> Ids:
        """The code of each token's slice. Tokens come in order, with the characters that they own."""
        codes = np.full(len(starts), self._outside, np.int32)
        if not len(starts):
            return codes
        at = np.where(ends > starts, starts, np.maximum(starts - 1, 0))
        for layer in (self._known, *reversed(self._layers)):
            reached = bisect_right(layer, int(at[-1]), key=itemgetter(0))
            if reached:
                begins, stops, its = np.array(layer[:reached], np.int64).T
                index = np.searchsorted(begins, at, side="right") - 1
                inside = (index >= 0) & (at < stops[index])
                codes[inside] = its[index[inside]]
                del layer[: reached - (stops[-1] > at[-1])]  # spans before this block: there may be millions
        return codes


class _Search:
    """Looks for the spans of one rule in a text that arrives in pieces."""

    FOREVER = 1 << 62  # the end of a span that is still open

    def __init__(self, rule: SliceRule) -> None:
        self.rule, self.found = rule, 0
        self.opened: int | None = None
        self._from = 0  # where the next marker can begin

    def spans(self, text: str, at: int) -> Iterator[tuple[int, int]]:
        """Yields spans that end, or begin and are open, in ``text``, whose first character is number ``at``."""
        while True:
            mark = self.rule.start if self.opened is None else self.rule.end
            place = text.find(mark, max(0, self._from - at))
            if place < 0:
                self._from = max(self._from, at + len(text) - len(mark) + 1)
                if self.opened is not None:
                    yield self.opened, self.FOREVER
                return
            self._from = at + place + len(mark)
            if self.opened is None:
                self.opened, self.found = at + place, self.found + 1
            else:
                yield self.opened, self._from
                self.opened = None
