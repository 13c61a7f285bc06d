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
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from scoremode.core.engine.base import EngineFacts
from scoremode.core.engine.registry import all_options, require_path
from scoremode.core.plan.path import CACHE_HIT, CHUNK_TOKENS, DECODE, PATHS, PREFILL, read_path
from scoremode.core.plan.plan import Plan
from scoremode.core.scores.columns import Scores
from scoremode.core.scores.frames import few_lines
from scoremode.core.scores.journal import Journal
from scoremode.core.statistics.estimate import finite_or_none
from scoremode.core.statistics.run import all_metrics
from scoremode.core.verbs.arguments import (
    PATH,
    AllArguments,
    QuestionArguments,
    check_question,
    spelled_out,
    split_arguments,
)
from scoremode.core.verbs.model import GivenModel, GivenTokenizer, LazyModel
from scoremode.core.verbs.progress import Progress, part_of
from scoremode.core.verbs.progress_display import shows_progress
from scoremode.core.verbs.question import Question, library_versions
from scoremode.core.verbs.scoring import check_fits, score_plan
from scoremode.core.verbs.session import ModelMethod
from scoremode.errors import OptionError, did_you_mean
from scoremode.studies.paths.varied import Varied
from scoremode.values import Floats, change

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
        """The numbers by name: ``drift_max`` is of targets, ``sequence_drift_max`` of sequences."""
        named = {f"{prefix}_{name}".replace(f"{prefix}_sequence", f"sequence_{prefix}"): name for name in DRIFT}
        return {key: finite_or_none(getattr(self, name)) for key, name in named.items()}


DRIFT = tuple(field.name for field in fields(Drift))


