"""Scores through a server that is already running, many requests at a time.

Most servers get one request per window. A scoring service gets many windows per request, and gives all columns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from scoremode.core.engine.base import SCORES, Engine, EngineFacts, Wanted
from scoremode.core.engine.batching import in_groups
from scoremode.core.scores import parquet
from scoremode.core.scores.answers import Answers, Window, WindowSource
from scoremode.core.scores.messages import Asked, most_bytes, read_answers
from scoremode.core.scores.schema import wrong_first_choice
from scoremode.engines.server.asking import SERVICE_FIX, PromptAsk, ServiceAsk, prompt_ask
from scoremode.engines.server.audit import LIKELY, PROVEN, Audit
from scoremode.engines.server.checks import Description, ProbeResult, SameServer, changed, make_probes, probe
from scoremode.engines.server.forms import names_in
from scoremode.engines.server.link import SMALL, Link
from scoremode.engines.server.served import SERVICE, ServiceFacts, find_service, look
from scoremode.engines.server.server_options import CONCURRENCY, SERVICE_CONCURRENCY
from scoremode.engines.server.subject import ServedSubject
from scoremode.errors import EngineError, InputError, ModelError, UntrustedError
from scoremode.values import Bools, Ids

CHECK_SECONDS = 60.0  # between two checks that the server is the same, where nothing hints at another
AHEAD = 4  # requests for each thread: the server has work while its first answers are checked
T = TypeVar("T")
R = TypeVar("R")


class RequestEngine(Engine):
    def __init__(self, subject: ServedSubject, concurrency: int) -> None:
        self.subject, self.concurrency = subject, concurrency
        self._asking = subject.connect(1)  # for questions about the server itself
        facts = subject.tokenizer.facts
        self._bos = facts.bos if facts.adds_bos else None

    def _begin_audit(self, result: ProbeResult) -> None:
        self._exponent, self._audit = result.exponent, Audit(self._bos, result.exponent)

    def account(self) -> dict[str, Any]:
        notes = self._audit.notes(PROVEN if self._exponent >= LIKELY else 0)
        return {"notes": [note for note in notes if note not in self.facts.notes]}

    def _common_facts(self, form: str) -> dict[str, Any]:
        """The facts that engines for every kind of server have in common."""
        subject, served = self.subject, self.subject.served
        return {
            "engine": "server",
            "context_length": subject.context_length,
            "versions": {} if served.version is None else {"server": served.version},
            "settings": {"address": subject.root, **served.facts(), "form": form, "concurrency": self.concurrency},
        }

    def _require_room(self, source: WindowSource, done: Bools) -> None:
        """Refuse windows that are too long, before one is sent, and tell the checks how long they are."""
        longest, room = int(source.lengths[~done].max(initial=0)), self.facts.context_length
        self._audit.longest = longest
        if room is not None and longest > room:
            raise ModelError(
                f"a window of {longest} tokens is longer than the {room} that this server takes",
                fix=f"give --context-length {room}",
            )

    def close(self) -> None:
        self._asking.close()


class ServerEngine(RequestEngine):
    """A model behind an address.

    An answer is kept only if the server was found unchanged after it came. Every answer must have the same model name
    and fingerprint. After every new connection (a server that was started again cannot have the old ones), and from
    time to time, the server's description of itself and its scores of the probe are compared with the first ones.
    """

    def __init__(self, subject: ServedSubject, concurrency: int | None) -> None:
        super().__init__(subject, concurrency or CONCURRENCY)
        assert subject.form is not None, "a server that scores prompts in a form"
        self.form, served = subject.form, subject.served
        try:
            room = None if served.max_model_len is None else served.max_model_len - 1
            probes = make_probes(subject.tokenizer, room)
            self.probe_ids = tuple(probes.repeated.tolist())
            self._ask = prompt_ask(self._asking, self.form, served.model, self.probe_ids)
            result = probe(self._ask, probes, self._bos)
            self._begin_audit(result)
            self._same = SameServer(subject.root, Description(served.facts(), result.scores), self._describe)
            self._same.check()
        except BaseException:
            self._asking.close()
            raise
        self._connections: tuple[Link | None, int] = (None, 0)  # those that an earlier check covers
        facts = self._common_facts(self.form.name)
        self.facts = EngineFacts(
            **facts,
            dtype="as served",
            device=subject.root,
            head="as-served",
            vocabulary=None,
            notes=subject.notes_with((*served.notes, *filter(None, [self.form.note]), *result.notes)),
        )

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        if want.states or want.against is not None:
            raise EngineError(self.form.no_states, fix="use an engine that loads the model itself")
        if source.vocabulary is not None:
            raise EngineError(
                "this method leaves out ids that have no token, and a server does not",
                fix="use another --method, such as sliding-once",
            )
        self._require_room(source, done)
        missing = np.flatnonzero(~done).tolist()
        link = self.subject.connect(self.concurrency)
        count = min(self.concurrency, max(1, len(missing)))
        asking = replace(self._ask, link=link)
        try:
            for index, answers in in_threads(count, lambda index: self._answers(asking, source.window(index)), missing):
                self.confirm(link)
                yield index, answers
            self.require_same()
            self._audit.judge(self._ask)
        except UntrustedError:
            self.require_same()  # another server's scores contradict those of the first, and what is kept is good
            raise
        finally:
            link.close()

    def _answers(self, asking: PromptAsk, window: Window) -> Answers:
        prompt, targets = _prompt(window), window.targets
        if targets.shape[1] != 1 or not np.array_equal(prompt[window.rows + 1], targets[:, 0]):
            raise EngineError(
                "a server scores the tokens of a text and no others", fix="use an engine that loads the model itself"
            )
        answer = asking(prompt.tolist())
        self._require_names(answer.model, answer.fingerprint)
        self._audit.window(asking, prompt, answer.logprob)
        return Answers(logprob=answer.logprob[window.rows][:, None])

    # ── is it the same server? ───────────────────────────────────────────────────────────────────────────────────────
    def require_names(self, answer: Mapping[str, Any]) -> None:
        """Require that the fields of an answer name the server and the model that the run began with."""
        self._require_names(*names_in(answer))

    def require_same(self) -> None:
        """Require that the server is the one that the run began with."""
        self._same.check()

    def _require_names(self, model: str | None, fingerprint: str | None) -> None:
        served = self.subject.served
        if fingerprint != served.system_fingerprint:
            raise changed(
                self.subject.root,
                f"its system_fingerprint was {served.system_fingerprint} and is {str(fingerprint)[:200]}",
            )
        if model is not None and model != served.model:
            raise changed(self.subject.root, f"its model was {served.model} and is {model[:200]}")

    def _describe(self) -> Description:
        name = self.subject.served.model
        try:
            now = look(self._asking, name)
        except ModelError as gone:
            raise changed(self.subject.root, f"it does not serve '{name}' any more; {gone.fix}") from None
        answer = self._ask(self.probe_ids)
        self._require_names(answer.model, answer.fingerprint)
        return Description(replace(now, system_fingerprint=answer.fingerprint).facts(), answer.logprob)

    def confirm(self, link: Link) -> None:
        """Check the server if the workers have new connections, or a minute has passed."""
        connections = link, link.made
        try:
            self._same.confirm((*connections, time.monotonic() // CHECK_SECONDS))
        except EngineError as error:
            if connections != self._connections:
                raise
            fix = "the last minute's scores may be of either: score again with --fresh"
            raise EngineError(error.message, fix=fix) from None
        self._connections = connections


def _prompt(window: Window) -> Ids:
    """The tokens that a window feeds, and the last row's target if it is not among them."""
    if len(window.rows) and window.rows[-1] == len(window.ids) - 1:
        return np.concatenate([window.ids, window.targets[-1, :1]])
    return window.ids


