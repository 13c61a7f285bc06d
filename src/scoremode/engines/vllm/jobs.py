"""A window in flight through vLLM: what was requested, and what has been answered so far."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scoremode.plan.windows import Answers, Window
from scoremode.scores.packing import Words, line_words, read_lines
from scoremode.values import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Extra:
    """What is requested in addition to the scores."""

    kind: Literal["", "states", "kl"] = ""
    words: int = 0  # after each line
    reference: str = ""
    offsets: Ints | None = None  # (windows + 1,) row of the reference at which each window begins


@dataclass(slots=True, eq=False)
class Job:
    """A window in flight: what was requested, and the answers so far (always its last lines)."""

    index: int
    window: Window  # what is requested now: the whole window, or only the first rows, which the prefix cache skipped
    read_cache: bool
    vocabulary: int  # ids from this one upwards get no probability; 0: all ids count
    extra: Extra
    lines: Words | None = None

    def take(self, words: Words, block: int) -> Job | None:
        """Add an answer; return the job that requests the missing rows, or None if none are missing.

        Rows inside a cached prefix are not computed, so they have no answer. They are requested again with a prompt
        that ends with the last of them: vLLM always computes the last token and the block that contains it.
        """
        words = words.reshape(-1, line_words(self.targets) + self.extra.words)
        missing = len(self.window.rows) - len(words)
        self.lines = words if self.lines is None else np.concatenate([words, self.lines])
        if missing == 0:
            return None
        rows = self.window.rows[:missing]
        front = replace(
            self.window, ids=self.window.ids[: int(rows[-1]) + 1], rows=rows, targets=self.window.targets[:missing]
        )
        near_the_end = int(rows[-1]) - int(rows[0]) < block
        cached = self.read_cache and near_the_end and len(words) > 0
        return Job(self.index, front, cached, self.vocabulary, self.extra, self.lines)

    @property
    def targets(self) -> int:
        """Targets per row."""
        return int(self.window.targets.shape[1])

    def all_lines(self) -> Words:
        assert self.lines is not None, "a job without an answer"
        return self.lines

    def answers(self) -> Answers:
        return read_lines(self.all_lines(), self.targets)

    def extras(self) -> Words:
        """The extra words after the lines."""
        return np.ascontiguousarray(self.all_lines()[:, line_words(self.targets) :])