@dataclass(frozen=True, slots=True)
class SettingNoise:
    """One setting: its perplexity, its drift from the reference, and the drift between its own repeats."""

    settings: Setting
    facts: EngineFacts
    perplexity: float
    perplexity_ratio: float  # to the reference's
    drift: Drift  # first pass against the first pass of the reference
    repeats: Drift | None  # later passes against the first; None if there was one pass
    promise: str  # whether a promise of equal bits was kept; '' if none was made


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of every setting on one plan; the first setting is the reference."""

    model: str
    corpus: str
    plan: Plan
    repeat: int
    sequences: str  # what counts as a whole sequence: "documents" or "windows"
    settings: tuple[SettingNoise, ...]

    def __repr__(self) -> str:
        widest = max((s.drift.max for s in self.settings), default=0.0)
        again = max((s.repeats.max for s in self.settings if s.repeats is not None), default=None)
        several = f"{len(self.settings)} settings, which differ by at most {widest:.3g} nats per target"
        return few_lines(
            f"Noise of {self.model} on {self.corpus}, {self.plan.targets:,} targets by {self.plan.method}",
            several if len(self.settings) > 1 else "",
            f"{self.repeat} passes, which differ by at most {again:.3g} nats" if again is not None else "",
        )

    def as_json(self) -> list[dict[str, Any]]:
        """One object per setting, in nats per target (per sequence if the name says so); what is not finite is None."""
        return [
            {
                "settings": {name.replace("_", "-"): value for name, value in s.settings.items()},
                **s.drift.as_json("drift"),
                "perplexity": finite_or_none(s.perplexity),
                "perplexity_ratio": finite_or_none(s.perplexity_ratio),
                **(s.repeats.as_json("repeat_drift") if s.repeats else {}),
                **({"promise": s.promise} if s.promise else {}),
                "engine": s.facts.engine,
                "dtype": s.facts.dtype,
                "device": s.facts.device,
                "head": s.facts.head,
                "engine_settings": s.facts.settings,
                "versions": {**library_versions(s.facts.engine), **s.facts.versions},
                "model": self.model,
                "corpus": self.corpus,
                "plan_digest": self.plan.digest,
                "targets": self.plan.targets,
                "sequences": self.sequences,
                "repeat": self.repeat,
                "reference": s is self.settings[0],
            }
            for s in self.settings
        ]


@spelled_out(AllArguments)
@shows_progress
def noise(
    model: GivenModel,
    *,
    vary: Mapping[str, Sequence[Any]] | None = None,
    repeat: int = 2,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> Noise:
    """Score one plan under every combination of the settings in ``vary``, ``repeat`` times each.

    ``vary`` names ``engine``, any option of an engine, ``path``, ``sequences`` or ``cache`` (``miss``, ``hit``), with
    its values; the first value of each makes the reference. ``arguments`` are those of a question and the engine's
    options, and hold for every setting.

    >>> import scoremode as sm
    >>> sm.noise("table:uniform", text="any text").settings[0].repeats.max
    0.0
    """
    rest, feeding = split_feeding(arguments)
    question, options = split_arguments(rest, needs_text=True)
    options |= {name: value for name, value in feeding.items() if name in (vary or {})}  # refused: it is varied
    models = prepare_settings(model, vary or {}, repeat, engine=engine, options=options, tokenizer=tokenizer)
    asked = models[0][1].ask(question, progress)
    check_fits(asked.plan, asked.subject.vocabulary, asked.subject.context_length)
    return noise_of(asked, models, repeat, progress, feeding=feeding)


@spelled_out(QuestionArguments)
@shows_progress
def noise_of_model(
    model: LazyModel,
    tokenizer: str | None,
    *,
    vary: Mapping[str, Sequence[Any]] | None = None,
    repeat: int = 2,
    progress: Progress | None = None,
    **question: Unpack[QuestionArguments],
) -> Noise:
    """``Model.noise``: how far scores move from pass to pass, or under each value of ``vary``.

    Settings other than the model's own need engines of their own: then its engine is closed first, and opens again with
    the next question.
    """
    rest, feeding = split_feeding(check_question(question, needs_text=True))
    asked = model.ask(rest, progress)
    check_fits(asked.plan, asked.subject.vocabulary, asked.subject.context_length)
    if not vary:
        return noise_of(asked, [({}, model)], repeat, progress, feeding=feeding, keep_open=True)
    if model.is_given:
        raise OptionError("vary needs a model that scoremode can open again", fix="use scoremode.open")
    model.close()
    engine = None if "engine" in vary else model.plugin.address or model.plugin.name
    options = {**model.chosen.options.given(), **(model.spread.given() if model.spread else {})}
    name = model.subject.name
    prepared = prepare_settings(name, vary, repeat, engine=engine, options=options, tokenizer=tokenizer)
    return noise_of(asked, prepared, repeat, progress, feeding=feeding)


NOISE_METHOD = ModelMethod("noise", noise_of_model)


def noise_of(
    asked: Question,
    models: Sequence[tuple[Setting, LazyModel]],
    repeat: int,
    progress: Progress | None = None,
    *,
    feeding: Mapping[str, Any] | None = None,
    keep_open: bool = False,
) -> Noise:
    """Asks a model one question under several settings; its engine is closed before the next setting opens one.

    ``asked`` is the question to the prefill path. ``feeding`` has the arguments of a path that hold for all settings.
    """
    varied = [_varied(asked, setting, feeding or {}, model) for setting, model in models]
    whole = len(models) * repeat * asked.plan.forward_tokens
    found: list[SettingNoise] = []
    reference: tuple[Floats, float] | None = None
    for (setting, _), one in zip(models, varied, strict=True):
        begun = [(len(found) * repeat + number) * asked.plan.forward_tokens for number in range(repeat)]
        parts = [part_of(progress, before, whole) for before in begun]
        facts, passes = _score(one, progress, parts, keep_open=keep_open)
        perplexity = all_metrics(asked.plan, asked.tokens, passes[0])["perplexity"].value
        first = passes[0].logprob
        expected, usual = reference = reference or (first, perplexity)
        later = [drift(asked.plan, scores.logprob, first) for scores in passes[1:]]
        found.append(
            SettingNoise(
                settings=setting,
                facts=facts,
                perplexity=perplexity,
                perplexity_ratio=perplexity / usual if math.isfinite(usual) else math.nan,
                drift=drift(asked.plan, first, expected),
                repeats=_widest(later) if later else None,
                promise=_promise(models[0][0], setting, one, expected, [scores.logprob for scores in passes]),
            )
        )
    return Noise(asked.subject.name, asked.corpus.name, asked.plan, repeat, _sequences(asked.plan)[0], tuple(found))


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────
FEEDING: dict[str, tuple[str, Sequence[str] | None]] = {  # how tokens are fed: the kind of value, and the choices
    "path": ("str", PATHS),
    "sequences": ("int", None),
    "cache": ("str", ("miss", "hit")),
}
SAME_BITS = {*FEEDING, "max_num_batched_tokens"}  # settings that move no score of an engine that promises equal bits


def split_feeding(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits arguments into those of the prefill path, and those of another path, which may differ by setting."""
    rest = {name: value for name, value in arguments.items() if name not in PATH}
    return rest, {name: value for name, value in arguments.items() if name in PATH}


