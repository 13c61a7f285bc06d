"""Shortened windows for the noise floor: vLLM certainly computes their rows in different steps than usual.

vLLM fills each step with whatever is waiting, up to ``max_num_batched_tokens``, and does not tell which prompts shared
a step. But if a prompt of c tokens is the only one in flight, the size of its last step is known. The whole window has
more than c tokens, so its rows were never computed in such a step: the step had more tokens, or the rows were elsewhere
in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scoremode.plan.windows import Window, WindowSource
from scoremode.values import Bools, Ints

GRAPHS = 256  # tokens: vLLM pads steps up to this size to multiples of 8, and somewhat larger steps to multiples of 16


@dataclass(frozen=True, slots=True, eq=False)
class ShortenedWindows:
    """The same windows, each without its last tokens and the rows at those tokens."""

    source: WindowSource
    step: int  # most tokens per step
    prefix_group = None

    def __len__(self) -> int:
        return len(self.source)

    @property
    def lengths(self) -> Ints:
        return np.array([len(self.window(i).ids) for i in range(len(self))], dtype=np.int64)

    @property
    def vocabulary(self) -> int | None:
        return self.source.vocabulary

    def window(self, index: int) -> Window:
        whole = self.source.window(index)
        end = self._end(whole)
        kept = int(np.searchsorted(whole.rows, end))
        return replace(whole, ids=whole.ids[:end], rows=whole.rows[:kept], targets=whole.targets[:kept])

    def _end(self, whole: Window) -> int:
        """Where to cut: half of the requested rows remain, and the last step is never full."""
        if len(whole.rows) == 0:
            return 0
        first = int(whole.rows[0]) + 1
        end = first + (len(whole.ids) - first) // 2
        return end - 1 if end % self.step == 0 else end

    def rows_in_other_steps(self, index: int) -> Bools:
        """Which remaining rows are certainly computed in a different step: those of the last step, if it is shorter."""
        whole, short = self.source.window(index), self.window(index)
        missing = len(whole.ids) - len(short.ids)
        if missing < (8 if len(whole.ids) <= GRAPHS else 16):  # with fewer, padding could restore the usual step size
            return np.zeros(len(short.rows), np.bool_)
        last_step: Bools = short.rows >= (len(short.ids) - 1) // self.step * self.step
        return last_step
