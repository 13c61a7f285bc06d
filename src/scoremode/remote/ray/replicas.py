"""Replicas on Ray, as the core asks for them.

Every command line reads this file: it imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from scoremode.core.installation import pip_install
from scoremode.core.verbs.replicas import OpenWorker, Spread
from scoremode.errors import OptionError
from scoremode.remote.ray.room import read_spread, room_for

if TYPE_CHECKING:
    from scoremode.core.engine.plugin import Work
    from scoremode.core.engine.registry import ChosenEngine
    from scoremode.core.verbs.progress import Progress
    from scoremode.remote.ray.engine import ReplicatedEngine
    from scoremode.remote.ray.replica_pool import ReplicaPool


class RayReplicas:
    """A model that runs as several replicas on Ray: see ``core.verbs.replicas.Replicas``."""

    def __init__(self, chosen: ChosenEngine, spread: Spread, tokenizer: str | None) -> None:
        if not chosen.plugin.able().replicas:
            raise OptionError(f"the {chosen.plugin.name} engine cannot run as replicas", fix="leave --replicas out")
        self.require()
        room_for(spread, chosen.plugin, chosen.options)
        its = chosen.plugin.placement(chosen.options).replica_options
        self.chosen = replace(chosen, options=its or chosen.options)
        self._spread, self._tokenizer = spread, tokenizer

    def engine(self, work: Work, progress: Progress | None) -> ReplicatedEngine:
        from scoremode.remote.ray.engine import ReplicatedEngine
        from scoremode.remote.ray.replica import open_scoring

        return ReplicatedEngine(self.pool(work, open_scoring, progress))

    def pool(self, work: Work, open_worker: OpenWorker, progress: Progress | None) -> ReplicaPool:
        from scoremode.remote.ray.replica import ReplicaSpec, facts_of
        from scoremode.remote.ray.replica_pool import ReplicaPool

        name, plugin, options = self.chosen.subject.name, self.chosen.plugin, self.chosen.options
        facts, folder = facts_of(self.chosen), os.getcwd()
        spec = ReplicaSpec(
            name, plugin.address or plugin.name, options.given(), self._tokenizer, work, folder, facts, open_worker
        )
        return ReplicaPool(spec, room_for(self._spread, plugin, options), self._spread, progress)

    read = staticmethod(read_spread)

    @staticmethod
    def require() -> None:
        if importlib.util.find_spec("ray") is None:
            raise OptionError("--replicas and --ray need Ray, which is not installed", fix=pip_install("ray"))
