"""A model of Transformers whose weights are swapped: one pass of the baseline, then each swap from its first layer on.

its tensors, de-quantized once ─▶ all windows, from the first layer that they change ─▶ columns, one line per target
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from scoremode.core.engine.base import EngineFacts, NoiseFloor
from scoremode.core.engine.baseline import noise_floor
from scoremode.core.engine.plugin import Work
from scoremode.core.models.subject import Subject
from scoremode.core.plan.plan import Plan
from scoremode.core.scores.answers import Answers, check_answers, check_divergence, measured
from scoremode.engines.transformers import TransformersPlugin
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.errors import EngineError, ModelError, print_line
from scoremode.studies.attribution.engines.transformers_swaps import SwappableModel
from scoremode.studies.attribution.swapping import Swap, SwapColumns, SwapFacts, Swapper, Tell, WeightFacts
from scoremode.studies.attribution.weights import CandidateWeights, OwnHeadError, StoredWeight, open_weights
from scoremode.values import Floats, Ids, change

UNTIED = "the head of {} is its embedding; a candidate has a head of its own, so both are measured apart"
TOLD_FROM = 10**8  # bytes of states from which the user is told where they go


def open_swapper(
    plugin: TransformersPlugin, subject: Subject, options: TransformersOptions, work: Work, candidates: Sequence[str]
) -> TransformersSwapper:
    assert subject.checkpoint is not None
    where, engine = subject.checkpoint.path, plugin.open(subject, options, work)
    return TransformersSwapper(engine, where, candidates, name=subject.name, token=options.token)


class TransformersSwapper(Swapper):
    """Swaps weights of an open engine's model, and closes that engine."""

    def __init__(
        self,
        engine: TransformersEngine,
        checkpoint: Path | None,
        candidates: Sequence[str],
        *,
        name: str,
        token: str | None = None,
    ) -> None:
        """``checkpoint`` is the folder that the engine's model was loaded from, None if it was made in memory."""
        self.engine, self.swaps = engine, SwappableModel(engine)
        try:
            require_float_weights(self.swaps, name)
            self.swaps.__enter__()
            untied = False
            try:
                own = self._open(checkpoint, candidates, token)
            except OwnHeadError:
                self.swaps.untie_head()
                untied = True
                self.swaps.notes.append(UNTIED.format(name))
                own = self._open(checkpoint, candidates, token)
        except BaseException:
            self.close()
            raise
        self.facts = SwapFacts(
            str(self.swaps.model.config.to_dict().get("model_type", "")),
            self.swaps.layers_name,
            len(self.swaps.layers),
            {name: self.swaps.start_of([name]) for name in self.swaps.parameters},
            own,
            {name: facts_of(one) for name, one in self.opened.items()},
            tuple(self.swaps.notes),
            untied,
        )
        self.recorded: Plan | None = None  # of which the states are kept
        self._logprob: Floats = np.zeros(0)  # (targets,) of the baseline
        self._top: Ids = np.zeros(0, np.int32)  # (targets,)

    def _open(self, checkpoint: Path | None, candidates: Sequence[str], token: str | None) -> WeightFacts:
        """Opens the candidates' weights, and returns what is known about the baseline's own."""
        config = self.swaps.model.config.to_dict()
        shapes = {name: tuple(p.shape) for name, p in self.swaps.parameters.items()}
        if checkpoint is not None:
            own = facts_of(open_weights(str(checkpoint), shapes, config=config))
        else:
            held = self.swaps.parameters.items()
            stored = {n: StoredWeight(n, tuple(p.shape), 8 * p.element_size(), str(p.dtype)) for n, p in held}
            own = WeightFacts("", (), stored)
        self.opened: dict[str, CandidateWeights] = {
            name: open_weights(
                name,
                shapes,
                config=config,
                token=token,
                read_baseline=lambda n: self.swaps.parameters[n].data,
                baseline_stored=own.stored,
            )
            for name in candidates
        }
        return own

    def engine_facts(self) -> EngineFacts:
        return self.engine.facts

    def noise(self, plan: Plan) -> NoiseFloor:
        return noise_floor(self.engine, plan)

    def close(self) -> None:
        self.swaps.__exit__()
        self.engine.close()

    def record(self, plan: Plan, swaps: Sequence[Swap], tell: Callable[[int], None]) -> None:
        """Scores the baseline and keeps the states that these swaps start from, unless the plan was recorded before."""
        if self.recorded == plan:
            return
        starts = {self.facts.start_of(swap.sources) for swap in swaps}
        place = self.swaps.place(plan, starts)
        if place.size >= TOLD_FROM or place.kind == "file":
            print_line(f"scoremode: {place.words}")
        self._logprob, self._top = np.empty(plan.targets), np.empty(plan.targets, np.int32)
        fed = 0
        for index, answers in self.swaps.record(plan, starts, place):
            check_answers(plan, [(index, answers)])
            here = rows_of(plan, index)
            self._logprob[here], self._top[here] = answers.logprob[:, 0], measured(answers.top)
            fed += int(plan.lengths[index])
            tell(fed)
        self.recorded = plan

    def columns(self, plan: Plan, swaps: Sequence[Swap], tell: Tell) -> Iterator[tuple[int, SwapColumns | None]]:
        self.record(plan, swaps, lambda fed: None)
        for number, swap in enumerate(swaps):
            tell(number, 0.0)
            try:
                with self.swaps.swapped(swap.sources, partial(self._tensor, swap)) as changed:
                    found = self._columns(plan, self._answers(plan, number, changed, tell)) if changed else None
            except EngineError as error:
                raise EngineError(f"{swap.words}: {error.message}", fix=error.fix) from None
            yield number, found

    def _tensor(self, swap: Swap, name: str) -> Tensor:
        return self.opened[swap.sources[name]].tensor(name)

    def _answers(self, plan: Plan, number: int, changed: Sequence[str], tell: Tell) -> Iterator[tuple[int, Answers]]:
        fed = 0
        for index, answers in self.swaps.diverge(plan, self.facts.start_of(changed)):
            check_answers(plan, [(index, answers)])
            check_divergence(index, answers)
            yield index, answers
            fed += int(plan.lengths[index])
            tell(number, fed / plan.forward_tokens)

    def _columns(self, plan: Plan, answered: Iterator[tuple[int, Answers]]) -> SwapColumns:
        n = plan.targets
        kl, logprob, top = np.full(n, np.nan), np.full(n, np.nan), np.empty(n, np.int32)
        for index, answers in answered:
            here = rows_of(plan, index)
            kl[here], logprob[here], top[here] = measured(answers.kl), answers.logprob[:, 0], measured(answers.top)
        assert not np.isnan(kl).any(), "every window is answered"
        return SwapColumns(kl, change(logprob, self._logprob), top == self._top)


def rows_of(plan: Plan, window: int) -> slice:
    return slice(int(plan.target_offsets[window]), int(plan.target_offsets[window + 1]))


def facts_of(weights: CandidateWeights) -> WeightFacts:
    return WeightFacts(weights.label, tuple(weights.notes), dict(weights.stored))


def require_float_weights(swaps: SwappableModel, name: str) -> None:
    """Refuses a baseline whose own weights are quantized."""
    odd = next((n for n, p in swaps.parameters.items() if not p.is_floating_point() or p.element_size() < 2), None)
    quantized = getattr(swaps.model.config, "quantization_config", None)
    if odd is not None or quantized:
        raise ModelError(f"the weights of {name} are quantized", fix="give the model before it was quantized")
