"""Writes texts with Transformers, several side by side, each step through the same code as the decode path.

          shortest prompt      then one token of each text per step
text 0   │ p p p p p          │ d d d d d d       d: drawn, p: of its prompt
text 1   │ p p p p p          │ p p d d d         a longer prompt is fed to its end meanwhile

All texts of a batch begin at position 0 and advance together, so no text needs padding or a mask, and a text is
computed as the decode path would replay it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from scoremode.core.engine.plugin import Work
from scoremode.core.models.subject import Subject
from scoremode.core.plan.path import DecodePath
from scoremode.engines.transformers import TransformersPlugin, batches
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.errors import EngineError
from scoremode.studies.rollouts.engines.drawing import TextsInProgress
from scoremode.studies.rollouts.writing import (
    DrawingRules,
    Tell,
    Writer,
    WritingRequest,
    WrittenTokens,
    batches_of_texts,
    end_tokens,
)
from scoremode.values import Bools


def open_writer(
    plugin: TransformersPlugin, subject: Subject, options: TransformersOptions, work: Work, rules: DrawingRules
) -> TransformersWriter:
    engine = plugin.open(subject, options, replace(work, path=work.path or DecodePath()))
    return TransformersWriter(engine, end_tokens(subject), rules)


class TransformersWriter(Writer):
    """Writes texts with an engine that is open for the decode path. Closes the engine when it is closed."""

    def __init__(self, engine: TransformersEngine, ends: frozenset[int], rules: DrawingRules) -> None:
        self.engine, self.ends, self.rules, self.facts = engine, ends, rules, engine.facts
        assert engine.path is not None, "an engine that was opened for the decode path"
        self.size = engine.path.sequences

    def write(self, asked: Sequence[WritingRequest], done: Bools, tell: Tell) -> Iterator[tuple[int, WrittenTokens]]:
        for batch in batches_of_texts(asked, self.size):
            if done[batch].all():
                continue
            texts = TextsInProgress([asked[i] for i in batch], self.rules, self.ends)
            try:
                for place in self._write(texts, tell):
                    if not done[batch[place]]:
                        yield int(batch[place]), texts.written(place)
            except torch.OutOfMemoryError:
                raise EngineError(
                    f"{len(batch)} texts side by side do not fit in this device's memory",
                    fix=f"give --sequences {max(1, len(batch) // 2)}, or fewer --max-tokens",
                ) from None

    def _write(self, texts: TextsInProgress, tell: Tell) -> Iterator[int]:
        """Writes the texts of a batch; yields the place of each when it has ended."""
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

    def close(self) -> None:
        self.engine.close()