# ── a scoring service ────────────────────────────────────────────────────────────────────────────────────────────────
class ServiceEngine(RequestEngine):
    def __init__(self, subject: ServedSubject, service: ServiceFacts, concurrency: int | None) -> None:
        super().__init__(subject, concurrency or SERVICE_CONCURRENCY)
        self.service = service
        self._same = same_service(self._asking, service)
        longest = min(service.max_model_len, subject.context_length or service.max_model_len)
        send, vocabulary = lambda request: self._answers(self._asking, request), service.vocabulary
        self._ask = ServiceAsk(root=subject.root, fix=SERVICE_FIX, most=1, send=send, vocabulary=vocabulary)
        result = probe(self._ask, make_probes(subject.tokenizer, longest), self._bos)
        self._begin_audit(result)
        facts = self._common_facts("service")
        facts["versions"] |= service.versions
        facts["settings"] |= service.settings
        self.facts = EngineFacts(
            **facts,
            dtype=service.dtype,
            device=service.device,
            head=service.head,
            vocabulary=service.vocabulary,
            notes=subject.notes_with((*service.notes, *result.notes)),
        )

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        if want != SCORES:
            raise EngineError(
                "a server gives scores, and no hidden states, whole distributions or KL",
                fix="use an engine that loads the model itself",
            )
        self._require_room(source, done)
        link = self.subject.connect(self.concurrency)
        # this machine only waits now: what the answers are stored with is imported meanwhile
        threading.Thread(target=parquet.load_library, name="import").start()
        try:
            batches = self._batches(source, done)
            for (indices, _), answers in in_threads(
                self.concurrency, lambda batch: self._checked(link, batch[1]), batches
            ):
                yield from zip(indices, answers, strict=True)
            self._audit.judge(self._ask)
        finally:
            link.close()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _batches(self, source: WindowSource, done: Bools) -> Iterator[tuple[list[int], Asked]]:
        """Requests for the windows that are not done, with their indices, each about as large as one forward pass.

        A request is made when it is about to be sent. They follow the plan, but windows that begin alike are together.
        """
        order, shared = in_groups(source, done)
        limits = self.service.limits
        most = min(self.service.batch_tokens, limits.body_bytes // 32)  # tokens

        def batch() -> tuple[list[int], Asked]:
            begins_alike = tuple(bool(shared[index]) for index in chosen)
            return [*chosen], Asked(tuple(chosen.values()), source.vocabulary or 0, begins_alike)

        chosen: dict[int, Window] = {}
        room = most
        for index in order.tolist():
            window = source.window(index)
            cost = max(len(window.ids), int(window.targets.size))
            if chosen and (cost > room or len(chosen) >= limits.windows):
                yield batch()
                chosen, room = {}, most
            chosen[index] = window
            room -= cost
        if chosen:
            yield batch()

    def _checked(self, link: Link, request: Asked) -> Sequence[Answers]:
        """The answers to a request, of which some windows were asked again."""
        answers = self._answers(link, request)
        ask = replace(self._ask, send=lambda more: self._answers(link, more), limit=request.vocabulary)
        for window, answer in zip(request.windows, answers, strict=True):
            prompt = _prompt(window)
            scores = np.full(len(prompt) - 1, np.nan)  # NaN: it was not scored
            is_own = prompt[window.rows + 1] == window.targets[:, 0]
            scores[window.rows[is_own]] = answer.logprob[is_own, 0]
            self._audit.window(ask, prompt, scores)
        return answers

    def _answers(self, link: Link, request: Asked) -> Sequence[Answers]:
        largest = SMALL + most_bytes(request.windows)
        reply = link.post(f"{SERVICE}/score", request.to_bytes(), largest=largest, answer=bytes)
        if not reply.good:
            raise EngineError(
                f"{self.subject.root} refuses a request ({reply.status}: {reply.words})",
                fix="see the server's log; what is scored is kept: run the same command again to resume",
            )
        try:
            instance, answers = read_answers(reply.value, request)
        except InputError as wrong:
            raise EngineError(f"{link.root} gave an answer that does not fit: {wrong.message}", fix=wrong.fix) from None
        self._same.confirm(instance)
        for window, answer in zip(request.windows, answers, strict=True):
            for column in (answer.logprob, answer.entropy, answer.top_logprob):
                if column is not None and column.size and not column.max() < np.inf:  # of numbers with a NaN, it is NaN
                    raise EngineError(
                        f"{link.root} gives NaN or infinity as a score",
                        fix="start the server in float32; if it stays, its weights are damaged",
                    )
            if (first := wrong_first_choice(window.targets, answer.rank, answer.top)) is not None:
                raise UntrustedError(f"{link.root} contradicts itself: {first}", fix=SERVICE_FIX)
        return answers


def same_service(link: Link, first: ServiceFacts) -> SameServer:
    """Makes the check that every instance named in an answer has the facts and scores of the first one."""

    def describe() -> Description:
        now = find_service(link)
        if now is None:
            raise changed(link.root, "it is no scoring service any more")
        return Description(now.identity(), np.array(now.probe), now.instance)

    return SameServer(link.root, Description(first.identity(), np.array(first.probe), first.instance), describe)


# ── threads ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def in_threads(count: int, work: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Apply a function to items in threads. Yields finished items with their results, in any order.

    At most ``AHEAD * count`` items are under way. The threads end with the process, so that Ctrl-C waits for no server.
    """
    todo: SimpleQueue[tuple[T] | None] = SimpleQueue()
    done: SimpleQueue[tuple[T, R] | BaseException] = SimpleQueue()

    def work_on_items() -> None:
        while (taken := todo.get()) is not None:
            try:
                done.put((taken[0], work(taken[0])))
            except BaseException as error:  # it is raised where the answers are taken
                done.put(error)
                return

    waiting, pending = iter(items), 0
    for _ in range(count):
        threading.Thread(target=work_on_items, daemon=True, name="scoremode-request").start()
    try:
        while True:
            for item in islice(waiting, AHEAD * count - pending):
                todo.put((item,))
                pending += 1
            if not pending:
                return
            outcome = done.get()
            if isinstance(outcome, BaseException):
                raise outcome
            pending -= 1
            yield outcome
    finally:
        for _ in range(count):
            todo.put(None)
