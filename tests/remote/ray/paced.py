"""An engine for tests of replicas: a table whose windows take a fixed time, and which fails as it is told to.

``paced:wait=0.02,die=7``: each window takes 0.02 s, and the process kills itself at a window whose first id is 7.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from scoremode.core.engine.base import SCORES, Engine, Wanted
from scoremode.core.engine.plugin import Capabilities, EnginePlugin, Work
from scoremode.core.models.subject import Subject
from scoremode.core.scores.answers import Answers, WindowSource
from scoremode.core.text.tokenizer import ByteTokenizer
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import EngineError, OptionError
from scoremode.values import Bools

PREFIX = "paced:"
DEVICE, WEIGHTS = "SCOREMODE_TEST_DEVICE", "SCOREMODE_TEST_WEIGHTS"  # of a node
ENTRY = "[scoremode.engines]\npaced = tests.remote.ray.paced:PacedPlugin\n"


def install(folder: Path) -> Path:
    """What pip would write for a package with this engine."""
    made = folder / "paced-1.0.dist-info"
    made.mkdir(parents=True, exist_ok=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: paced\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text(ENTRY)
    return folder


class PacedEngine(TableEngine):
    """``wait`` seconds for each window; ``die``, ``fail``, ``once``: first ids of windows that this happens at."""

    def __init__(self, told: dict[str, float]) -> None:
        super().__init__(np.random.default_rng(5).normal(size=(256, 256)))
        self.told = told
        self.facts = replace(self.facts, engine="paced", device=os.environ.get(DEVICE, "cpu"))

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        for index, answers in super().score(source, done, want):
            first = int(source.window(index).ids[0])
            time.sleep(self.told.get("wait", 0.0))
            if first == self.told.get("die"):
                os.kill(os.getpid(), signal.SIGKILL)
            if first == self.told.get("fail"):
                raise EngineError("the table is on fire", fix="call somebody")
            if first == self.told.get("once") and not (burnt := Path("burnt")).exists():
                burnt.touch()
                raise EngineError("the table is out of memory", fix="call somebody")
            yield index, answers


class PacedPlugin(EnginePlugin):
    """The engine's plug-in."""

    contract = 1
    name = "paced"
    summary = "a table that takes its time"
    capabilities: ClassVar[Capabilities] = Capabilities.all()

    def claims(self, model: str) -> bool:
        return model.startswith(PREFIX)

    def subject(self, model: str, options: Any, tokenizer: str | None) -> Subject:
        weights = model + os.environ.get(WEIGHTS, "")
        digest = hashlib.sha256(weights.encode()).hexdigest()
        return Subject(model, ByteTokenizer(), digest, vocabulary=256, context_length=1 << 20)

    def open(self, subject: Subject, options: Any, work: Work) -> Engine:
        told = dict(part.split("=") for part in subject.name.removeprefix(PREFIX).split(",") if part)
        if "refuse" in told:
            raise OptionError("this table never opens", fix="choose another")
        if "crash" in told:
            os.kill(os.getpid(), signal.SIGKILL)
        return PacedEngine({name: float(value) for name, value in told.items()})
