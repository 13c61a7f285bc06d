"""The work of a replica that scores: windows in, answers out, a few megabytes at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from scoremode.core.engine.base import Engine, EngineFacts, NoiseFloor, StoredDistributions, StoredHead, Want
from scoremode.core.engine.baseline import HeldBaseline, StoredBaseline
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import Chosen, open_engine
from scoremode.core.references.reader import Reference
from scoremode.core.scores.answers import check_shapes
from scoremode.core.scores.packing import AnswerPacker, PackedAnswers
from scoremode.core.verbs.replicas import Worker
from scoremode.errors import ScoremodeError
from scoremode.remote.ray.replica import as_our_error
from scoremode.remote.ray.sent import SentBaseline, WindowLengths, WindowSubset
from scoremode.values import Bools, Floats, Ints

BLOCK_BYTES, BLOCK_SECONDS = 4 << 20, 0.5  # a block is sent when it is this large or this old
BLOCKS_PER_SECOND = 200  # that one driver should have to read, at most: each costs it a millisecond or two


def block_seconds(replicas: int) -> float:
    """Seconds after which a block is sent: more with very many replicas, because one driver reads every block.

    >>> block_seconds(8), block_seconds(1000)
    (0.5, 5.0)
    """
    return max(BLOCK_SECONDS, replicas / BLOCKS_PER_SECOND)


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """The scores of the probe window, which a replica sends before its first answers."""

    logprob: Floats | ScoremodeError


def open_scoring(chosen: Chosen, work: Work) -> Worker:
    engine = open_engine(chosen, work)
    return Worker(ScoringWorker(engine), engine.facts, engine.longest)


class ScoringWorker:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._opened: dict[str, Reference | StoredDistributions] = {}  # baselines, so that each is checked once

    def facts(self) -> EngineFacts:
        """The engine's current facts. They may change: the kernel of divergences is checked when it is first used."""
        return self.engine.facts

    def batches(self, source: WindowSubset | WindowLengths) -> list[Ints] | None:
        """Which windows share a batch, by the engine's own rule."""
        return self.engine.batches(source)

    def stored_head(self) -> StoredHead:
        return self.engine.stored_head()

    def _baseline(self, sent: SentBaseline, subset: WindowSubset) -> StoredBaseline | StoredDistributions:
        if sent.path not in self._opened:
            self._opened[sent.path] = sent.open()
        found = self._opened[sent.path]
        if not isinstance(found, Reference):
            return found.part(subset.indices)
        assert subset.target_offsets is not None, "a plan knows where the targets of a window begin"
        return StoredBaseline(found, offsets=subset.target_offsets)

    def score(
        self,
        subset: WindowSubset,
        done: Bools,
        want: Want,
        against: SentBaseline | None,
        *,
        oldest: float,
        probe: WindowSubset | None,
    ) -> Iterator[Probed | PackedAnswers]:
        """Yields the answers of a piece, a few megabytes at a time."""
        if probe is not None:
            yield Probed(self._probe(probe))
        if against is not None:
            want = replace(want, against=self._baseline(against, subset))
        sent, waiting = time.perf_counter(), AnswerPacker()
        failed: Exception | None = None
        try:
            for window, answers in self.engine.score(subset, done, want):
                # answers that do not fit into columns are a fault of the engine, in the words of the driver's own check
                check_shapes(subset.window(window).targets.shape, int(subset.indices[window]), answers)
                if not waiting.fits(answers):
                    yield waiting.take()
                waiting.add(window, answers)
                if waiting.size >= BLOCK_BYTES or time.perf_counter() - sent >= oldest:
                    yield waiting.take()
                    sent = time.perf_counter()
        except Exception as error:
            failed = error
        if waiting.found:
            yield waiting.take()
        if failed is not None:
            raise failed

    def _probe(self, subset: WindowSubset) -> Floats | ScoremodeError:
        try:
            ((_, answers),) = self.engine.score(subset, np.zeros(len(subset), np.bool_))
        except Exception as error:
            return as_our_error(error)
        return answers.logprob

    def noise_floor(self, subset: WindowSubset, done: Bools) -> NoiseFloor:
        """The noise floor against states that this replica computes now, in the batches of the run."""
        return self.engine.noise_floor(HeldBaseline(self.engine, subset, done), subset, done)

    def close(self) -> None:
        self.engine.close()
