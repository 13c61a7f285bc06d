"""Several replicas as one engine: every verb works with it as with any other."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from scoremode.cluster.account import Account, Probe, say_on_standard_error
from scoremode.cluster.crew import Crew
from scoremode.cluster.ledger import Batches, Ledger
from scoremode.cluster.replica import Spec
from scoremode.cluster.scoring import Scoring
from scoremode.cluster.spread import Spread, room_for
from scoremode.cluster.starting import Cluster, require_ray
from scoremode.cluster.transport import Outline, Parcel, parcel_of, placed, placed_baseline
from scoremode.engines.base import SCORES, Baseline, Engine, NoiseFloor, StoredHead, Want
from scoremode.engines.baseline import StoredBaseline
from scoremode.engines.plugin import Work
from scoremode.engines.registry import Chosen
from scoremode.errors import EngineError, OptionError
from scoremode.plan.windows import Answers, WindowSource, prescribed_batches
from scoremode.values import Bools, Ints


def check_spread(chosen: Chosen, spread: Spread) -> Chosen:
    """Refuse what cannot be spread before a text is read; the engine with the options of one replica."""
    if not chosen.plugin.able().replicas:
        raise OptionError(f"the {chosen.plugin.name} engine cannot run as replicas", fix="leave --replicas out")
    require_ray()
    room_for(spread, chosen.plugin, chosen.options)
    return replace(chosen, options=chosen.plugin.as_replica(chosen.options))


def threads_of(spread: Spread) -> str | None:
    """Threads of a replica: those of one process here, because the bits of a CPU's sums depend on them."""
    given = os.environ.get("OMP_NUM_THREADS")
    if given:
        return given
    if spread.cpus_per_replica is not None and spread.cpus_per_replica >= 1:
        return str(int(spread.cpus_per_replica))
    torch = sys.modules.get("torch")
    return None if torch is None else str(torch.get_num_threads())


class ReplicatedEngine(Engine):
    """A model on several replicas. It is open when the first of them is; the others join as they come."""

    def __init__(
        self,
        chosen: Chosen,
        work: Work,
        spread: Spread,
        tokenizer: str | None = None,
        *,
        tell: Callable[[str], None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """``tell`` gets what each replica does, four times a second; ``say`` what a user should see at once."""
        self._batches: tuple[Any, Batches] | None = None  # of the source that was asked about last
        self._probe: Parcel | None = None
        self._is_accounted = False
        room, threads = room_for(spread, chosen.plugin, chosen.options), threads_of(spread)
        environment = {} if threads is None else {"OMP_NUM_THREADS": threads}
        self._crew: Crew | None = None
        self._cluster = Cluster(spread, room)
        try:
            self._account = Account(spread.replicas, self._cluster.address, say or say_on_standard_error)
            spec = Spec.of(chosen, tokenizer, work)
            self._crew = Crew(
                self._cluster,
                spec,
                count=spread.replicas,
                room=room,
                environment=environment,
                account=self._account,
                tell=tell,
            )
            first = self.crew.wait_for_one().opened
        except BaseException:
            self.close()
            raise
        assert first is not None
        self.facts, self.longest = first.facts, first.longest

    @property
    def crew(self) -> Crew:
        assert self._crew is not None, "closed"
        return self._crew

    def wait_for_all(self, seconds: float = 300.0) -> int:
        """Wait until every replica is open or left out; how many are open. Scoring needs no such wait."""
        return self.crew.wait_for_all(seconds)

    # ── scores ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def score(self, source: WindowSource, done: Bools, want: Want = SCORES) -> Iterator[tuple[int, Answers]]:
        if done.all():
            return
        if self._is_accounted:
            self._account.new_question()
            self._is_accounted = False
        asked = placed(want)
        ledger = Ledger(self._batches_of(source), done)
        probe = self._probe_of(source)
        schema = self.facts.schema
        scoring = Scoring(self.crew, source, ledger, want=asked, probe=probe, account=self._account, schema=schema)
        yield from scoring.answers()
        if want.against is not None:  # its kernel is chosen when the first divergence is asked for
            self.facts = self.crew.ask("facts")

    def _probe_of(self, source: WindowSource) -> Parcel:
        """The window that every replica scores when it starts: the first of the longest of the first question."""
        if self._probe is None:
            window = int(np.argmax(source.lengths))
            self._probe = parcel_of(source, [np.array([window], np.int64)])
            self._account.probe = Probe(window)
        return self._probe

    def _batches_of(self, source: WindowSource) -> Batches:
        if self._batches is not None and self._batches[0]() is source:
            return self._batches[1]
        found = Batches.of(source, self.batches(source))
        try:
            self._batches = weakref.ref(source), found
        except TypeError:  # a value without a place for weak references
            self._batches = None
        return found

    def batches(self, source: WindowSource) -> list[Ints] | None:
        """By the rule of the engine, which knows its model: a replica says."""
        prescribed = prescribed_batches(source)
        if prescribed is not None:
            return prescribed
        sent: Parcel | Outline = Outline(np.asarray(source.lengths), source.vocabulary)
        if source.prefix_group is not None:
            sent = replace(parcel_of(source, [np.arange(len(source))]), batch_ends=None)
        found: list[Ints] | None = self.crew.ask("batches", sent)
        return found

    def computes(self, source: WindowSource, done: Bools) -> Bools:
        batches, found = self._batches_of(source), np.zeros(len(source), np.bool_)
        for batch in range(len(batches)):
            windows = batches.windows(batch)
            found[windows] = not done[windows].all()
        return found

    # ── what one replica answers for all ─────────────────────────────────────────────────────────────────────────────
    def stored_head(self) -> StoredHead:
        found: StoredHead = self.crew.ask("stored_head")
        return found

    def noise_floor(self, baseline: Baseline, source: WindowSource, done: Bools) -> NoiseFloor:
        # a reference that is being written to a URI cannot be read by others yet
        unread = isinstance(baseline, StoredBaseline) and baseline.stored.read_remote is not None
        place, batches = None if unread else placed_baseline(baseline), self._batches_of(source)
        wanted = [b for b in range(len(batches)) if not done[batches.windows(b)].all()]
        parcel = parcel_of(source, [batches.windows(b) for b in wanted])
        found: NoiseFloor = self.crew.ask("noise_floor", place, parcel, done[parcel.indices])
        return found

    def account(self) -> dict[str, Any]:
        self._is_accounted = True
        return {"replicas": self._account.as_json(), "notes": self._account.notes()}

    def close(self) -> None:
        """End the replicas, and Ray if it was started here."""
        crew, self._crew = self._crew, None
        try:
            if crew is not None:
                crew.close()
        finally:
            self._cluster.close()


def require_alone(spread: Spread | None) -> None:
    """Refuse replicas where two models must run in one process, window by window."""
    if spread is not None:
        raise EngineError(
            "replicas cannot run beside another open model",
            fix='make a reference of the baseline first: baseline.reference("ref/", corpus=…)',
        )
