"""Writes texts with llama.cpp, several sequences side by side, as llama-server does.

Each prompt is read at once, up to its last token. From there on, one token of each text is fed in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from scoremode.core.engine.plugin import Work
from scoremode.core.models.subject import Subject
from scoremode.core.plan.path import DecodePath
from scoremode.engines.llamacpp import LlamaCppPlugin
from scoremode.engines.llamacpp.engine import LlamaCppEngine
from scoremode.engines.llamacpp.llamacpp_options import LlamaCppOptions
from scoremode.studies.rollouts.engines.drawing import BatchWriter, TextsInProgress
from scoremode.studies.rollouts.writing import DrawingRules, Tell
from scoremode.values import Ids


def open_writer(
    plugin: LlamaCppPlugin, subject: Subject, options: LlamaCppOptions, work: Work, rules: DrawingRules
) -> LlamaCppWriter:
    return LlamaCppWriter(plugin.open(subject, options, replace(work, path=work.path or DecodePath())), rules)


class LlamaCppWriter(BatchWriter):
    def __init__(self, engine: LlamaCppEngine, rules: DrawingRules) -> None:
        super().__init__(engine, engine.path, engine.end_tokens(), rules)
        self.engine = engine

    def _write(self, texts: TextsInProgress, tell: Tell) -> Iterator[int]:
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
