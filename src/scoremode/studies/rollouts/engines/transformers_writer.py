"""Writes texts with Transformers, several side by side, each step through the same code as the decode path.

          shortest prompt      then one token of each text per step
text 0   │ p p p p p          │ d d d d d d       d: drawn, p: of its prompt
text 1   │ p p p p p          │ p p d d d         a longer prompt is fed to its end meanwhile

All texts of a batch begin at position 0 and advance together, so no text needs padding or a mask, and a text is
computed as the decode path would replay it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from scoremode.core.engine.plugin import Work
from scoremode.core.models.subject import Subject
from scoremode.core.plan.path import DecodePath
from scoremode.engines.transformers import TransformersPlugin, batches
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.studies.rollouts.engines.drawing import BatchWriter, TextsInProgress
from scoremode.studies.rollouts.writing import DrawingRules, Tell, end_tokens


def open_writer(
    plugin: TransformersPlugin, subject: Subject, options: TransformersOptions, work: Work, rules: DrawingRules
) -> TransformersWriter:
    engine = plugin.open(subject, options, replace(work, path=work.path or DecodePath()))
    return TransformersWriter(engine, end_tokens(subject), rules)


class TransformersWriter(BatchWriter):
    def __init__(self, engine: TransformersEngine, ends: frozenset[int], rules: DrawingRules) -> None:
        super().__init__(engine, engine.path, ends, rules)
        self.engine = engine

    def _write(self, texts: TextsInProgress, tell: Tell) -> Iterator[int]:
        prompts = [one.prompt for one in texts.asked]
        reached = min(map(len, prompts))
        cache, places = self.engine.cache.empty(), np.arange(len(prompts))
        rows = self.engine.fed(np.stack([prompt[:reached] for prompt in prompts]), cache)
        while len(places):
            following = np.array([prompts[i][min(reached, len(prompts[i]) - 1)] for i in places], np.int32)
            own = np.flatnonzero([reached >= len(prompts[i]) and not texts.ended[i] for i in places])
            if len(own):
                logits = self.engine.logits_of(rows[torch.from_numpy(own).to(rows.device)])
                following[own] = texts.draw(places[own], logits)
                tell(len(own))
                yield from (int(i) for i in places[own] if texts.ended[i])
            left = np.flatnonzero(~texts.ended[places])
            if not len(left):
                return
            if 2 * len(left) <= len(places) and self.engine.cache.name is None:
                cache = batches.selected(cache, torch.from_numpy(left).to(rows.device))
                places, following = places[left], following[left]
            rows = self.engine.fed(following[:, None], cache)
            reached += 1

    def account(self) -> list[str]:
        return list(self.engine.account().get("notes", ()))
