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

from dataclasses import dataclass

import numpy as np

from scoremode.core.text.files import is_text
from scoremode.core.text.tokenizer import HuggingFaceTokenizer, TextTokenizer
from scoremode.core.verbs.scoring import Continuation
from scoremode.errors import InputError, ModelError, OptionError
from scoremode.values import Ids

LIKE = "correct the task: a continuation needs a token, and fewer of them than max_length"


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A context and its continuation as token ids, ready to be fed to the model and scored."""

    continuation: Continuation
    spanning: bool = False  # the context's tokens are not the first tokens of the whole text, so the cut is misplaced
    truncated: int = 0  # tokens that were cut from the left to fit the model's context


class HarnessEncoder:
    """Encodes pairs and texts as the harness does, with any tokenizer.

    >>> from scoremode.core.text.tokenizer import ByteTokenizer
    >>> encoded = HarnessEncoder(ByteTokenizer(), max_length=4).pair("abc ", "de")
    >>> encoded.continuation.ids.tolist(), encoded.continuation.first, encoded.truncated
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
        facts = tokenizer.facts
        if max_length is not None and max_length < 1:
            raise OptionError(f"max_length {max_length} leaves no room for a token", fix="give 1 or more")
        if add_bos and facts.bos is None:
            raise OptionError("add_bos_token: this tokenizer has no BOS", fix="leave add_bos_token out")
        if prefix is not None and not 0 <= prefix < facts.size:
            fix = f"give 0 to {facts.size - 1}"
            raise OptionError(f"prefix_token_id {prefix} is not an id of this tokenizer", fix=fix)
        self.tokenizer, self.max_length, self.add_bos = tokenizer, max_length, add_bos
        self.known_prefix = next((i for i in (prefix, facts.bos, facts.eos) if i is not None), None)
        # a text that starts with the prefix token's name, as a chat template may write it, gets no second prefix token
        self._prefix_text = "" if self.known_prefix is None else tokenizer.decode([self.known_prefix])

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
        tokenizer = self.tokenizer
        if isinstance(tokenizer, HuggingFaceTokenizer):
            ids = tokenizer.ids(text, special=special)
        else:
            ids = tokenizer.encode(text, special=special).ids
        if special and self.add_bos and not tokenizer.facts.adds_bos:
            ids = np.concatenate([np.array([tokenizer.facts.bos], dtype=np.int32), ids])
        return ids

    def pair(self, context: str, continuation: str) -> Encoded:
        stripped = context.rstrip()
        continuation, spanning = context[len(stripped) :] + continuation, False
        if context:
            whole, before = self.text(stripped + continuation), self.text(stripped)
            spanning = not np.array_equal(whole[: len(before)], before)
            target = whole[len(before) :]
        else:
            before, target = np.empty(0, np.int32), self.text(continuation, special=False)
        if not len(before) and target[:1].tolist() == [self.prefix]:
            before, target = target[:1], target[1:]
        elif not len(before):
            before = np.array([self.prefix], dtype=np.int32)
        return self.ids(before, target, spanning=spanning)

    def ids(self, before: Ids, target: Ids, *, spanning: bool = False) -> Encoded:
        """Joins both, and cuts the context from the left until it fits. The last token is scored but not fed."""
        room = len(before) + len(target) - 1 if self.max_length is None else self.max_length
        if not len(before) or not 0 < len(target) <= room:
            raise InputError(f"a continuation has {len(target)} tokens, and max_length is {room}", fix=LIKE)
        ids = np.concatenate([before, target]).astype(np.int32)
        truncated = max(0, len(ids) - room - 1)
        return Encoded(Continuation(ids[truncated:], len(ids) - truncated - len(target)), spanning, truncated)

    def rolling(self, text: str) -> list[Continuation]:
        """Splits a text into full windows that score each token once. docs/methods.md draws them."""
        ids, windows = self.text(text), []
        length = self.max_length or len(ids) or 1
        for begin in range(0, len(ids), length):  # as lm-eval-rolling
            end = min(begin + length, len(ids))
            window = (
                ids[end - length - 1 : end] if begin else np.concatenate([np.array([self.prefix], np.int32), ids[:end]])
            )
            windows.append(Continuation(window, len(window) - (end - begin)))
        return windows
