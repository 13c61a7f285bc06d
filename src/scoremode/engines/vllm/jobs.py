"""A window on its way through vLLM: what was asked of it, and what has been answered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scoremode.engines.vllm.wire import (
    Words,
    join,
    unpack,
    width,
)
from scoremode.plan.windows import Answers, Window
from scoremode.values import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Extra:
    """What is asked beside the scores."""

    kind: Literal["", "states", "kl"] = ""
    words: int = 0  # behind each line
    reference: str = ""
    offsets: Ints | None = None  # (windows + 1,) rows of the reference where each window begins


@dataclass(slots=True, eq=False)
class Job:
    """A window on its way: what was asked, and what has been answered of it (always its last lines)."""

    index: int
    window: Window  # what is asked now: all, or only the front that the prefix cache swallowed
    read_cache: bool
    vocabulary: int  # ids from here on get no probability; 0: all
    extra: Extra
    back: Answers | None = None
    behind: Words | None = None  # what came behind the lines of ``back``

    def take(self, words: Words, block: int) -> Job | None:
        """Add an answer; the job that asks for what is missing, None when nothing is.

        Rows inside a cached prefix are never computed, so they have no answer. They are asked again with a prompt that
        ends with the last of them: vLLM always computes the last token, and the block it lies in.
        """
        k = self.window.targets.shape[1]
        words = words.reshape(-1, width(k) + self.extra.words)
        missing = len(self.window.rows) - len(words)
        got, more = unpack(words[:, : width(k)], k), np.ascontiguousarray(words[:, width(k) :])
        self.back = got if self.back is None else join(got, self.back)
        self.behind = more if self.behind is None else np.concatenate([more, self.behind])
        if missing == 0:
            return None
        rows = self.window.rows[:missing]
        front = replace(
            self.window, ids=self.window.ids[: int(rows[-1]) + 1], rows=rows, targets=self.window.targets[:missing]
        )
        near_the_end = int(rows[-1]) - int(rows[0]) < block
        cached = self.read_cache and near_the_end and len(words) > 0
        return Job(self.index, front, cached, self.vocabulary, self.extra, self.back, self.behind)

    def answers(self) -> Answers:
        assert self.back is not None, "a job without an answer"
        return self.back

    def extras(self) -> Words:
        assert self.behind is not None, "a job without an answer"
        return self.behind
