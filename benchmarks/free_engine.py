"""An engine that costs nothing, to measure everything around engines: ``free:block=65536``.

Its answers are the same numbers for every window. ``block`` is the size in bytes at which a replica sends what it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from scoremode.core.engine.base import SCORES, Engine, EngineFacts, Wanted
from scoremode.core.engine.plugin import Capabilities, EnginePlugin, Work
from scoremode.core.models.subject import Subject
from scoremode.core.scores.answers import Answers, WindowSource
from scoremode.core.text.tokenizer import ByteTokenizer
from scoremode.values import Bools

PREFIX = "free:"


def install(folder: Path) -> Path:
    """What pip would write for a package with this engine."""
    made = folder / "free_engine-1.0.dist-info"
    made.mkdir(parents=True, exist_ok=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: free_engine\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text("[scoremode.engines]\nfree = free_engine:FreePlugin\n")
    return folder


class FreeEngine(Engine):
    """Answers without looking."""

    def __init__(self) -> None:
        self.facts = EngineFacts("free", "float64", "cpu", "closed-form", 256, None)
        self._made: dict[int, Answers] = {}

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        for index in np.flatnonzero(~done).tolist():
            rows = len(source.window(index).rows)
            if rows not in self._made:
                self._made[rows] = _answers(rows)
            yield index, self._made[rows]


def _answers(rows: int) -> Answers:
    log = np.linspace(-5.0, -0.1, rows)  # no entropy above ln 256
    return Answers(
        logprob=log[:, None],
        rank=np.arange(1, rows + 1)[:, None] % 250 + 2,
        entropy=-log,
        top=np.arange(rows, dtype=np.int32) % 256,
        top_logprob=log / 2,
    )


class FreePlugin(EnginePlugin):
    """The engine's plug-in."""

    contract = 1
    name = "free"
    summary = "answers that cost nothing, for measurements"
    capabilities: ClassVar[Capabilities] = Capabilities.all()

    def claims(self, model: str) -> bool:
        return model.startswith(PREFIX)

    def subject(self, model: str, options: Any, tokenizer: str | None) -> Subject:
        return Subject(model, ByteTokenizer(), fingerprint=model, vocabulary=256)

    def open(self, subject: Subject, options: Any, work: Work) -> Engine:
        told = dict(part.split("=") for part in subject.name.removeprefix(PREFIX).split(",") if part)
        if "block" in told:
            from scoremode.remote.ray import replica

            replica.BLOCK_BYTES = int(told["block"])
        return FreeEngine()
