"""Engines by what these studies need of them: states between layers, routes of experts, swaps of weights."""

from __future__ import annotations

from typing import Any

from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import can, known_engines, open_for
from scoremode.core.verbs.model import LazyModel
from scoremode.core.verbs.progress import Progress, announce

SWAPS, ROUTES = "swaps", "routes"  # weights of a baseline; experts of a mixture
STATES, REPLAY = "layer_states", "layer_replay"  # between layers; and layers that are fed the states of another model


def engine_with(ability: str) -> str:
    """The name of the engine with an ability that only one has."""
    return next(name for name, plugin in known_engines().items() if can(plugin, ability))


def opened(model: LazyModel, ability: str, longest: int, progress: Progress | None) -> Any:
    """Opens a model for an ability, for windows of up to ``longest`` tokens."""
    announce(progress, f"loading {model.subject.name} with {model.engine_name}")
    return open_for(model.chosen, ability, Work(longest=longest))
