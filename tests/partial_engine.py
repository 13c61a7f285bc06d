"""A table engine that does not give every column, as a remote server does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from scoremode.core.engine.base import SCORES, Wanted
from scoremode.core.scores.answers import Answers, WindowSource
from scoremode.engines.table.engine import TableEngine
from scoremode.values import Bools

SUBSETS = [
    (*rank, *entropy, *top)
    for rank in ((), ("rank",))
    for entropy in ((), ("entropy",))
    for top in ((), ("top", "top_logprob"))
]
"""Every set of columns that an engine may give beside ``logprob``."""
ALL = ("rank", "entropy", "top", "top_logprob")
LOGITS = np.linspace(-3.0, 3.0, 256)[None] * np.cos(np.arange(256))[None]


def named(columns: tuple[str, ...]) -> str:
    """A subset as a test's name."""
    return "+".join(columns) or "nothing"


class PartialEngine(TableEngine):
    """Gives ``logprob`` and ``columns``; is interrupted after ``windows`` of them, where a number is given."""

    def __init__(self, *columns: str, windows: int | None = None, logits: Any = LOGITS) -> None:
        super().__init__(logits)
        self.given, self.windows = columns, windows

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        for count, (index, answers) in enumerate(super().score(source, done, want)):
            if count == self.windows:
                raise KeyboardInterrupt
            dropped: dict[str, Any] = dict.fromkeys(name for name in ALL if name not in self.given)
            yield index, replace(answers, **dropped)
