"""(context, continuation) ─▶ ids, by the rule of lm-evaluation-harness for causal models.

context  "The capital of France is "     continuation  "Paris"
         "The capital of France is"                    " Paris"     spaces at its end move to the continuation
tokens   The| capital| of| France| is    | Paris                    the whole text is encoded, and cut after as
                                                                    many tokens as the context alone has

If a token spans the border, the tokens of the context alone are not the first tokens of the whole text. The harness
still joins the context's own tokens with the whole text's tokens after the cut. This file does the same, because its
numbers are compared with the harness's numbers. It reports such a pair as ``spanning``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from scoremode.core.plan.recipes import rolling_spans
from scoremode.core.text.files import is_text
from scoremode.core.text.tokenizer import HuggingFaceTokenizer, TextTokenizer
from scoremode.core.verbs.scoring import Continuation
from scoremode.errors import InputError, ModelError, OptionError, one_line, print_line
from scoremode.values import Ids


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A context and its continuation as token ids, ready to be fed to the model and scored."""

    asked: Continuation
    spanning: bool = False  # the context's tokens are not the first tokens of the whole text, so the cut is misplaced
    truncated: int = 0  # tokens that were cut from the left to fit the model's context


class HarnessEncoder:
    """Encodes pairs and texts as the harness does, with any tokenizer.

    >>> from scoremode.core.text.tokenizer import ByteTokenizer
    >>> found = HarnessEncoder(ByteTokenizer(), max_length=4).pair("abc ", "de")
    >>> found.asked.ids.tolist(), found.asked.first, found.truncated
    ([98, 99, 32, 100, 101], 2, 1)
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        max_length: int | None,
        add_bos: bool | None = None,
        prefix: int | None = None,
    ) -> None:
        """``max_length``: the most tokens that are fed; None: no limit. ``add_bos`` None: the tokenizer's own rule."""
        if max_length is not None and max_length < 1:
            raise OptionError(f"max_length {max_length} leaves no room for a token", fix="give 1 or more")
        facts = tokenizer.facts
        if add_bos and facts.bos is None:
            raise OptionError("add_bos_token: this tokenizer has no BOS", fix="leave add_bos_token out")
        if prefix is not None and not 0 <= prefix < facts.size:
            raise OptionError(
                f"prefix_token_id {prefix} is not an id of this tokenizer", fix=f"give 0 to {facts.size - 1}"
            )
        self.tokenizer, self.max_length, self.add_bos = tokenizer, max_length, add_bos
        self.known_prefix = next((i for i in (prefix, facts.bos, facts.eos) if i is not None), None)
        # a text that starts with the prefix token's name, as a chat template may write it, gets no second prefix token
        self._prefix_text = "" if self.known_prefix is None else tokenizer.decode([self.known_prefix])
        self._last: tuple[str, Ids] | None = None  # the last context and its ids, because choices share a context

    @property
    def prefix(self) -> int:
        """The token before a text that has no context: the given one, else BOS, else EOS."""
        if self.known_prefix is None:
            raise ModelError("this tokenizer has neither BOS nor EOS to put before a text", fix="give prefix_token_id")
        return self.known_prefix

    def text(self, text: str, *, special: bool | None = None) -> Ids:
        """Returns the ids of a text. ``special`` None adds special tokens unless the text already starts with one."""
        if not is_text(text):
            raise InputError("a text of the task is not UTF-8", fix="correct the task's data")
        if special is None:
            begins = bool(self._prefix_text) and text.startswith(self._prefix_text)
            special = not begins and self.add_bos is not False
        ids = self._ids(text, special=special)
        facts = self.tokenizer.facts
        if special and self.add_bos and not facts.adds_bos:
            ids = np.concatenate([np.array([facts.bos], dtype=np.int32), ids])
        return ids

    def _ids(self, text: str, *, special: bool) -> Ids:
        if isinstance(self.tokenizer, HuggingFaceTokenizer):
            return self.tokenizer.ids(text, special=special)
        return self.tokenizer.encode(text, special=special).ids

    def request(self, request: Any) -> Encoded:
        """Encodes a request of the harness, and names its document in errors."""
        try:
            return self.pair(*request.args)
        except InputError as error:
            where = f"document {request.doc_id} of {request.task_name}: " if request.task_name else ""
            raise InputError(where + error.message, fix=error.fix) from None

    def pair(self, context: str, continuation: str) -> Encoded:
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        if context:
            whole, before = self.text(stripped + continuation), self._context(stripped)
            spanning = not np.array_equal(whole[: len(before)], before)
            target = whole[len(before) :]
        else:
            before, target, spanning = np.empty(0, np.int32), self.text(continuation, special=False), False
        if not len(before) and target[:1].tolist() == [self.prefix]:
            before, target = target[:1], target[1:]
        elif not len(before):
            before = np.array([self.prefix], dtype=np.int32)
        if not len(target):
            after = _shortened(context, end=True)
            raise InputError(
                f"the continuation {_shortened(continuation)} has no token of its own after {after}",
                fix="correct the task: a continuation needs a token",
            )
        return self._cut(before, target, continuation, spanning=spanning)

    def ids(self, before: Ids, target: Ids) -> Encoded:
        if not len(before) or not len(target):
            raise InputError("a context or a continuation has no token", fix="give at least one of each")
        return self._cut(before.astype(np.int32), target.astype(np.int32), "given as ids", spanning=False)

    def _context(self, context: str) -> Ids:
        if self._last is None or self._last[0] != context:
            self._last = (context, self.text(context))
        return self._last[1]

    def _cut(self, before: Ids, target: Ids, continuation: str, *, spanning: bool) -> Encoded:
        """Joins both, and cuts the context from the left until it fits. The last token is scored but not fed."""
        room = len(before) + len(target) - 1 if self.max_length is None else self.max_length
        if len(target) > room:
            raise InputError(
                f"the continuation {_shortened(continuation)} has {len(target)} tokens, more than max_length {room}",
                fix="give a larger max_length, if the model can take it",
            )
        ids = np.concatenate([before, target]).astype(np.int32)
        truncated = max(0, len(ids) - room - 1)
        ids = ids[truncated:]
        return Encoded(Continuation(ids, len(ids) - len(target)), spanning, truncated)


