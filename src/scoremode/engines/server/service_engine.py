"""Scores through a scoring service: many windows a request, every column, and divergences from a baseline."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from scoremode.engines.base import SCORES, Baseline, EngineFacts, StoredDistributions, Want, require_one_vocabulary
from scoremode.engines.batching import in_groups
from scoremode.engines.messages import Asked, BaselineStates, Parts, digest_of, head_parts, read_answers
from scoremode.engines.server.checks import Description, SameServer, changed
from scoremode.engines.server.engine import RequestEngine, in_threads
from scoremode.engines.server.link import ANYTHING, SMALL, Link, Reply
from scoremode.engines.server.served import SERVICE, ServiceFacts, find_service
from scoremode.engines.server.server_options import SERVICE_CONCURRENCY
from scoremode.engines.server.subject import ServedSubject
from scoremode.errors import EngineError, InputError
from scoremode.plan.windows import Answers, Window, WindowSource
from scoremode.scores import parquet
from scoremode.scores.packing import PackedAnswers
from scoremode.values import Bools

ABSENT = 404
STATES_BYTES = 32 << 20  # of a baseline's states in one request


class RequestBatch(NamedTuple):
    """Windows that go in one request."""

    indices: tuple[int, ...]
    asked: Asked


class ServiceEngine(RequestEngine):
    """A model behind a scoring service."""

    def __init__(self, subject: ServedSubject, service: ServiceFacts, concurrency: int | None) -> None:
        super().__init__(subject, concurrency or SERVICE_CONCURRENCY)
        self.service = service
        self._same = same_service(self._asking, service)
        facts = self._common_facts("service")
        facts["versions"] |= service.versions
        facts["settings"] |= service.settings
        self.facts = EngineFacts(
            **facts,
            dtype=service.dtype,
            device=service.device,
            head=service.head,
            vocabulary=service.vocabulary,
            notes=subject.notes_with(service.notes),
            columns=service.columns,
        )

    def score(self, source: WindowSource, done: Bools, want: Want = SCORES) -> Iterator[tuple[int, Answers]]:
        baseline = self._baseline(want)
        self._require_room(source, done)
        head = None if baseline is None else head_parts(baseline.head)
        digest = "" if head is None else digest_of(head)
        link = self.subject.connect(self.concurrency)
        # this machine only waits now: what the answers are stored with is imported meanwhile
        threading.Thread(target=parquet.load_library, name="import").start()
        try:
            if head is not None:
                self._send_head(link, digest, head)
            batches = self._batches(source, done, baseline, digest)
            for finished in in_threads(self.concurrency, lambda batch: self._answers(link, batch.asked, head), batches):
                for batch, answers in finished:
                    yield from zip(batch.indices, answers, strict=True)
        finally:
            link.close()

    def _baseline(self, want: Want) -> Baseline | None:
        if want.states or want.records:
            raise EngineError(
                "a server gives no hidden states or whole distributions",
                fix="use an engine that loads the model itself",
            )
        if isinstance(want.against, StoredDistributions):
            raise EngineError(
                "a server is compared with hidden states, not with a file of base logits",
                fix="make a reference of the baseline: scoremode reference MODEL --out ref/",
            )
        if want.against is None:
            return None
        if not self.service.divergence:
            raise EngineError("this server runs on several machines and gives no divergence", fix="use one machine")
        require_one_vocabulary(want.against.head.vocabulary, self.service.vocabulary)
        return want.against

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _batches(
        self, source: WindowSource, done: Bools, baseline: Baseline | None, digest: str
    ) -> Iterator[RequestBatch]:
        """Requests for what is not done, each about as large as one forward pass of the service.

        They are made one by one as they are sent, in the order of the plan; windows that begin alike are together.
        """
        order, shared = in_groups(source, done)
        limits = self.service.limits
        most = min(self.service.batch_tokens, limits.body_bytes // 32)  # tokens
        row_bytes = 0
        if baseline is not None:  # the bytes of its states are more of a burden than the tokens
            most = min(STATES_BYTES, limits.body_bytes // 2)
            row_bytes = int(baseline.head.weight.shape[1]) * baseline.head.weight.dtype.itemsize

        def batch() -> RequestBatch:
            states = () if baseline is None else tuple(baseline.states(index, own) for index, own in chosen.items())
            against = None if baseline is None else BaselineStates(digest, baseline.dtype, states)
            begins_alike = tuple(bool(shared[index]) for index in chosen)
            asked = Asked(tuple(chosen.values()), source.vocabulary or 0, begins_alike, against)
            return RequestBatch(tuple(chosen), asked)

        chosen: dict[int, Window] = {}
        room = most
        for index in order.tolist():
            window = source.window(index)
            cost = row_bytes * len(window.rows) if row_bytes else max(len(window.ids), int(window.targets.size))
            if chosen and (cost > room or len(chosen) >= limits.windows):
                yield batch()
                chosen, room = {}, most
            chosen[index] = window
            room -= cost
        if chosen:
            yield batch()

    def _send_head(self, link: Link, digest: str, head: Parts) -> None:
        if link.get(f"{SERVICE}/heads/{digest}", final=ANYTHING).good:
            return
        reply = link.ask("PUT", f"{SERVICE}/heads/{digest}", head)
        if not reply.good:
            raise self._refused("the baseline's head", reply)

    def _answers(self, link: Link, asked: Asked, head: Parts | None) -> list[Answers]:
        parts: Parts = [asked.to_bytes()]
        largest = SMALL + PackedAnswers.most_bytes(asked.windows, self.facts.schema)
        reply = link.post(f"{SERVICE}/score", parts, largest=largest, binary=True)
        if reply.status == ABSENT and asked.against is not None and head is not None:
            self._send_head(link, asked.against.digest, head)  # it was started again, or had no room for all heads
            reply = link.post(f"{SERVICE}/score", parts, largest=largest, binary=True)
        if not reply.good:
            raise self._refused("a request", reply)
        try:
            instance, answers = read_answers(reply.data, asked, self.facts.schema)
        except InputError as wrong:
            raise EngineError(f"{link.root} gave an answer that does not fit: {wrong.message}", fix=wrong.fix) from None
        self._same.confirm(instance)
        for own in answers:
            for column in (own.logprob, own.entropy, own.top_logprob):
                if column is not None and column.size and not column.max() < np.inf:  # of numbers with a NaN, it is NaN
                    raise EngineError(
                        f"{link.root} gives NaN or infinity as a score",
                        fix="start the server in float32; if it stays, its weights are damaged",
                    )
        return answers

    def _refused(self, what: str, reply: Reply) -> EngineError:
        return EngineError(
            f"{self.subject.root} refuses {what} ({reply.status}: {reply.words})", fix="what is scored is kept"
        )


def same_service(link: Link, first: ServiceFacts) -> SameServer:
    """Every answer names the instance that gave it. One that is new must say and score what the first one did."""

    def describe() -> Description:
        now = find_service(link)
        if now is None:
            raise changed(link.root, "it is no scoring service any more")
        return Description(now.identity(), np.array(now.probe), now.instance)

    return SameServer(link.root, Description(first.identity(), np.array(first.probe), first.instance), describe)
