"""How far scores move when only the settings of the engine do: one plan, scored under each of them.

settings ──product──▶ engine opened ──score, repeat times──▶ logprobs ──minus the reference──▶ Drift

Nothing is read from the cache: a stored run would hide exactly what is measured.
"""

from __future__ import annotations

import gc
import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from scoremode.engines.base import Engine, EngineFacts
from scoremode.engines.plugin import Work
from scoremode.engines.registry import all_options
from scoremode.errors import OptionError, did_you_mean
from scoremode.plan.plan import Plan
from scoremode.scores.columns import Scores
from scoremode.scores.journal import Journal
from scoremode.statistics.estimate import finite_or_none
from scoremode.statistics.run import all_metrics
from scoremode.values import Floats
from scoremode.verbs.arguments import AllArguments, spelled_out
from scoremode.verbs.model import HeldModel, hold
from scoremode.verbs.progress import Progress
from scoremode.verbs.question import Question, library_versions, split_arguments
from scoremode.verbs.scoring import check_fits, score_plan

QUANTILE = 0.999
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

Setting = dict[str, Any]
"""``engine`` or names of options -> the value of this setting; None is the engine's own choice."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Differences of log-probabilities in nats, other minus reference. Infinite if either probability is zero."""

    mean: float  # per target, signed: the change that perplexity shows
    mean_abs: float
    rms: float
    p999: float  # the smallest |d| that 99.9% of the targets do not exceed: the maximum below 1,000 targets
    max: float
    sequence_rms: float  # of whole documents, else windows: their targets' differences added up
    sequence_max: float

    def as_json(self, prefix: str) -> dict[str, float | None]:
        return {_key(prefix, name): finite_or_none(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class SettingNoise:
    """One setting: what it gave, how far from the reference, how far from itself."""

    settings: Setting
    facts: EngineFacts
    perplexity: float
    perplexity_ratio: float  # to the reference's
    drift: Drift  # first pass against the first pass of the reference
    repeats: Drift | None  # later passes against the first; None if there was one pass


@dataclass(frozen=True, slots=True)
class Noise:
    """Every setting of one plan; the first is the reference."""

    model: str
    corpus: str
    plan: Plan
    repeat: int
    sequences: str  # what counts as a whole sequence: "documents" or "windows"
    settings: tuple[SettingNoise, ...]

    def as_json(self) -> list[dict[str, Any]]:
        """One object per setting, in nats per target (per sequence if the name says so); what is not finite is None."""
        shared = {
            "model": self.model,
            "corpus": self.corpus,
            "plan_digest": self.plan.digest,
            "targets": self.plan.targets,
            "sequences": self.sequences,
            "repeat": self.repeat,
        }
        return [{**self._described(s), **shared, "reference": s is self.settings[0]} for s in self.settings]

    def _described(self, s: SettingNoise) -> dict[str, Any]:
        return {
            "settings": {name.replace("_", "-"): value for name, value in s.settings.items()},
            **s.drift.as_json("drift"),
            "perplexity": finite_or_none(s.perplexity),
            "perplexity_ratio": finite_or_none(s.perplexity_ratio),
            **(s.repeats.as_json("repeat_drift") if s.repeats else {}),
            "engine": s.facts.engine,
            "dtype": s.facts.dtype,
            "device": s.facts.device,
            "head": s.facts.head,
            "engine_settings": s.facts.settings,
            "versions": {**library_versions(s.facts.engine), **s.facts.versions},
        }


def _key(prefix: str, name: str) -> str:
    """``drift_max`` of a target, ``sequence_drift_max`` of a sequence."""
    if name.startswith("sequence_"):
        return f"sequence_{prefix}_{name.removeprefix('sequence_')}"
    return f"{prefix}_{name}"


@spelled_out(AllArguments)
def noise(
    model: str,
    *,
    vary: Mapping[str, Sequence[Any]] | None = None,
    repeat: int = 2,
    engine: str | None = None,
    tokenizer: str | None = None,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> Noise:
    """Score one plan under every combination of the settings in ``vary``, ``repeat`` times each.

    ``vary`` names ``engine`` or any option of an engine, with its values; the first value of each makes the reference.
    ``arguments`` are those of a question and the engine's options, and hold for every setting.

    >>> import scoremode as sm
    >>> sm.noise("table:uniform", text="any text").settings[0].repeats.max
    0.0
    """
    question, options = split_arguments(arguments)
    settings = combinations(vary or {})
    _require_something_to_compare(vary or {}, repeat, engine, options)
    prepared = [_prepare(model, setting, engine, options, tokenizer) for setting in settings]
    asked = prepared[0].ask(question, progress)
    check_fits(asked.plan, asked.subject.vocabulary, asked.subject.context_length)
    return noise_of(asked, settings, prepared, repeat, progress)


def noise_of(
    asked: Question,
    settings: Sequence[Setting],
    prepared: Sequence[HeldModel],
    repeat: int,
    progress: Progress | None = None,
    *,
    keep_open: bool = False,
) -> Noise:
    """One question under settings whose models are held; each is closed before the next is opened."""
    parts = _Parts(progress, len(settings) * repeat)
    found: list[SettingNoise] = []
    reference: Scores | None = None
    for setting, held in zip(settings, prepared, strict=True):
        facts, passes = _score(asked, held, repeat, parts, keep_open=keep_open)
        reference = passes[0] if reference is None else reference
        found.append(_compare(asked, setting, facts, passes, reference))
    return Noise(asked.subject.name, asked.corpus.name, asked.plan, repeat, _sequences(asked.plan)[0], tuple(found))


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def parse_vary(text: str) -> tuple[str, list[Any]]:
    """``batch-tokens=512,2048`` -> the option's name, and the values in their type.

    >>> parse_vary("batch-tokens=512,2048")
    ('batch_tokens', [512, 2048])
    """
    flag, equals, values = text.partition("=")
    name = known_name(flag)
    given = [value.strip() for value in values.split(",")]
    if not equals or not all(given):
        example = "1,2" if _kind(name) == "int" else "A,B"
        raise OptionError(f"--vary {text} lacks a value", fix=f"give --vary {_flag(name)}={example}")
    return name, [_typed(name, value) for value in given]


def may_vary() -> list[str]:
    """What can be varied: the engine, and options that are worth comparing."""
    return ["engine", *(name for name, (_, option) in all_options().items() if option.details.may_vary)]


def known_name(flag: str) -> str:
    """A name to vary, as the engines' options have it; an error for anything else."""
    name = flag.strip().removeprefix("--").replace("-", "_")
    fixed = {name: option.flag for name, (_, option) in all_options().items() if not option.details.may_vary}
    of_flags = {flag.removeprefix("--").replace("-", "_"): flag for flag in fixed.values()}
    if name in fixed or name in of_flags:
        given = fixed.get(name) or of_flags[name]
        raise OptionError(
            f"--vary {_flag(name)} is not a setting to compare", fix=f"give {given} once: it applies to all"
        )
    if name not in may_vary():
        raise OptionError(f"--vary does not know '{flag}'", fix=did_you_mean(_flag(name), map(_flag, may_vary())))
    return name


def _kind(name: str) -> str:
    return "str" if name == "engine" else all_options()[name][1].kind


def _choices(name: str) -> tuple[str, ...] | None:
    return None if name == "engine" else all_options()[name][1].details.choices


def combinations(vary: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """The product of all values, the first of each first."""
    named: dict[str, list[Any]] = {}
    for flag, values in vary.items():
        name, listed = known_name(flag), [values] if isinstance(values, str) else list(values)
        if name in named:
            raise OptionError(f"--vary {_flag(name)} is given twice", fix=f"put all its values in one --vary {flag}=…")
        if not listed:
            raise OptionError(f"--vary {_flag(name)} lacks a value", fix=f"give --vary {_flag(name)}=A,B")
        if len(set(listed)) < len(listed):
            raise OptionError(f"--vary {_flag(name)} has a value twice", fix="--repeat N scores one setting N times")
        for value in listed:
            if (choices := _choices(name)) is not None and value not in choices:
                raise OptionError(f"--vary {_flag(name)}={value} is not known", fix=did_you_mean(value, choices))
        named[name] = listed
    return [dict(zip(named, chosen, strict=True)) for chosen in itertools.product(*named.values())]


def _typed(name: str, value: str) -> Any:
    readers: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": _boolean}
    try:
        return readers.get(_kind(name), str)(value)
    except (ValueError, KeyError):
        kinds = {"int": "a whole number", "float": "a number", "bool": "true or false"}
        raise OptionError(f"--vary {_flag(name)}={value} is not {kinds[_kind(name)]}", fix="give another") from None


def _boolean(value: str) -> bool:
    return BOOLEANS[value.lower()]


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _require_something_to_compare(
    vary: Mapping[str, Sequence[Any]], repeat: int, engine: str | None, options: Mapping[str, Any]
) -> None:
    if repeat < 1:
        raise OptionError(f"--repeat {repeat} scores nothing", fix="give --repeat 2")
    if repeat == 1 and all(len(values) == 1 for values in vary.values()):
        raise OptionError("there is nothing to compare", fix="give --vary dtype=float32,bfloat16, or --repeat 2")
    fixed = {name for name, value in options.items() if value is not None and value is not False} | (
        {"engine"} if engine else set()
    )
    for flag in vary:
        name = known_name(flag)
        if name in fixed:
            raise OptionError(f"--{_flag(name)} is given and varied", fix=f"leave --{_flag(name)} out")


def prepare_settings(
    held: HeldModel, vary: Mapping[str, Sequence[Any]], settings: Sequence[Setting], repeat: int, tokenizer: str | None
) -> list[HeldModel]:
    """The model of a session under each setting, in addition to its own options."""
    options = {**held.chosen.options.given(), **(held.spread.given() if held.spread else {})}
    _require_something_to_compare(vary, repeat, None, options)
    engine = None if "engine" in vary else held.plugin.called
    return [_prepare(held.subject.name, setting, engine, options, tokenizer) for setting in settings]


def _prepare(
    model: str, setting: Setting, engine: str | None, options: Mapping[str, Any], tokenizer: str | None
) -> HeldModel:
    """The model under one setting; what its engine would refuse is refused here, before any is opened."""
    given = {**options, **{key: value for key, value in setting.items() if key != "engine"}}
    held = hold(model, setting.get("engine", engine), given, tokenizer)
    held.settings()
    return held


# ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class _Parts:
    """One progress over many passes of equal length."""

    def __init__(self, progress: Progress | None, passes: int) -> None:
        self.progress, self.passes, self.finished = progress, passes, 0

    def __call__(self, done: int, total: int) -> None:
        if self.progress:
            self.progress(self.finished * total + done, self.passes * total)


def _score(
    asked: Question, held: HeldModel, repeat: int, parts: _Parts, *, keep_open: bool
) -> tuple[EngineFacts, list[Scores]]:
    """Every pass of one setting on one engine; the engine is gone when this returns, unless it is to be kept open."""
    try:
        worker = held.engine(Work(longest=int(asked.plan.lengths.max())), parts.progress)
        check_fits(asked.plan, worker.facts.vocabulary, worker.facts.context_length)
        passes = []
        for _ in range(repeat):
            passes.append(_once(asked.plan, worker, parts))
            parts.finished += 1
        return worker.facts, passes
    finally:
        if not keep_open:
            held.close()
            worker = None  # type: ignore[assignment]
            _give_memory_back()


def _once(plan: Plan, worker: Engine, parts: _Parts) -> Scores:
    with tempfile.TemporaryDirectory(prefix="scoremode-noise-") as folder:
        journal = Journal(Path(folder) / "journal", {}, plan, worker.facts.schema)
        try:
            score_plan(plan, worker, journal, parts)
            return journal.rows(0, plan.targets)
        finally:
            journal.close()


def _give_memory_back() -> None:
    """The next engine may live in other processes and must find the device empty."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _compare(
    asked: Question, setting: Setting, facts: EngineFacts, passes: list[Scores], reference: Scores
) -> SettingNoise:
    perplexity, of_reference = (
        all_metrics(asked.plan, asked.tokens, scores)["perplexity"].value for scores in (passes[0], reference)
    )
    later = [drift(asked.plan, scores.logprob, passes[0].logprob) for scores in passes[1:]]
    return SettingNoise(
        settings=setting,
        facts=facts,
        perplexity=perplexity,
        perplexity_ratio=perplexity / of_reference if math.isfinite(of_reference) else math.nan,
        drift=drift(asked.plan, passes[0].logprob, reference.logprob),
        repeats=_widest(later) if later else None,
    )


def drift(plan: Plan, logprob: Floats, reference: Floats) -> Drift:
    """How far one pass over a plan lies from another."""
    with np.errstate(invalid="ignore"):
        d = np.where(logprob == reference, 0.0, logprob - reference)  # both minus infinity: the same
        sums: Floats = np.bincount(_sequences(plan)[1], weights=d).astype(np.float64)
    size = np.abs(d)
    return Drift(
        mean=float(d.mean()),
        mean_abs=float(size.mean()),
        rms=_rms(d),
        p999=float(np.quantile(size, QUANTILE, method="inverted_cdf")),
        max=float(size.max()),
        sequence_rms=_rms(sums),
        sequence_max=float(np.abs(sums).max()),
    )


def _sequences(plan: Plan) -> tuple[str, Any]:
    """What counts as a whole sequence, and the sequence of each target, 0, 1, …"""
    several = len(np.unique(plan.target_document)) > 1
    kind, index = ("documents", plan.target_document) if several else ("windows", plan.target_window)
    return kind, np.unique(index, return_inverse=True)[1]


def _widest(drifts: list[Drift]) -> Drift:
    """Of several passes against the first: the mean of means, the largest of everything else."""
    largest = {f.name: max(getattr(d, f.name) for d in drifts) for f in fields(Drift)}
    return Drift(**{**largest, "mean": math.fsum(d.mean for d in drifts) / len(drifts)})


def _rms(values: Floats) -> float:
    return math.sqrt(float(np.square(values).mean()))