def _varied(asked: Question, setting: Setting, feeding: Mapping[str, Any], model: LazyModel) -> Varied:
    """The model in a setting; an error if the engine does not have the path, or no prefix cache where hits are wanted.

    If the path is varied, what was given for the decode path does not apply to prefill.
    """
    given = {**feeding, **{name: value for name, value in setting.items() if name in PATH}}
    if setting.get("path") == PREFILL:
        given = {name: value for name, value in given.items() if name == "path" or name in setting}
    path, hits = read_path(**given), setting.get("cache") == "hit"
    require_path(model.plugin, DECODE if path else None)
    if hits:
        require_path(model.plugin, CACHE_HIT, "leave cache out of --vary")
        if path is not None:
            raise OptionError("a cache hit is measured on the prefill path", fix="leave --path out")
        model.shares_prompts = True
    return Varied(model, replace(asked, plan=asked.plan.on_path(path)), CHUNK_TOKENS if hits else None)


def _promise(first: Setting, setting: Setting, one: Varied, reference: Floats, passes: Sequence[Floats]) -> str:
    """Says whether an engine gave the same bits where it promises them; '' if it promises none."""
    said = []
    changed = {name for name in setting if setting[name] != first[name]}
    if changed and changed <= SAME_BITS:
        what = ", ".join(f"{_flag(name)} {setting[name]} instead of {first[name]}" for name in sorted(changed))
        said.append(one.kept_promise(change(passes[0], reference), what))
    if len(passes) > 1:
        again = np.concatenate([change(later, passes[0]) for later in passes[1:]])
        said.append(one.kept_promise(again, "a later pass"))
    return "; ".join(words for words in said if words)


def may_vary() -> dict[str, tuple[str, Sequence[str] | None]]:
    """Everything that may be varied: the kind of its values, and the choices."""
    options = {name: option for name, (_, option) in all_options().items() if option.details.may_vary}
    return {"engine": ("str", None), **FEEDING} | {n: (o.kind, o.details.choices) for n, o in options.items()}


