"""One question to a crew: batches are lent, answers come back in any order, each window is given on once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from scoremode.cluster.account import Account
from scoremode.cluster.crew import RESUME, Crew, Lease, Lost, Probed, Slot
from scoremode.cluster.ledger import Ledger
from scoremode.cluster.replica import Finished, block_seconds
from scoremode.cluster.transport import Parcel, PlacedWant, Refusal, parcel_of
from scoremode.errors import EngineError
from scoremode.plan.windows import Answers, WindowSource
from scoremode.scores.packing import PackedAnswers
from scoremode.scores.schema import Schema
from scoremode.values import Bools

DEPTH = 2  # leases of a replica: the next is there when one ends
LATE, GRACE = 1.5, 1.0  # a lease is late after this many times its expected seconds, and a second


class Scoring:
    """Windows of one source through a crew."""

    def __init__(
        self,
        crew: Crew,
        source: WindowSource,
        ledger: Ledger,
        *,
        want: PlacedWant,
        probe: Parcel,
        account: Account,
        schema: Schema,
    ) -> None:
        self.crew, self.source, self.ledger, self.want = crew, source, ledger, want
        self.probe, self.account, self.schema = probe, account, schema
        self._doubted: set[int] = set()  # windows that somebody gave NaN for
        self._lengths = np.asarray(source.lengths)

    def answers(self) -> Iterator[tuple[int, Answers]]:
        try:
            while not self.ledger.finished:
                self._lend()
                for slot, item in self.crew.items():
                    yield from self._heard(slot, item)
                    self._lend_to(slot)  # before others are heard: it may be idle
        finally:
            self.account.counts["dropped"] += self.ledger.dropped
            self.crew.forget_leases()

    def _heard(self, slot: Slot, item: Any) -> Iterator[tuple[int, Answers]]:
        match item:
            case PackedAnswers():
                yield from self._accepted(slot, slot.leases[0], item)
            case Finished():
                self._finished(slot, item)
            case Refusal():
                self._refused(slot, item)
            case Lost():
                self._lost(slot, item.why)
            case Probed():
                self._probed(slot, item.said)
            case _:
                raise AssertionError(f"a replica said {item!r}")

    # ── lending ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _lend(self) -> None:
        for slot in self.crew.ready:
            self._lend_to(slot)

    def _lend_to(self, slot: Slot) -> None:
        if not slot.is_ready:
            return
        if not slot.is_probed:
            slot.is_probed = True
            slot.probing = slot.actor.probe.remote(self.probe)
        while len(slot.leases) < DEPTH:
            if slot.leases and slot.pace.rate is None:
                return  # one lease tells how large the next may be
            batches = self.ledger.take(slot.pace, self.crew.sharers)
            if not batches:
                break
            self._send(slot, batches)
        if not slot.leases:
            self._copy_to(slot)

    def _send(self, slot: Slot, batches: list[int]) -> None:
        parcel = parcel_of(self.source, [self.ledger.batches.windows(batch) for batch in batches])
        done: Bools = self.ledger.done[parcel.indices]
        tokens = self.ledger.tokens(batches)
        oldest = block_seconds(len(self.crew.slots))
        self.crew.lease(slot, lambda score: score.remote(parcel, done, self.want, oldest), batches, parcel, tokens)

    def _copy_to(self, idle: Slot) -> None:
        """Nothing waits: compute once more what somebody else should have finished by now. The first answer counts."""
        now = time.monotonic()
        late: list[tuple[float, Lease, Slot]] = []
        rate = idle.pace.rate or self._usual_rate()
        if rate is None:
            return
        for slot in self.crew.ready:
            for lease in slot.leases:
                expected = GRACE + LATE * lease.tokens / rate
                if slot is not idle and not lease.is_copied and now - lease.sent > expected:
                    late.append((lease.sent, lease, slot))
        if not late:
            return
        _, lease, slot = min(late, key=lambda found: found[0])
        lease.is_copied = True
        left = self.ledger.unfinished(lease.batches)
        if left:
            self.account.counts["copies"] += 1
            self.account.event(f"{idle.name} computes what {slot.name} has not finished, too", aloud=False)
            self._send(idle, left)
            idle.leases[-1].is_copied = True

    def _usual_rate(self) -> float | None:
        known = [slot.pace.rate for slot in self.crew.ready if slot.pace.rate is not None]
        return statistics.median(known) if known else None

    # ── hearing ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _accepted(self, slot: Slot, lease: Lease, block: PackedAnswers) -> Iterator[tuple[int, Answers]]:
        slot.failures = 0
        member = self.account.members[slot.number]
        for window, answers in block.answers(self.schema):
            index = int(lease.parcel.indices[window])
            if self._is_doubtful(slot, index, answers) or not self.ledger.received(index):
                continue
            self._remember_probe(index, answers)
            member.windows += 1
            member.tokens += int(self._lengths[index])
            yield index, answers

    def _remember_probe(self, index: int, answers: Answers) -> None:
        """The probe window among others: how far it moves from itself alone is the noise of a rerun."""
        probe = self.account.probe
        if probe is None or index != probe.window or probe.in_run is not None:
            return
        if np.array_equal(self.source.window(index).ids, self.probe.window(0).ids):  # not that of another question
            probe.in_run = np.array(answers.logprob, np.float64).reshape(-1)

    def _is_doubtful(self, slot: Slot, index: int, answers: Answers) -> bool:
        """NaN may be the model's, or one broken device's: it is asked for once more, of another replica if there is."""
        if index in self._doubted or len(self.crew.slots) == 1 or not np.isnan(answers.logprob).any():
            return False
        self._doubted.add(index)
        self.account.event(f"{slot.name} gave NaN in window {index}, which is scored once more")
        return True

    def _finished(self, slot: Slot, said: Finished) -> None:
        lease = slot.leases.popleft()
        slot.pace.measured(lease.tokens, said.seconds)
        self.account.members[slot.number].seconds += said.seconds
        elsewhere = {b for other in self.crew.slots for copy in other.leases for b in copy.batches if lease.is_copied}
        left = self.ledger.give_back([b for b in lease.batches if b not in elsewhere])
        unanswered = [b for b in left if not self._doubted & set(self.ledger.batches.windows(b).tolist())]
        if unanswered and self.ledger.refused(unanswered, f"{slot.incarnation} {lease.sent}"):
            window = int(self.ledger.batches.windows(unanswered[0])[0])
            raise EngineError(f"the engine left window {window} without an answer", fix="run it again")

    def _refused(self, slot: Slot, said: Refusal) -> None:
        """The engine gave an error. Another replica may do better; if it does not, the error is the model's."""
        left = self._give_all_back(slot)
        if said.is_input or self.ledger.refused(left, slot.incarnation):
            raise said.error()
        self.account.counts["windows again"] += self._windows(left)
        self.account.event(f"the engine of {slot.name} failed: {said.message}; its windows go to others")
        self.account.counts["deaths"] += 1
        self.crew.restart(slot)

    def _lost(self, slot: Slot, why: str) -> None:
        node_lost = self.crew.is_node_lost(slot)
        running = self.ledger.unfinished(slot.leases[0].batches) if slot.leases else []
        left = self._give_all_back(slot)
        self.account.counts["windows again"] += self._windows(left)
        again = f"; {self._windows(left)} windows go to others" if left else ""
        self.account.event(f"{slot.name} is gone ({'its node is gone' if node_lost else why}){again}")
        self.crew.lost(slot, why)
        fatal = self.ledger.died(running) if running and not node_lost else None
        if fatal is not None:
            windows = self.ledger.batches.windows(fatal)
            raise EngineError(
                f"three replicas died while they scored window {int(windows[0])} ({why})",
                fix=f"give a smaller --context-length, or replicas with more memory; {RESUME}",
            )

    def _give_all_back(self, slot: Slot) -> list[int]:
        found: list[int] = []
        for lease in reversed(slot.leases):
            found = self.ledger.give_back(lease.batches) + found
        return found

    def _windows(self, batches: list[int]) -> int:
        return sum(int((~self.ledger.done[self.ledger.batches.windows(batch)]).sum()) for batch in batches)

    def _probed(self, slot: Slot, found: Any) -> None:
        member, probe = self.account.members[slot.number], self.account.probe
        assert probe is not None
        if isinstance(found, Refusal):
            self.account.event(f"{slot.name} could not score the probe window: {found.message}", aloud=False)
            member.probe_distance = float("nan")
            return
        member.probe_distance = probe.add(found)
