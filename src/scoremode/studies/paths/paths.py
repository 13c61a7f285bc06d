"""``sm.paths``: one model against itself on the same targets, decoded or fed in other ways against prefilled.

prefill ──▶ reference, or logits ──▶ KL, perplexity ratio, differences of logprobs ◀── decode 1, decode 16, chunked 256
                                                                 each beside its own rerun, which shows its noise
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from scoremode.core.engine.registry import require_path
from scoremode.core.plan.path import CHUNK_TOKENS, CHUNKED, DECODE, SEQUENCES, read_path
from scoremode.core.plan.question import Question
from scoremode.core.statistics.comparison import Comparison, Comparisons
from scoremode.core.store.run import Run
from scoremode.core.store.runs import Claim
from scoremode.core.verbs.arguments import AllArguments, read_arguments, spelled_out
from scoremode.core.verbs.baselines import is_by_logits
from scoremode.core.verbs.model import GivenModel, GivenTokenizer, LazyModel, tell_starts
from scoremode.core.verbs.place import Place
from scoremode.core.verbs.planned import PlannedQuestion
from scoremode.core.verbs.progress import Progress, announce, shows_progress
from scoremode.core.verbs.reference import reference_of
from scoremode.errors import OptionError, did_you_mean
from scoremode.studies.paths.variation import Variation, against_first

WAYS = (DECODE, CHUNKED)
NOISE = "noise"  # is varied by the command alone: the same is computed again


@dataclass(frozen=True, slots=True)
class Feeding:
    """A way to feed windows that is compared with the prefill path."""

    kind: str  # one of WAYS
    size: int | None  # sequences side by side, or tokens of a chunk; None: the default of the decode path


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

    ``vary`` names the ways: ``decode`` and ``chunked`` (prefill of ``chunk_tokens`` at a time). ``sequences`` and
    ``chunk_tokens`` may be lists, in which each number is a candidate. ``arguments`` are those of a question and the
    engine's options. All runs are kept in ``out`` (``prefill``, ``decode-16``, …), else in the cache folder.

    >>> paths("table:uniform", text="any text", sequences=[1, 4])[1].kl.max()
    np.float64(0.0)
    """
    if isinstance(vary, Mapping) or vary == NOISE:
        raise OptionError("paths feeds a model in other ways", fix="use sm.noise(MODEL, vary=…) for the rest")
    if arguments.get("path") is not None:
        raise OptionError("paths measures both paths", fix="leave --path out")
    prefill_tokens = arguments.get("prefill_tokens")
    ways = _read_ways(vary, arguments.get("sequences"), chunk_tokens, prefill_tokens)
    rest = {name: value for name, value in arguments.items() if name not in ("path", "sequences", "prefill_tokens")}
    question, options = read_arguments(rest)
    question = question.with_text()
    place = Place.at(out, fresh=fresh, progress=progress)
    with closing(LazyModel.named(model, engine, options, tokenizer)) as lazy, closing(_for_prefill(lazy)) as prefill:
        for way in ways:
            require_path(lazy.plugin, way.kind, f"leave {way.kind} out of --vary")
        first = Variation({}, "", prefill, prefill.ask(question, progress))
        _require_sizes(first, ways)
        fed = replace(question, path=DECODE, prefill_tokens=prefill_tokens)
        others, last = dict[Feeding, Variation](), first
        # an engine that was opened for many sequences may also feed fewer
        for way in sorted(ways, key=lambda way: -(way.size or SEQUENCES) if way.kind == DECODE else 0):
            others[way] = last = last.sharing_start(_variation(first, lazy, way, fed, progress))
        run = _prefilled(first, list(others.values()), question, place)
        if not is_by_logits(first.model.plugin):
            first.model.close()  # its memory is needed
        comparisons: dict[Feeding, Comparison] = {}
        for shared, alike in itertools.groupby(others.items(), lambda item: item[1].model):
            with closing(shared):
                for way, other in alike:
                    announce(progress, way.kind, "label")
                    comparisons[way] = against_first(first, run, other, place)
        return Comparisons(comparisons[way] for way in ways)