def parse_vary(text: str) -> tuple[str, list[Any]]:
    """Parses ``batch-tokens=512,2048`` into the option's name and its values, in the option's type.

    >>> parse_vary("batch-tokens=512,2048")
    ('batch_tokens', [512, 2048])
    """
    flag, equals, values = text.partition("=")
    name = known_name(flag)
    kind = may_vary()[name][0]
    given = [value.strip() for value in values.split(",")]
    if not equals or not all(given):
        raise OptionError(
            f"--vary {text} lacks a value", fix=f"give --vary {_flag(name)}={'1,2' if kind == 'int' else 'A,B'}"
        )
    readers: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "bool": lambda v: BOOLEANS[v.lower()]}
    typed = []
    for value in given:
        try:
            typed.append(readers.get(kind, str)(value))
        except (ValueError, KeyError):
            wanted = {"int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
            raise OptionError(f"--vary {_flag(name)}={value} is not {wanted}", fix="give another") from None
    return name, typed


def known_name(flag: str) -> str:
    """A flag as the name of an engine's option, or ``engine``; an error for names that are not worth varying."""
    name = flag.strip().removeprefix("--").replace("-", "_")
    if name in may_vary():
        return name
    for other, (_, option) in all_options().items():
        if name in (other, option.flag.removeprefix("--").replace("-", "_")):
            fix = f"give {option.flag} once: it applies to all"
            raise OptionError(f"--vary {_flag(name)} is not a setting to compare", fix=fix)
    raise OptionError(f"--vary does not know '{flag}'", fix=did_you_mean(_flag(name), map(_flag, may_vary())))


def combinations(vary: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """All combinations of the values; the one of all first values comes first."""
    named: dict[str, list[Any]] = {}
    for flag, values in vary.items():
        name, listed = known_name(flag), [values] if isinstance(values, str) else list(values)
        choices = may_vary()[name][1]
        if name in named:
            raise OptionError(f"--vary {_flag(name)} is given twice", fix=f"put all its values in one --vary {flag}=…")
        if not listed:
            raise OptionError(f"--vary {_flag(name)} lacks a value", fix=f"give --vary {_flag(name)}=A,B")
        if len(set(listed)) < len(listed):
            raise OptionError(f"--vary {_flag(name)} has a value twice", fix="--repeat N scores one setting N times")
        for value in listed:
            if choices is not None and value not in choices:
                raise OptionError(f"--vary {_flag(name)}={value} is not known", fix=did_you_mean(value, choices))
        named[name] = listed
    return [dict(zip(named, chosen, strict=True)) for chosen in itertools.product(*named.values())]


def _flag(name: str) -> str:
    return name.replace("_", "-")


def prepare_settings(
    model: GivenModel,
    vary: Mapping[str, Sequence[Any]],
    repeat: int,
    *,
    engine: str | None,
    options: Mapping[str, Any],
    tokenizer: GivenTokenizer | None,
) -> list[tuple[Setting, LazyModel]]:
    """The model under each setting. Everything that an engine would refuse is refused here, before any is opened."""
    settings = combinations(vary)
    if repeat < 1:
        raise OptionError(f"--repeat {repeat} scores nothing", fix="give --repeat 2")
    if repeat == 1 and all(len(values) == 1 for values in vary.values()):
        raise OptionError("there is nothing to compare", fix="give --vary dtype=float32,bfloat16, or --repeat 2")
    fixed = {name for name, value in {"engine": engine, **options}.items() if value is not None and value is not False}
    for name in settings[0]:
        if name in fixed:
            raise OptionError(f"--{_flag(name)} is given and varied", fix=f"leave --{_flag(name)} out")
    found = []
    for setting in settings:
        own = {name: value for name, value in {**options, **setting}.items() if name not in ("engine", *FEEDING)}
        lazy = LazyModel.named(model, setting.get("engine", engine), own, tokenizer)
        lazy.settings()
        found.append((setting, lazy))
    return found


# ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _score(
    one: Varied, progress: Progress | None, parts: Sequence[Progress | None], *, keep_open: bool
) -> tuple[EngineFacts, list[Scores]]:
    """Score every pass of one setting on one engine, which is closed afterwards unless it is to be kept open.

    ``parts`` has the progress of each pass.
    """
    plan, passes = one.asked.plan, []
    try:
        engine = one.model.engine_for(one.asked, progress)
        check_fits(plan, engine.facts.vocabulary, engine.facts.context_length)
        for part in parts:
            with (
                tempfile.TemporaryDirectory(prefix="scoremode-noise-") as folder,
                closing(Journal(Path(folder) / "journal", {}, plan)) as journal,
            ):
                fed = one.fed(engine)
                score_plan(plan, fed, journal, part)
                fed.account()  # an error if no turn began in the cache
                passes.append(journal.rows(0, plan.targets))
        return engine.facts, passes
    finally:
        if not keep_open:
            one.model.close()
            engine = fed = None  # type: ignore[assignment]
            gc.collect()  # the next engine may live in other processes and must find the device empty
            if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
                torch.cuda.empty_cache()


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def drift(plan: Plan, logprob: Floats, reference: Floats) -> Drift:
    """How far the scores of one pass over a plan lie from another's."""
    d = change(logprob, reference)
    with np.errstate(invalid="ignore"):
        sums: Floats = np.bincount(_sequences(plan)[1], weights=d).astype(np.float64)
    size = np.abs(d)
    return Drift(
        mean=float(d.mean()),
        mean_abs=float(size.mean()),
        rms=math.sqrt(np.square(d).mean()),
        p999=float(np.quantile(size, QUANTILE, method="inverted_cdf")),
        max=float(size.max()),
        sequence_rms=math.sqrt(np.square(sums).mean()),
        sequence_max=float(np.abs(sums).max()),
    )


def _sequences(plan: Plan) -> tuple[str, Any]:
    """What a sequence is here (documents or windows), and the number of each target's sequence: 0, 1, …"""
    several = len(np.unique(plan.target_document)) > 1
    kind, index = ("documents", plan.target_document) if several else ("windows", plan.target_window)
    return kind, np.unique(index, return_inverse=True)[1]


def _widest(drifts: list[Drift]) -> Drift:
    """Combines the drifts of several passes from the first: the mean of their means, the largest of all else."""
    largest = {name: max(getattr(d, name) for d in drifts) for name in DRIFT}
    return Drift(**{**largest, "mean": math.fsum(d.mean for d in drifts) / len(drifts)})
