"""Writes texts with llama.cpp, several sequences side by side, as llama-server does.

Each prompt is read at once, up to its last token. From there on, one token of each text is fed in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from scoremode.core.engine.plugin import Work
from scoremode.core.models.subject import Subject
from scoremode.core.plan.path import DecodePath
from scoremode.engines.llamacpp import LlamaCppPlugin
from scoremode.engines.llamacpp.engine import LlamaCppEngine
from scoremode.engines.llamacpp.llamacpp_options import LlamaCppOptions
from scoremode.studies.rollouts.engines.drawing import TextsInProgress
from scoremode.studies.rollouts.writing import (
    DrawingRules,
    Tell,
    Writer,
    WritingRequest,
    WrittenTokens,
    batches_of_texts,
)
from scoremode.values import Bools, Ids


def open_writer(
    plugin: LlamaCppPlugin, subject: Subject, options: LlamaCppOptions, work: Work, rules: DrawingRules
) -> LlamaCppWriter:
    return LlamaCppWriter(plugin.open(subject, options, replace(work, path=work.path or DecodePath())), rules)


class LlamaCppWriter(Writer):
    """Writes texts with an engine that is open for the decode path. Closes the engine when it is closed."""

    def __init__(self, engine: LlamaCppEngine, rules: DrawingRules) -> None:
        self.engine, self.rules, self.facts = engine, rules, engine.facts
        assert engine.path is not None, "an engine that was opened for the decode path"
        self.size = engine.path.sequences
        self.ends = engine.end_tokens()

    def write(self, asked: Sequence[WritingRequest], done: Bools, tell: Tell) -> Iterator[tuple[int, WrittenTokens]]:
        for batch in batches_of_texts(asked, self.size):
            if done[batch].all():
                continue
            texts = TextsInProgress([asked[i] for i in batch], self.rules, self.ends)
            for place in self._write(texts, tell):
                if not done[batch[place]]:
                    yield int(batch[place]), texts.written(place)

    def _write(self, texts: TextsInProgress, tell: Tell) -> Iterator[int]:
        """Writes the texts of a batch; yields the place of each when it has ended."""
        self.engine.clear()
        prompts = [one.prompt for one in texts.asked]
        for place, prompt in enumerate(prompts):
            self._read(place, prompt[:-1])
        places = np.arange(len(prompts))
        ids, positions = np.array([p[-1] for p in prompts]), np.array([len(p) - 1 for p in prompts])
        while len(places):
            logits = self.engine.feed(ids, positions, places, np.arange(len(places)))
            ids = texts.draw(places, logits)
            tell(len(places))
            yield from (int(place) for place in places if texts.ended[place])
            left = ~texts.ended[places]
            places, ids, positions = places[left], ids[left], positions[left] + 1

    def _read(self, place: int, prompt: Ids) -> None:
        step = self.engine.at_once
        for begin in range(0, len(prompt), step):
            part = prompt[begin : begin + step]
            positions = np.arange(begin, begin + len(part))
            self.engine.feed(part, positions, np.full(len(part), place), np.zeros(0, np.int64))

    def close(self) -> None:
        self.engine.close()
