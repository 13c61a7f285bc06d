"""A file of base logits in place of a model: an engine that reads its scores, and the baseline that candidates meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from scoremode.engines.base import SCORES, Engine, EngineFacts, StoredDistributions, Want
from scoremode.engines.plugin import Capabilities, EnginePlugin, Work
from scoremode.errors import EngineError
from scoremode.models.subject import Subject
from scoremode.plan.windows import Answers, Window, WindowSource
from scoremode.references.kld import Coarseness, KldFile, read_scores
from scoremode.values import Bools, Ints, Raw

NAME = "base-logits"


class FileBaseline(StoredDistributions):
    """The distributions in a file; window i of the plan is chunk i of the file, unless ``chunks`` are given."""

    def __init__(self, file: KldFile, chunks: Ints | None = None) -> None:
        self.file, self.vocabulary, self.chunks = file, file.layout.vocabulary, chunks

    def records(self, index: int, window: Window) -> Raw:
        found = self.file.records(index if self.chunks is None else int(self.chunks[index]))
        assert len(found) == len(window.rows), "a record for each row"
        return found


class BaseLogitsEngine(Engine):
    """Scores as a file has them: log-probabilities and first choices. Ranks and entropies are not exact there."""

    def __init__(self, file: KldFile, notes: tuple[str, ...] = ()) -> None:
        """``notes`` are what a reader must know of the file, besides what is found in its records."""
        self.file, self._notes = file, notes
        self.facts = EngineFacts(
            engine=NAME,
            dtype="uint16",
            device="file",
            head="16-bit log-probabilities",
            vocabulary=file.layout.vocabulary,
            context_length=file.layout.context,
        )

    def score(self, source: WindowSource, done: Bools, want: Want = SCORES) -> Iterator[tuple[int, Answers]]:
        if want != SCORES:
            raise EngineError("a file of base logits has scores only", fix="name a model")
        seen = Coarseness()
        for index in range(len(source)):  # done or not: the notes are about all of the file
            window = source.window(index)
            answers = read_scores(self.file, index, window.targets[:, 0], seen)
            if not done[index]:
                yield index, answers
        self.facts = replace(self.facts, notes=(*seen.notes(), *self._notes))


class BaseLogitsPlugin(EnginePlugin):
    """A file of base logits. No model has this engine, and nobody can ask for it by name."""

    contract = 1
    name = NAME
    summary = "a file of base logits of llama.cpp"
    capabilities: ClassVar[Capabilities] = Capabilities(top=True)

    def __init__(self, file: KldFile, notes: tuple[str, ...] = ()) -> None:
        self.file, self.notes = file, notes

    def subject(self, model: str, options: Any, tokenizer: str | None) -> Subject:
        raise AssertionError("a file is asked about with the tokenizer of a candidate")

    def open(self, subject: Subject, options: Any, work: Work) -> Engine:
        return BaseLogitsEngine(self.file, self.notes)
