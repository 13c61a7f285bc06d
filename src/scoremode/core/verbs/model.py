"""A model that is loaded once, when it is first needed, and answers many questions. Every verb works with it."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from scoremode.core.cache.units import size_words
from scoremode.core.disk.folders import entry_folder
from scoremode.core.disk.stores import store_of
from scoremode.core.disk.uri import RemotePath, may_be_stored, shown
from scoremode.core.engine import registry
from scoremode.core.engine.base import Engine, EngineFacts
from scoremode.core.engine.options import Options
from scoremode.core.engine.plugin import Capabilities, EnginePlugin, Work
from scoremode.core.engine.registry import ChosenEngine
from scoremode.core.extensions import Replicas
from scoremode.core.models.names import reader_of
from scoremode.core.models.subject import Subject
from scoremode.core.options import chosen_of
from scoremode.core.plan.path import DECODE, PREFILL, DecodePath
from scoremode.core.plan.question import Question
from scoremode.core.store import runs
from scoremode.core.store.run import Run
from scoremode.core.text.corpus import Spec
from scoremode.core.typed import checked
from scoremode.core.verbs.place import Place
from scoremode.core.verbs.planned import LastTokens, PlannedQuestion, identify, plan_question
from scoremode.core.verbs.progress import Progress, announce, tell_display
from scoremode.core.verbs.replicas import read_spread, replicas_class
from scoremode.core.verbs.scoring import score_run
from scoremode.errors import ModelError, OptionError, print_line

GivenModel = str | Any
"""The name of a model, or a causal LM of Transformers that is loaded already (a ``torch.nn.Module``)."""

GivenTokenizer = str | Any
"""The folder or name of a tokenizer; of a model that is loaded already, its tokenizer itself."""

TOLD_FROM = 256 << 20  # bytes of a K/V cache, or of a reference: smaller ones are not worth a line
USUAL_LENGTH = 8192  # tokens that an engine is opened for where longer questions may come and a model could take more


class GivenEngine(EnginePlugin):
    """An engine that the caller has opened and will close. Its runs are not reused: only the caller knows it."""

    contract = 1
    name = "given"
    summary = "an engine that is open already"
    keeps_runs = False

    def __init__(self, engine: Engine, subject: Subject) -> None:
        self.engine, self.scored, self.instance = engine, subject, uuid.uuid4().hex

    def able(self) -> Capabilities:
        has_logits = type(self.engine).logits is not Engine.logits
        return Capabilities.all(hidden_states=not has_logits, logits=has_logits)  # what it lacks, it refuses itself

    def subject(self, model: str, options: Any, tokenizer: str | None) -> Subject:
        return self.scored

    def settings(self, subject: Subject, options: Any) -> dict[str, Any]:
        return {"instance": self.instance, **self.engine.facts.settings}

    def open(self, subject: Subject, options: Any, work: Work) -> Engine:
        return self.engine


class LazyModel:
    """A model and the engine that was chosen for it. The engine opens when a question first needs it.

    Nothing is read before ``chosen`` is needed: a comparison has many models, and one after the other is read.
    """

    def __init__(
        self,
        name: str,
        plugin: EnginePlugin,
        arguments: Mapping[str, Any] | None = None,
        tokenizer: str | None = None,
        *,
        chosen: ChosenEngine | None = None,
        many_questions: bool = False,
    ) -> None:
        """``arguments`` are options of the engine and of replicas; ``chosen`` has those that are read already."""
        self.name, self.plugin, self.tokenizer = name, plugin, tokenizer
        self.spread, self.arguments = read_spread(arguments or {})  # None: one engine in this process
        if self.spread is not None:
            replicas_class().require()
        self._read = chosen
        self.many_questions = many_questions  # else the engine is opened for exactly one
        self.variant: str | None = None  # its name among candidates that are one model with different settings
        self.is_removed = False  # are files that were fetched for it removed after it was scored?
        self._engine: Engine | None = None
        self._path: DecodePath | None = None  # by which the open engine feeds windows
        self._opened_path: DecodePath | None = None
        self._tokenized: LastTokens = {}  # another method on the same text need not cut it again

    @classmethod
    def named(
        cls,
        model: GivenModel,
        engine: str | Engine | None = None,
        options: Mapping[str, Any] | None = None,
        tokenizer: GivenTokenizer | None = None,
        *,
        many_questions: bool = False,
    ) -> Self:
        """A model by its name; names and options that cannot work are refused at once.

        ``engine`` is a name, or an engine that the caller has opened. A loaded model is scored as it is.
        """
        if is_loaded(model):
            return cls.wrapped(model, tokenizer, options or {}, engine=engine)
        name = os.fspath(checked("model", model, Spec))
        tokenizer = tokenizer_name(checked("tokenizer", tokenizer, Spec | None))
        _refuse_uris(name, tokenizer)
        arguments = {key: value for key, value in (options or {}).items() if value is not None and value is not False}
        if isinstance(engine, Engine):
            for option in arguments:
                if option != "trust_remote_code":  # that one is for the tokenizer too
                    raise OptionError(
                        f"{option} does not apply to an engine that is already open",
                        fix=f"give {option} where the engine is made",
                    )
            subject = registry.choose(name, None, arguments, tokenizer).subject
            given = ChosenEngine(GivenEngine(engine, subject), Options(), subject)
            return cls(name, given.plugin, None, tokenizer, chosen=given, many_questions=many_questions)
        model = cls(name, registry.choose_engine(engine, name), arguments, tokenizer, many_questions=many_questions)
        _ = model.chosen  # refuses options and names that cannot work
        return model

    @classmethod
    def wrapped(
        cls, model: Any, tokenizer: Any, options: Mapping[str, Any], *, engine: Any = None, name: str | None = None
    ) -> Self:
        """A model that is loaded already, with its tokenizer; the engine with the ability "wraps" scores it."""
        plugin = next(plugin for plugin in registry.known_engines().values() if "wraps" in plugin.abilities)
        if engine not in (None, plugin.name):
            fix = f"leave engine out: it is scored by {plugin.name}, as it is"
            raise OptionError("engine does not apply to a model that is loaded already", fix=fix)
        return cls.of(plugin.abilities["wraps"](plugin, model, tokenizer, options, name=name))

    @classmethod
    def of(cls, chosen: ChosenEngine) -> Self:
        """A model whose engine and options were chosen elsewhere."""
        return cls(chosen.subject.name, chosen.plugin, chosen=chosen)

    def changed(self, *, tokenizer: str | None = None, variant: str | None = None, **arguments: Any) -> Self:
        """The same model with another tokenizer or other options of its engine, as a variant of this name."""
        spread = {} if self.spread is None else chosen_of(self.spread)
        model = type(self)(
            self.name, self.plugin, {**spread, **self.arguments, **arguments}, tokenizer or self.tokenizer
        )
        model.variant, model.is_removed = variant, self.is_removed
        return model

    def with_options(self, options: Options) -> Self:
        """The same model, with an engine of its own that has these options."""
        model = self.of(replace(self.chosen, options=options))
        model.spread, model.tokenizer = self.spread, self.tokenizer
        return model

    def scores_as(self, other: LazyModel) -> bool:
        """Are both one model with one engine, the same options and the same tokenizer?"""
        mine, others = ((m.name, m.plugin, m.arguments, m.spread, m.tokenizer) for m in (self, other))
        return mine == others

    # ── what is known before the engine is open ──────────────────────────────────────────────────────────────────────
    @cached_property
    def _choice(self) -> ChosenEngine:
        if self._read is not None:
            return self._read
        _refuse_uris(self.name, self.tokenizer)
        return registry.choose(self.name, self.plugin, self.arguments, self.tokenizer)

    @cached_property
    def replicas(self) -> Replicas | None:
        return None if self.spread is None else replicas_class()(self._choice, self.spread, self.tokenizer)

    @cached_property
    def chosen(self) -> ChosenEngine:
        """The engine, its options, and what is known of the model without weights; refuses what cannot work."""
        return self._choice if self.replicas is None else self.replicas.chosen

    @property
    def subject(self) -> Subject:
        return self.chosen.subject

    @property
    def is_given(self) -> bool:
        """Did the caller bring the engine, or the model in memory?"""
        return not self.plugin.keeps_runs

    @property
    def given_facts(self) -> EngineFacts | None:
        """The facts of an engine that the caller has opened; None for other engines."""
        return self.plugin.engine.facts if isinstance(self.plugin, GivenEngine) else None

    @property
    def engine_name(self) -> str:
        return self.plugin.name if self.given_facts is None else self.given_facts.engine

    @property
    def called(self) -> str:
        """The name that tells it from other candidates."""
        return self.variant or self.name

    @property
    def usual_length(self) -> int:
        """The tokens of windows that its engine is opened for where longer ones may come."""
        return min(self.subject.context_length or USUAL_LENGTH, USUAL_LENGTH)

    def settings(self) -> Mapping[str, Any]:
        """The settings that the engine would use, known before it is opened; part of a run's identity."""
        return self.chosen.settings()

    def ask(self, question: Question, progress: Progress | None = None) -> PlannedQuestion:
        """Read the text of a question and plan its windows for this model."""
        registry.require_path(self.plugin, question.path)
        registry.require_read(self.chosen.options, question.path)
        announce(progress, "reading and tokenizing the text")
        return plan_question(self.subject, question, self._tokenized if self.many_questions else None)

    # ── the engine ───────────────────────────────────────────────────────────────────────────────────────────────────
    def opened(self, work: Work, progress: Progress | None = None) -> Engine:
        """The open engine, ready for windows of ``work.longest`` tokens that are fed by ``work.path``."""
        registry.require_read(self.chosen.options, DECODE if work.path else PREFILL, has_flag=False)
        work = self._kept_or_closed(work)
        if self._engine is None:
            self._engine = self._start(work, progress)
        self._engine.show = getattr(progress, "detail", None)
        return self._engine

    def _kept_or_closed(self, work: Work) -> Work:
        """Closes an engine that was opened for another path or shorter windows; returns the work to open one for."""
        if self._engine is not None and work.path != self._path:
            if work.path is not None and self.feeds_also(self._opened_path, work.path):
                self._engine.feed_by(work.path)
                self._path = work.path
            else:
                path = DECODE if work.path else PREFILL
                print_line(f"scoremode: {self.engine_name} starts again, for the {path} path")
                self.close()
        longest, open_for = work.longest, self._engine.longest if self._engine is not None else None
        if longest is None or open_for is None or longest <= open_for or self.chosen.options.limit is not None:
            return work
        context = self.subject.context_length
        doubled = 2 * open_for if context is None else min(2 * open_for, context)
        work = replace(work, longest=max(longest, doubled))
        print_line(f"scoremode: {self.engine_name} starts again, for windows of up to {work.longest} tokens")
        self.close()
        return work

    def _start(self, work: Work, progress: Progress | None) -> Engine:
        self._path = self._opened_path = work.path
        if self.many_questions and work.path is None:  # more may come, and of other kinds
            work = replace(work, longest=max(work.longest or 0, self.usual_length), shares_prompts=True)
        size = cache_bytes(self, work)
        if size is not None and size >= TOLD_FROM and work.path is not None:
            each = f"{work.path.sequences:,} sequences of {work.longest:,} tokens"
            print_line(f"scoremode: the K/V cache takes about {size_words(size)} ({each})")
        name, is_remote = self.subject.name, self.plugin.address is not None
        action = f"connecting to the server of {name}" if is_remote else f"loading {name} with {self.engine_name}"
        announce(progress, action)
        if self.replicas is not None:
            return self.replicas.engine(work, progress)
        return registry.open_engine(self.chosen, work)

    def opened_for(self, planned: PlannedQuestion, progress: Progress | None = None) -> Engine:
        """The open engine, ready for all windows of a question."""
        return self.opened(Work(longest=int(planned.plan.lengths.max()), path=planned.plan.path), progress)

    def feeds_also(self, opened: DecodePath | None, other: DecodePath | None) -> bool:
        """Can an engine of this model that was opened for one path feed by the other too, without another start?"""
        if opened is None or other is None or self.replicas is not None:
            return opened == other
        return self.plugin.feeds_also(opened, other)

    @property
    def is_open(self) -> bool:
        return self._engine is not None

    @property
    def longest_window(self) -> int | None:
        """The most tokens that a window may have, if that is known before the engine is open."""
        limit, facts = self.chosen.options.limit, self.given_facts
        return limit[1] if limit else facts.context_length if facts else self.subject.context_length

    def close(self) -> None:
        """Stop the engine, unless the caller brought it. The next question starts it again."""
        engine, self._engine = self._engine, None
        if engine is not None and not isinstance(self.plugin, GivenEngine):
            tell_display(f"stopping {self.engine_name}")
            engine.close()
            del engine
            _empty_device()

    # ── its runs ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def identity(self, planned: PlannedQuestion, **more: Any) -> Mapping[str, Any]:
        """The facts that must be equal for a stored run to be this one; ``more`` is added to the engine's settings."""
        return identify(
            planned.subject,
            self.engine_name,
            {**self.settings(), **more},
            corpus=planned.corpus.sha256,
            plan=planned.plan.digest,
            **({"slices": list(map(str, planned.documents.rules))} if planned.documents.rules else {}),
        )

    def has_run(self, planned: PlannedQuestion, place: Place, **more: Any) -> bool:
        """Is a finished run where ``claimed`` would look for it? Nothing is locked or checked."""
        return runs.is_run(place.out or entry_folder("runs", self.identity(planned, **more)))

    @contextmanager
    def claimed(
        self, planned: PlannedQuestion, place: Place, *, kind: str = "runs", **more: Any
    ) -> Iterator[runs.Claim]:
        """Claims the folder for a run: that of the place, else one in the cache; a temporary one for a given engine."""
        identity, fresh = self.identity(planned, **more), place.fresh
        with ExitStack() as stack:
            if place.out is None and self.is_given:
                temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="scoremode-"))
                yield stack.enter_context(runs.Claim(Path(temporary), identity))
                return
            folder = place.out or entry_folder(kind, identity)
            if isinstance(folder, RemotePath):
                yield stack.enter_context(store_of(folder).claim(folder, identity, fresh=fresh, kind=kind))
            else:
                yield stack.enter_context(runs.Claim(folder, identity, fresh=fresh))

    def score(self, question: Question, place: Place) -> Run:
        """The run of a question: read from its folder if it is there, else scored.

        A stored run gets the names of this question: the same text, weights and windows may have been named otherwise.
        """
        planned = self.ask(question, place.progress)
        with self.claimed(planned, place) as claim:
            run = claim.finished
            if run is not None and not self.is_given:
                names = {"corpus": planned.corpus.name, "model": planned.subject.name}
                settings = {"method_settings": dict(planned.plan.settings)}
                return replace(run, manifest={**run.manifest, **names, **settings})
            engine = self.opened_for(planned, place.progress)
            return self.outliving(score_run(planned, engine, claim, place.progress), place)

    def outliving(self, run: Run, place: Place) -> Run:
        """A run that stays readable after its claim ends: read into memory if its folder goes away."""
        return run if place.out is not None or not self.is_given else in_memory(run)

    def release(self) -> None:
        """Frees what was read of it; removes files that were fetched for it, if they are not to be kept."""
        for name in ("_choice", "replicas", "chosen"):
            self.__dict__.pop(name, None)
        reader = reader_of(self.name) if self.is_removed else None
        if reader is not None:
            reader.release(self.name)


