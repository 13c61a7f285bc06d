"""Texts drawn from a table: their log-probabilities are known in closed form. A table has no end token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from scoremode.core.engine.plugin import Work
from scoremode.core.models.subject import Subject
from scoremode.engines.table import TablePlugin
from scoremode.engines.table.engine import TableEngine
from scoremode.studies.rollouts.engines.drawing import TextsInProgress
from scoremode.studies.rollouts.writing import DrawingRules, Tell, Writer, WritingRequest, WrittenTokens
from scoremode.values import Bools


def open_writer(plugin: TablePlugin, subject: Subject, options: Any, work: Work, rules: DrawingRules) -> TableWriter:
    return TableWriter(plugin.open(subject, options, work), rules)


class TableWriter(Writer):
    """Writes texts with a table, one after the other."""

    def __init__(self, table: TableEngine, rules: DrawingRules) -> None:
        self.table, self.rules, self.facts = table, rules, table.facts
        self.ends = frozenset[int]()

    def write(self, asked: Sequence[WritingRequest], done: Bools, tell: Tell) -> Iterator[tuple[int, WrittenTokens]]:
        for number in np.flatnonzero(~done).tolist():
            text = TextsInProgress([asked[number]], self.rules, self.ends)
            last = int(asked[number].prompt[-1])
            while not text.ended[0]:
                line = self.table.logprobs[last % len(self.table.logprobs)]
                last = int(text.draw(np.zeros(1, np.int64), torch.from_numpy(line[None]))[0])
                tell(1)
            yield number, text.written(0)
