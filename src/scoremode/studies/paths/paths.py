"""``scoremode paths``: one model against itself on the same targets, decoded or fed in other ways against prefilled.

prefill ──▶ reference, or logits ──▶ KL, perplexity ratio, differences of logprobs ◀── decode 1, decode 16, chunked 256
                                                                 each beside its own rerun, which shows its noise
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from scoremode.core.arguments import whole_number
from scoremode.core.cache.units import size_words
from scoremode.core.disk.uri import located
from scoremode.core.engine.base import Baseline, Engine, WholeDistributions, only_one_way
from scoremode.core.engine.baseline import StoredBaseline, noise_facts
from scoremode.core.engine.options import Options
from scoremode.core.engine.registry import require_path
from scoremode.core.plan.path import CACHE_HIT, CHUNK_TOKENS, CHUNKED, DECODE
from scoremode.core.references.reader import open_reference
from scoremode.core.statistics.comparison import Comparison, Comparisons
from scoremode.core.store.run import Run
from scoremode.core.text.memory import available
from scoremode.core.verbs.arguments import PATH, AllArguments, check_question, spelled_out, split_arguments
from scoremode.core.verbs.baselines import Against, compare_with
from scoremode.core.verbs.memory import is_by_logits, require_both_fit
from scoremode.core.verbs.model import GivenModel, GivenTokenizer, LazyModel, tokenizer_name
from scoremode.core.verbs.ppl import ppl_of
from scoremode.core.verbs.progress import Progress, announce
from scoremode.core.verbs.progress_display import shows_progress
from scoremode.core.verbs.reference import reference_of
from scoremode.core.verbs.scoring import UnfinishedRun
from scoremode.core.verbs.sides import NOISE, Folders, compared_with
from scoremode.errors import EngineError, OptionError, did_you_mean
from scoremode.studies.paths.varied import NOT_RERUN, Varied, rerun
from scoremode.values import change

WAYS = (DECODE, CHUNKED, CACHE_HIT)


@dataclass(frozen=True, slots=True)
class Feeding:
    """A way to feed windows that is compared with the prefill path."""

    kind: str  # one of WAYS
    size: int | None  # sequences side by side, or tokens of a chunk or a turn; None: the default of the decode path


@spelled_out(AllArguments)
@shows_progress
def paths(
    model: GivenModel,
    *,
    vary: str | Sequence[str] = DECODE,
    chunk_tokens: int | Sequence[int] | None = None,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> Comparisons:
    """Compares a model with itself: the baseline is its prefill path, the candidates are other ways to feed it.

    ``vary`` names the ways: ``decode``, ``chunked`` (prefill of ``chunk_tokens`` at a time) and ``cache-hit`` (turns of
    ``chunk_tokens``, each after a prefix from the engine's cache). ``sequences`` and ``chunk_tokens`` may be lists, in
    which each number is a candidate. ``arguments`` are those of a question and the engine's options. All runs are kept
    in ``out`` (``prefill``, ``decode-16``, …), else in the cache folder.

    >>> paths("table:uniform", text="any text", sequences=[1, 4])[1].kl.max()
    np.float64(0.0)
    """
    if arguments.get("path") is not None:
        raise OptionError("paths measures both paths", fix="leave --path out")
    ways = _read_ways(vary, arguments.get("sequences"), chunk_tokens, arguments.get("prefill_tokens"))
    question, options = split_arguments(
        {name: value for name, value in arguments.items() if name not in PATH}, needs_text=True
    )
    decoded = {**question, "path": DECODE, "prefill_tokens": arguments.get("prefill_tokens")}
    for way in ways:
        if way.kind == DECODE:
            check_question({**decoded, "sequences": way.size})
    folders = Folders(located(out) if out is not None else None, fresh, progress)
    with closing(LazyModel.named(model, engine, options, tokenizer)) as lazy, closing(_for_prefill(lazy)) as prefill:
        for way in ways:
            require_path(lazy.plugin, way.kind, f"leave {way.kind} out of --vary")
        return _PathsOfModel(prefill, lazy, question, decoded, folders, tokenizer_name(tokenizer)).compare(ways)


def _with_options(model: LazyModel, options: Options) -> LazyModel:
    return LazyModel(replace(model.chosen, options=options), spread=model.spread, tokenizer=model.tokenizer)


def _for_prefill(model: LazyModel) -> LazyModel:
    """Returns a model without options that only the decode path reads: itself if it has none of them."""
    options = model.chosen.options
    only = [name for name in options.given() if options.known()[name].details.path == DECODE]
    return _with_options(model, replace(options, **dict.fromkeys(only))) if only else model


def _read_ways(vary: str | Sequence[str], sequences: Any, chunk_tokens: Any, prefill_tokens: Any) -> list[Feeding]:
    """Reads the ways that a user named and the numbers of each; each number is a way of its own."""
    kinds = [vary] if isinstance(vary, str) else list(vary)
    for kind in kinds:
        if kind not in WAYS:
            raise OptionError(f"there is no way '{kind}' to feed a model", fix=did_you_mean(str(kind), WAYS))
    if not kinds:
        raise OptionError("there is nothing to compare with prefill", fix=f"give --vary {DECODE}")
    for name, value in (("sequences", sequences), ("prefill_tokens", prefill_tokens)):
        if value is not None and DECODE not in kinds:
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(f"{flag} belongs to the decode path", fix=f"add {DECODE} to --vary, or leave {flag} out")
    if chunk_tokens is not None and not {CHUNKED, CACHE_HIT} & set(kinds):
        raise OptionError(
            "--chunk-tokens belongs to chunked prefill and to cache hits",
            fix=f"add {CHUNKED} or {CACHE_HIT} to --vary, or leave --chunk-tokens out",
        )
    of_chunks = "chunk_tokens", chunk_tokens, CHUNK_TOKENS
    found = list[Feeding]()
    for kind in kinds:
        name, value, default = ("sequences", sequences, None) if kind == DECODE else of_chunks
        found += [Feeding(kind, size) for size in _numbers(name, value)] or [Feeding(kind, default)]
    if len(set(found)) < len(found):
        raise OptionError("one way is given twice", fix="give each way and each number once")
    return found


def _numbers(name: str, given: Any) -> list[int]:
    """Reads one number or several; an empty list if none was given."""
    several = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    found = [number for value in several if (number := whole_number(name, value)) is not None]
    if any(number < 1 for number in found):
        raise OptionError(f"--{name.replace('_', '-')} {min(found)} is less than 1", fix="give 1 or more")
    return found


@dataclass(frozen=True)
class _PathsOfModel:
    """A model that is compared with itself."""

    model: LazyModel  # without a cache that only the decode path reads
    decodes: LazyModel
    question: dict[str, Any]
    decoded: dict[str, Any]  # the same question to the decode path
    folders: Folders
    tokenizer: str | None

    def compare(self, ways: Sequence[Feeding]) -> Comparisons:
        """Scores the prefill path, then every other way, and returns their comparisons in the order of the ways."""
        # cache hits come first: the engine of the prefill path can serve them, if it was started with a cache
        order = sorted(ways, key=lambda way: way.kind != CACHE_HIT)
        self.model.shares_prompts = order[0].kind == CACHE_HIT
        self._require_sizes(ways)
        run, found = self._prefilled(), {}
        for way in order:
            if way.kind != CACHE_HIT and not is_by_logits(self.model.plugin):
                self.model.close()  # its memory is needed
            announce(self.folders.progress, way.kind, "label")
            found[way] = self._compared(run, way)
        return Comparisons(found[way] for way in ways)

    def _require_sizes(self, ways: Sequence[Feeding]) -> None:
        """Refuses chunks and turns that would hold the longest window, before anything is loaded."""
        sizes = [way.size for way in ways if way.kind != DECODE and way.size is not None]
        if not sizes:
            return
        if any(way.kind == CACHE_HIT for way in ways) and self.model.spread is not None:
            raise EngineError("cache hits are measured in one process", fix="leave --replicas out")
        longest = int(self.model.ask(self.question, self.folders.progress).plan.lengths.max())
        if max(sizes) >= longest:
            raise OptionError(
                f"a window of {longest} tokens is not cut into chunks of {max(sizes)}",
                fix=f"give --chunk-tokens {max(1, longest // 4)}, or a larger --context-length",
            )

    def _prefilled(self) -> Run:
        out = self.folders.folder("prefill")
        how: dict[str, Any] = {"fresh": self.folders.fresh, "progress": self.folders.progress}
        if self.model.plugin.able().hidden_states:
            return reference_of(self.model, self.question, out, tokenizer=self.tokenizer, **how)
        return ppl_of(self.model, self.question, out=out, **how)

    def _compared(self, run: Run, way: Feeding) -> Comparison:
        """Scores one way against the prefill path, or reads its run if it is finished."""
        model = self.model
        if way.kind == CHUNKED and way.size is not None:
            model = _with_options(model, model.plugin.chunked(model.chosen.options, way.size))
        elif way.kind == DECODE:
            model = _with_options(self.decodes, self.decodes.chosen.options)
        question = {**self.decoded, "sequences": way.size} if way.kind == DECODE else self.question
        try:
            asked = model.ask(question, self.folders.progress)
            against = AgainstPrefill(asked, self.folders, self, run, way)
            model.variant = against.name
            return compare_with(nullcontext(against), model, self.folders)
        finally:
            if way.kind != CACHE_HIT:
                model.close()


@dataclass
class AgainstPrefill(Against):
    """The prefill path of a model as the baseline of another way to feed it."""

    paths: _PathsOfModel
    run: Run  # of the prefill path
    way: Feeding

    @property
    def model(self) -> LazyModel:
        return self.paths.model

    @cached_property
    def size(self) -> int:
        size = self.asked.plan.path.sequences if self.asked.plan.path else self.way.size
        assert size is not None, "only the decode path has a default of its own"
        return size

    @property
    def name(self) -> str:
        return f"{self.way.kind.replace('-', ' ')} {self.size}"

    @property
    def identity(self) -> dict[str, Any]:
        turns = {"turn_tokens": self.size} if self.way.kind == CACHE_HIT else {}
        return {"against": self.run.manifest["identity"], **turns, **({"without": "kl"} if self.missing else {})}

    def rows(self, candidate: LazyModel) -> Baseline | WholeDistributions | None:
        """The stored distributions of the prefill path, or the logits of an engine that runs at the same time."""
        plan = self.asked.plan
        if self.missing:
            return None
        if self.model.plugin.able().hidden_states:
            return StoredBaseline(open_reference(str(self.run.path)), plan)
        from scoremode.core.engine.logits import HeldLogits, LiveLogits

        side_by_side = plan.path.sequences if plan.path else 1
        require_both_fit(self.model, candidate, int(plan.lengths.max()) * side_by_side)
        engine = self.model.engine_for(self.model.ask(self.paths.question), self.folders.progress)
        return (LiveLogits if side_by_side == 1 else HeldLogits)(engine, plan)

    def engine(self, candidate: LazyModel) -> Engine:
        return self._varied(candidate).fed(super().engine(candidate))

    def _varied(self, candidate: LazyModel) -> Varied:
        return Varied(candidate, self.asked, self.size if self.way.kind == CACHE_HIT else None)

    def facts(self, run: UnfinishedRun, candidate: LazyModel) -> dict[str, Any]:
        """The facts about the baseline, about noise, and about a promise of equal bits."""
        noise: Mapping[str, Any] = {name: self.run.manifest.get(name) for name in NOISE}
        if not candidate.plugin.able().hidden_states:
            noise = noise_facts(only_one_way(run.engine))
        found = compared_with(self.run, noise, candidate)
        del found["variant"]  # the settings of the plan or of the engine tell the ways apart
        logprob = run.journal.rows(0, run.asked.plan.targets).logprob
        announce(self.folders.progress, "scoring a few windows again")
        found["rerun"] = rerun(run.engine, run.asked.plan, logprob) if candidate.spread is None else NOT_RERUN
        moved = change(logprob, self.run.scores.logprob)
        if said := self._varied(candidate).kept_promise(moved, f"{self.way.kind} against prefill"):
            found["promise"] = said
        return found

    def finished(self, candidate: Run) -> Run:
        return self.run

    @cached_property
    def missing(self) -> str | None:
        """Says why KL cannot be measured; None if it can."""
        able, plan = self.model.plugin.able(), self.asked.plan
        if able.hidden_states:
            return None
        if not able.logits or self.model.spread is not None:
            return f"KL between the paths needs hidden states, which the {self.model.engine_name} engine does not give"
        if plan.path is None or plan.path.sequences == 1:
            return None
        # the logits of a batch of windows, and while the next batch begins, those of the last one
        rows = int(plan.target_counts.max()) * min(plan.path.sequences, len(plan))
        held, free = 2 * rows * (self.asked.subject.vocabulary or 0) * 4, available()
        if free is None or held < free // 2:
            return None
        return (
            f"KL between the paths would hold about {size_words(held)} of logits for {plan.path.sequences} sequences, "
            "more than half of the free memory: give --sequences 1"
        )
