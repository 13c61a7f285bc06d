"""An engine with a column that scoremode does not know: how far the first choice is ahead of each target."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from scoremode.engines.base import SCORES, Engine, EngineFacts, Want
from scoremode.engines.plugin import EVERYTHING, Capabilities, EnginePlugin, Work
from scoremode.engines.table.engine import TableEngine
from scoremode.models.subject import Subject
from scoremode.scores.answers import Answers, WindowSource, measured
from scoremode.scores.schema import Column
from scoremode.text.tokenizer import ByteTokenizer
from scoremode.values import Bools

MARGIN = Column(
    "float64", "logprob of the first choice minus that of the target", "target", unit="nats", least=0.0, name="margin"
)
DIES_AFTER = "SCOREMODE_TEST_DIES_AFTER"  # windows


class MarginEngine(TableEngine):
    """A table that also says by how much the first choice is ahead."""

    def __init__(self, columns: tuple[Column, ...] = ()) -> None:
        super().__init__(np.random.default_rng(5).normal(size=(256, 256)))
        self.facts: EngineFacts = replace(self.facts, engine="margins", columns=columns)

    def score(self, source: WindowSource, done: Bools, want: Want = SCORES) -> Iterator[tuple[int, Answers]]:
        for count, (index, answers) in enumerate(super().score(source, done, want)):
            if count == int(os.environ.get(DIES_AFTER, "-1")):
                os.kill(os.getpid(), signal.SIGKILL)
            margin = measured(answers.top_logprob)[:, None] - answers.logprob
            yield index, replace(answers, more={"margin": margin})


class MarginPlugin(EnginePlugin):
    """Declares the column: this, and the code that computes it, is all that a column needs."""

    contract = 1
    name = "margins"
    summary = "a table with a column of its own"
    capabilities: ClassVar[Capabilities] = replace(EVERYTHING, columns=(MARGIN,))

    def claims(self, model: str) -> bool:
        return model.startswith("margins:")

    def subject(self, model: str, options: Any, tokenizer: str | None) -> Subject:
        digest = hashlib.sha256(model.encode()).hexdigest()
        return Subject(model, ByteTokenizer(), digest, vocabulary=256, context_length=1 << 20)

    def open(self, subject: Subject, options: Any, work: Work) -> Engine:
        return MarginEngine()
