"""Which engine scores which model of a comparison, and which of them gets which option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scoremode.cluster.spread import Room, Spread, read_spread, room_for
from scoremode.engines.plugin import EnginePlugin
from scoremode.engines.registry import choose_engine, engine_for, read_options, require, share_options
from scoremode.errors import InputError, OptionError
from scoremode.references.kld import is_kld
from scoremode.store import runs
from scoremode.verbs.model import HeldModel, hold


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for, for the candidates and for the baseline."""

    engine: str | None
    options: Mapping[str, Any]
    baseline_engine: str | None
    baseline_options: Mapping[str, Any]
    tokenizer: str | None


@dataclass(frozen=True, slots=True)
class Settings:
    """How a model is scored: the engine, its options, and another tokenizer than the model's own."""

    engine: str | None
    options: Mapping[str, Any]
    tokenizer: str | None

    def plugin(self, model: str) -> EnginePlugin:
        return choose_engine(self.engine, model)

    @property
    def spread(self) -> Spread | None:
        """Over replicas; None: in this process."""
        return read_spread(self.options)[0]

    def room(self, model: str) -> Room:
        """What one replica of a model takes of a cluster."""
        spread, options = read_spread(self.options)
        assert spread is not None, "no replicas"
        plugin = self.plugin(model)
        return room_for(spread, plugin, read_options(plugin, options))

    def hold(self, model: str) -> HeldModel:
        return hold(model, self.engine, self.options, self.tokenizer)


def divide(
    baseline: str, candidates: Sequence[str], wanted: Wanted, *, divergence: bool = True
) -> tuple[Settings | None, dict[str, Settings]]:
    """Settings of the baseline (None if it is not scored) and of each candidate that is a model.

    A candidate whose engine cannot be compared is refused here, before an hour is spent on the baseline; without
    ``divergence``, every engine can.
    """
    scored = [name for name in candidates if not runs.is_run(name)]
    for name in scored:
        if is_kld(name):
            raise InputError(f"{name} is a file of base logits, which can only be the baseline", fix="give it first")
    is_model = not (runs.is_run(baseline) or is_kld(baseline))  # a reference is a run too
    models = [*[baseline] * is_model, *scored]
    engines = [wanted.baseline_engine] * is_model + [wanted.engine] * len(scored)
    given = [wanted.baseline_options] * is_model + [wanted.options] * len(scored)
    plugins = [engine_for(engine, model) for engine, model in zip(engines, models, strict=True)]
    settings = [
        Settings(engine if _fits(engine, model) else plugin.name, share_options(plugin, plugins, own), wanted.tokenizer)
        for engine, model, plugin, own in zip(engines, models, plugins, given, strict=True)
    ]
    how = dict(zip(scored, settings[is_model:], strict=True))
    for name, its_own in how.items():
        if divergence:
            require(its_own.plugin(name), "divergence", "be compared with a baseline")
    return settings[0] if is_model else None, how


def _fits(engine: str | None, model: str) -> bool:
    try:
        choose_engine(engine, model)
    except OptionError:
        return False
    return True
