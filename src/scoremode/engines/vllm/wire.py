"""How requests and answers cross vLLM's process boundary: raw int32, no object per token.

A request travels in ``PoolingParams.extra_kwargs`` as bytes (vLLM would not decode an array on the other side). An
answer is one int32 tensor with one line per row: see scores/packing.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from scoremode.scores.packing import Words, from_message, to_message
from scoremode.values import Ids, Raw

KEY = "scoremode"
KERNEL_WORDS = 96  # room for the name of the head's kernel and a note, as JSON, four bytes per word


def pack_words(facts: dict[str, str]) -> list[int]:
    """A small dictionary as int32 words, cut to ``KERNEL_WORDS`` if a note is too long."""
    room = 4 * KERNEL_WORDS
    text = json.dumps(facts)
    while len(text) > room:
        longest = max(facts, key=lambda name: len(facts[name]))
        facts = facts | {longest: facts[longest][: len(facts[longest]) // 2]}
        text = json.dumps(facts)
    words: list[int] = np.frombuffer(text.encode("ascii").ljust(room), "<i4").tolist()
    return words


def unpack_words(words: Words) -> dict[str, str]:
    facts: dict[str, str] = json.loads(np.ascontiguousarray(words, "<i4").tobytes().decode("ascii"))
    return facts


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What to score in one prompt that is sent to vLLM."""

    rows: Ids  # (m,) ascending positions in the prompt
    targets: Ids  # (m, k)
    vocabulary: int = 0  # ids from this one upwards get no probability; 0: all ids count
    gather: bool = False  # reduce the gathered logits instead of each shard's own
    self_test: bool = False  # also answer through the model's own compute_logits
    extra: Literal["", "states", "kl", "head"] = ""  # hidden states or KL after each line, or rows of the head instead
    reference: str = ""  # what KL is measured against: folder of a reference, or digest of a head that was sent
    states: Raw | None = None  # (m, d) the baseline's states for these rows, where they were sent and lie in no folder
    states_dtype: str = ""
    first: int = 0  # where to start: in the reference's rows, or in the head's rows
    count: int = 0  # how many rows of the head

    def to_kwargs(self) -> dict[str, bytes]:
        rows, targets = np.asarray(self.rows, np.int32), np.asarray(self.targets, np.int32)
        return {KEY: to_message(replace(self, rows=rows, targets=targets))}

    @staticmethod
    def from_kwargs(kwargs: dict[str, Any] | None) -> Request | None:
        """The request that a prompt carries; None if it carries none and its own tokens are to be scored."""
        packed = (kwargs or {}).get(KEY)
        return from_message(packed, Request) if packed else None

    @staticmethod
    def own_tokens(ids: npt.NDArray[Any]) -> Request:
        """Every token but the first, each predicted from the row before it: the default for a prompt."""
        targets = np.asarray(ids[1:], np.int32)
        return Request(rows=np.arange(len(targets), dtype=np.int32), targets=targets[:, None])


def states_words(d: int, itemsize: int) -> int:
    """Words per hidden state; a state that does not fill its last word is padded."""
    return -(-d * itemsize // 4)
