"""Windows cut short, so that vLLM certainly computes their rows in other steps than usual: for the noise floor.

vLLM puts into a step what is waiting, up to ``max_num_batched_tokens``; what was together with what nobody outside
knows. But a prompt of c tokens, alone in flight, is computed in a last step of known size. A window of more tokens
never was: where its first rows were computed, more than c tokens were, or its rows began elsewhere in the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scoremode.plan.windows import Window, WindowSource
from scoremode.values import Bools, Ints

GRAPHS = 256  # tokens: steps up to here are padded to multiples of 8, somewhat larger ones to multiples of 16


@dataclass(frozen=True, slots=True, eq=False)
class Fronts:
    """The same windows, each without its last tokens and the rows that stand there."""

    source: WindowSource
    step: int  # tokens of a step, at most
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
        """Half of the rows that are asked for remain; the last step is never a full one."""
        if len(whole.rows) == 0:
            return 0
        first = int(whole.rows[0]) + 1
        end = first + (len(whole.ids) - first) // 2
        return end - 1 if end % self.step == 0 else end

    def otherwise(self, index: int) -> Bools:
        """Which of the rows that remain are certainly computed otherwise: those of the last step, if it is shorter."""
        whole, front = self.source.window(index), self.window(index)
        missing = len(whole.ids) - len(front.ids)
        if missing < (8 if len(whole.ids) <= GRAPHS else 16):  # padding could make up for fewer
            return np.zeros(len(front.rows), np.bool_)
        last_step: Bools = front.rows >= (len(front.ids) - 1) // self.step * self.step
        return last_step