def _read_ways(vary: str | Sequence[str], sequences: Any, chunk_tokens: Any, prefill_tokens: Any) -> list[Feeding]:
    """Reads the ways that a user named and the numbers of each; each number is a way of its own."""
    kinds = [vary] if isinstance(vary, str) else list(vary)
    for kind in kinds:
        if kind not in WAYS:
            raise OptionError(f"there is no way '{kind}' to feed a model", fix=did_you_mean(str(kind), WAYS))
    if not kinds:
        raise OptionError("there is nothing to compare with prefill", fix=f"give --vary {DECODE}")
    needs = {"sequences": DECODE, "prefill_tokens": DECODE, "chunk_tokens": CHUNKED}
    for (name, kind), value in zip(needs.items(), (sequences, prefill_tokens, chunk_tokens), strict=True):
        if value is not None and kind not in kinds:
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(f"{flag} belongs to {kind}", fix=f"add {kind} to --vary, or leave {flag} out")
    of_chunks = "chunk_tokens", chunk_tokens, CHUNK_TOKENS
    ways = list[Feeding]()
    for kind in kinds:
        name, value, default = ("sequences", sequences, None) if kind == DECODE else of_chunks
        ways += [Feeding(kind, size) for size in _numbers(name, value)] or [Feeding(kind, default)]
    for way in ways:
        if way.kind == DECODE:  # refused before a text is read
            read_path(DECODE, sequences=way.size, prefill_tokens=prefill_tokens)
    return list(dict.fromkeys(ways))


def _numbers(name: str, value: Any) -> list[int]:
    """Reads one number or several; an empty list if none was given."""
    numbers: list[int] = [] if value is None else value if isinstance(value, list) else [value]
    if any(number < 1 for number in numbers):
        raise OptionError(f"--{name.replace('_', '-')} {min(numbers)} is less than 1", fix="give 1 or more")
    return numbers


def _require_sizes(first: Variation, ways: Sequence[Feeding]) -> None:
    """Refuses chunks that would hold the longest window, before anything is loaded."""
    sizes = [way.size for way in ways if way.kind != DECODE and way.size is not None]
    longest = int(first.asked.plan.lengths.max())
    if max(sizes, default=0) >= longest:
        raise OptionError(
            f"a window of {longest} tokens is not cut into chunks of {max(sizes)}",
            fix=f"give --chunk-tokens {max(1, longest // 4)}, or a larger --context-length",
        )


# ── the variations ───────────────────────────────────────────────────────────────────────────────────────────────────
def _for_prefill(model: LazyModel) -> LazyModel:
    """Returns a model without options that only the decode path reads: itself if it has none of them."""
    options = model.chosen.options
    only = [name for name in options.given() if options.known()[name].details.path == DECODE]
    return model.with_options(replace(options, **dict.fromkeys(only))) if only else model


def _variation(
    first: Variation, decodes: LazyModel, way: Feeding, question: Question, progress: Progress | None
) -> Variation:
    """The model as it is fed in another way, with an engine of its own."""
    model, full_question, size = first.model, first.asked, way.size
    if way.kind == DECODE:
        model = decodes.with_options(decodes.chosen.options)
        full_question = model.ask(replace(question, sequences=way.size), progress)
        size = full_question.plan.path.sequences if full_question.plan.path else None
    elif way.size is not None:
        model = model.with_options(model.plugin.chunked(model.chosen.options, way.size))
    return Variation({way.kind: size}, f"{way.kind} against prefill", model, full_question)


def _prefilled(first: Variation, others: Sequence[Variation], question: Question, place: Place) -> Run:
    def tell(_: PlannedQuestion, claim: Claim) -> None:
        missing = [other for other in others if not other.has_run(place, claim.identity)]
        tell_starts([*([] if claim.finished else [("prefill", first.model)]), *((m.name, m.model) for m in missing)])

    if first.model.plugin.able().hidden_states:
        return reference_of(first.model, question, place.within("prefill"), tell=tell)
    return first.model.score(question, place.within("prefill"))
