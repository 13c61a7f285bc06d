"""Scores through a scoring service: many windows a request, every column, and divergences from a baseline."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from scoremode.engines.base import SCORES, Baseline, Engine, EngineFacts, StoredDistributions, Want
from scoremode.engines.heads import Parts, digest_of, head_parts
from scoremode.engines.messages import Asked, read_answers
from scoremode.engines.server.batches import Batch, Batches
from scoremode.engines.server.link import ANYTHING, SMALL, Link, Reply
from scoremode.engines.server.server_options import SERVICE_CONCURRENCY
from scoremode.engines.server.service import ROOT, SameService, Service
from scoremode.engines.server.subject import ServedSubject
from scoremode.engines.server.workers import Workers
from scoremode.errors import EngineError, InputError, ModelError
from scoremode.plan.windows import Answers, WindowSource
from scoremode.scores import parquet
from scoremode.scores.packing import PackedAnswers
from scoremode.values import Bools

ABSENT = 404


class ServiceEngine(Engine):
    """A model behind a scoring service."""

    def __init__(self, subject: ServedSubject, service: Service, concurrency: int | None) -> None:
        self.subject, self.service = subject, service
        self.concurrency = concurrency or SERVICE_CONCURRENCY
        self.longest = service.max_model_len
        self._asking = subject.connect(1)
        self._same = SameService(self._asking, service)
        served = subject.served
        self.facts = EngineFacts(
            engine="server",
            dtype=service.dtype,
            device=service.device,
            head=service.head,
            vocabulary=service.vocabulary,
            context_length=service.max_model_len,
            versions=service.versions if served.version is None else {"server": served.version, **service.versions},
            settings={
                "address": subject.root,
                **served.facts(),
                "form": "service",
                "concurrency": self.concurrency,
                **service.settings,
            },
            notes=tuple(note for note in (*service.notes, subject.tokenizer_note()) if note),
            columns=service.columns,
        )

    def score(self, source: WindowSource, done: Bools, want: Want = SCORES) -> Iterator[tuple[int, Answers]]:
        baseline = self._baseline(want)
        self._require_room(source, done)
        head = None if baseline is None else head_parts(baseline.head)
        digest = "" if head is None else digest_of(head)
        link = self.subject.connect(self.concurrency)
        workers: Workers[Batch, list[Answers]] = Workers(
            self.concurrency, lambda batch: self._answers(link, batch.asked, head)
        )
        # this machine only waits now: what the answers are stored with is imported meanwhile
        threading.Thread(target=parquet.load_library, name="import").start()
        try:
            if head is not None:
                self._send_head(link, digest, head)
            for finished in workers.run(Batches(source, self.service, baseline, digest).of(done)):
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
        if want.against.head.vocabulary != self.service.vocabulary:
            raise ModelError(
                f"the baseline has {want.against.head.vocabulary} ids and the candidate {self.service.vocabulary}",
                fix="compare models with one vocabulary",
            )
        return want.against

    def _require_room(self, source: WindowSource, done: Bools) -> None:
        longest, room = int(source.lengths[~done].max(initial=0)), self.service.max_model_len
        if longest > room:
            raise ModelError(
                f"a window of {longest} tokens is longer than the {room} that this server takes",
                fix=f"give --context-length {room}",
            )

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _send_head(self, link: Link, digest: str, head: Parts) -> None:
        if link.get(f"{ROOT}/heads/{digest}", final=ANYTHING).good:
            return
        reply = link.send("PUT", f"{ROOT}/heads/{digest}", head, binary=False)
        if not reply.good:
            raise self._refused("the baseline's head", reply)

    def _answers(self, link: Link, asked: Asked, head: Parts | None) -> list[Answers]:
        parts: Parts = [asked.to_bytes()]
        largest = SMALL + PackedAnswers.most_bytes(asked.windows, self.facts.schema)
        reply = link.send("POST", f"{ROOT}/score", parts, largest=largest)
        if reply.status == ABSENT and asked.against is not None and head is not None:
            self._send_head(link, asked.against.digest, head)  # it was started again, or had no room for all heads
            reply = link.send("POST", f"{ROOT}/score", parts, largest=largest)
        if not reply.good:
            raise self._refused("a request", reply)
        try:
            instance, answers = read_answers(reply.data, asked, self.facts.schema)
        except InputError as wrong:
            raise EngineError(f"{link.root} gave an answer that does not fit: {wrong.message}", fix=wrong.fix) from None
        self._same.confirm(instance)
        return answers

    def _refused(self, what: str, reply: Reply) -> EngineError:
        return EngineError(
            f"{self.subject.root} refuses {what} ({reply.status}: {reply.words})", fix="what is scored is kept"
        )

    def close(self) -> None:
        self._asking.close()
