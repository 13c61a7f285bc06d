"""An engine in sixty lines: ``unigram:FILE`` gives every byte the probability that it has in FILE.

Like many servers, it gives only log-probabilities: ranks and entropy are then "not measured", and a command that needs
hidden states is refused before anything is opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from scoremode.core.engine.base import SCORES, Answers, Engine, EngineFacts, Wanted
from scoremode.core.engine.options import Options, option
from scoremode.core.engine.plugin import Capabilities, EnginePlugin, Work
from scoremode.core.models.subject import Subject
from scoremode.core.text.tokenizer import ByteTokenizer
from scoremode.errors import ModelError


@dataclass(frozen=True, slots=True)
class UnigramOptions(Options):
    smoothing: float | None = option("added to the count of every byte (default: 1)", metavar="COUNT", above=0)


class UnigramEngine(Engine):
    def __init__(self, data: bytes, smoothing: float) -> None:
        counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256) + smoothing
        self.logprobs = np.log(counts / counts.sum())
        self.facts = EngineFacts(
            "unigram", dtype="float64", device="cpu", head="closed-form", vocabulary=256, context_length=None
        )

    def score(self, source: Any, done: Any, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        for index in np.flatnonzero(~done).tolist():
            yield index, Answers(logprob=self.logprobs[source.window(index).targets])


class UnigramPlugin(EnginePlugin):
    contract = 1
    name = "unigram"
    summary = "bytes as often as they are in a file: unigram:FILE"
    capabilities: ClassVar[Capabilities] = Capabilities(any_target=True, replicas=True)
    options = UnigramOptions

    def claims(self, model: str) -> bool:
        return model.startswith("unigram:")

    def subject(self, model: str, options: UnigramOptions, tokenizer: str | None) -> Subject:
        path = Path(model.removeprefix("unigram:"))
        if not path.is_file():
            raise ModelError(f"there is no file '{path}'", fix="give one, as in unigram:notes.txt")
        return Subject(model, ByteTokenizer(), hashlib.sha256(path.read_bytes()).hexdigest(), vocabulary=256)

    def open(self, subject: Subject, options: UnigramOptions, work: Work) -> Engine:
        return UnigramEngine(Path(subject.name.removeprefix("unigram:")).read_bytes(), options.smoothing or 1.0)