def rolling(encoder: HarnessEncoder, text: str) -> list[Continuation]:
    """Splits a text into full windows that score each token once. docs/methods.md draws them."""
    ids = encoder.text(text)
    found = []
    for span in rolling_spans(0, len(ids), encoder.max_length or len(ids), encoder.prefix):
        lead = np.array([span.lead] if span.lead >= 0 else [], dtype=np.int32)
        found.append(
            Continuation(np.concatenate([lead, ids[span.start : span.last]]), len(lead) + span.first - span.start)
        )
    return found


def _shortened(text: str, length: int = 40, *, end: bool = False) -> str:
    if len(text) <= length:
        return repr(text)
    return repr("…" + text[-length:] if end else text[:length] + "…")


class Tally:
    """Counts all requests, and those that were cut or split oddly, since the model was made."""

    def __init__(self) -> None:
        self.requests = self.spanning = self.truncated = self.truncated_tokens = 0
        self._examples: dict[str, str] = {}
        self._told = (0, 0)

    def add(self, request: Any, encoded: Encoded) -> None:
        self.requests += 1
        self.spanning += encoded.spanning
        self.truncated += encoded.truncated > 0
        self.truncated_tokens += encoded.truncated
        for name in ("spanning", "truncated"):
            if getattr(encoded, name) and name not in self._examples:
                before, after = _shortened(request.args[0], 30, end=True), _shortened(request.args[1], 30)
                where = f"document {request.doc_id} of {request.task_name}: " if request.task_name else ""
                self._examples[name] = one_line(f"{where}{before} + {after}")

    def tell(self) -> None:
        """Prints to standard error how many requests were cut or split oddly since the last call."""
        spanning, truncated = self.spanning - self._told[0], self.truncated - self._told[1]
        self._told = (self.spanning, self.truncated)
        if spanning:
            print_line(
                f"scoremode: in {spanning} of {self.requests} requests a token spans the end of the context, so that "
                f"the harness's rule scores other tokens than the text has; as in {self._examples['spanning']}"
            )
        if truncated:
            print_line(
                f"scoremode: {truncated} of {self.requests} requests were longer than the context and lost "
                f"{self.truncated_tokens} tokens on their left; as in {self._examples['truncated']}"
            )

    def as_json(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("spanning", "truncated", "truncated_tokens")}
        return {"loglikelihood": self.requests, **counts, "examples": dict(self._examples)}


# ── conversations ────────────────────────────────────────────────────────────────────────────────────────────────────
def hugging_face_tokenizer(tokenizer: Any) -> Any:
    """Returns the Transformers tokenizer inside ours, or None. The harness uses it for chat templates."""
    return getattr(getattr(tokenizer, "local", tokenizer), "hf", None)


def render(
    tokenizer: TextTokenizer,
    hugging_face: Any,
    messages: list[dict[str, Any]],
    open_turn: bool,
    more: Mapping[str, Any],
) -> str:
    """Renders a conversation up to the start of the answer. Without ``open_turn``, ends inside the last message."""
    if hugging_face is None:
        if more or not open_turn:
            what = next(iter(more), "a prefix of answers")
            raise OptionError(f"{what}: this tokenizer's chat template takes no arguments", fix="leave it out")
        return tokenizer.render_chat(messages, open_turn=True)
    if not hugging_face.chat_template:
        raise ModelError("this model has no chat template", fix="leave --apply_chat_template out")

    def rendered(some: list[dict[str, Any]]) -> str:
        how = {"add_generation_prompt": open_turn, "continue_final_message": not open_turn}
        return str(hugging_face.apply_chat_template(some, tokenize=False, **how, **more))

    try:
        return rendered(messages)
    except Exception as error:  # templates raise their own errors and Python's errors
        others = [message for message in messages if message["role"] != "system"]
        if len(others) == len(messages):
            raise ModelError(f"the chat template refused a conversation ({error})", fix="check its roles") from None
        _say_once("scoremode: this chat template takes no system message: it was left out")
        return rendered(others)


@cache
def _say_once(line: str) -> None:
    print_line(line)