def _empty_device() -> None:
    """Gives back the memory of GPUs that torch keeps for later: the next engine may live in another process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _refuse_uris(*names: str | None) -> None:
    for name in names:
        if name is not None and may_be_stored(name):
            raise ModelError(
                f"{shown(name)} is no finished run or reference, and models are not read from URIs",
                fix="give a folder of this machine, or a name on the hub",
            )


def in_memory(run: Run) -> Run:
    """A copy of a run with all columns in memory, for a run whose folder will be deleted."""
    return replace(run, scores=replace(run.scores), facts=replace(run.facts), path=None)  # replacing reads each column


def cache_bytes(model: LazyModel, work: Work) -> int | None:
    """The bytes of the K/V cache of the decode path, about; None on the prefill path, and if they are not known."""
    if work.path is None:
        return None
    return model.plugin.memory_need(model.subject, model.chosen.options, work).cache


def tell_starts(runs_to_score: Iterable[tuple[str, LazyModel]]) -> None:
    """Prints how often slow engines will start, and for which runs, if more than once: once for each model."""
    starts: dict[LazyModel, list[str]] = {}
    for name, model in runs_to_score:
        if model.plugin.starts_slowly:
            starts.setdefault(model, []).append(name)
    if len(starts) > 1:
        engines = " and ".join(dict.fromkeys(model.engine_name for model in starts))
        print_line(f"scoremode: {len(starts)} starts of {engines}: {'; '.join(map(', '.join, starts.values()))}")


# ── models that the caller has loaded ────────────────────────────────────────────────────────────────────────────────
def is_loaded(model: object) -> bool:
    """Is this a module of torch instead of a name? Without torch, it cannot be one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def tokenizer_name(tokenizer: GivenTokenizer | None) -> str | None:
    """The name of a tokenizer, which a reference keeps; None for a tokenizer that is loaded already."""
    return os.fspath(tokenizer) if isinstance(tokenizer, str | os.PathLike) else None
