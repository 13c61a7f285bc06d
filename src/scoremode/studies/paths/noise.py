"""How far scores move when only the settings of the engine do: one plan, scored under each of them.

settings ──product──▶ Variation ──score, repeat times──▶ logprobs ──minus the reference──▶ Drift

Nothing is read from the cache: a stored run would hide exactly what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Unpack

import numpy as np

from scoremode.core import strict_json
from scoremode.core.engine.base import EngineFacts
from scoremode.core.engine.registry import all_options, require_path
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.question import Question
from scoremode.core.scores.frames import few_lines
from scoremode.core.statistics.estimate import finite_or_none
from scoremode.core.store.run import Run
from scoremode.core.verbs.arguments import (
    AllArguments,
    read_arguments,
    spelled_out,
)
from scoremode.core.verbs.cache_types import combinations
from scoremode.core.verbs.model import GivenModel, GivenTokenizer, LazyModel, tell_starts
from scoremode.core.verbs.progress import Progress, part_of, shows_progress
from scoremode.core.verbs.run_contents import describe_engine
from scoremode.core.verbs.scoring import check_fits
from scoremode.core.verbs.session import Model
from scoremode.errors import OptionError, did_you_mean
from scoremode.reports.table import Block, Cell, Column, Note, Row, Table, words
from scoremode.reports.text import counted
from scoremode.studies.paths.variation import Variation
from scoremode.values import Floats, change, rounded

QUANTILE = 0.999
SAME_BITS = {"max_num_batched_tokens"}  # settings that move no score of an engine that promises equal bits

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
        names = {f"{prefix}_{name}".replace(f"{prefix}_sequence", f"sequence_{prefix}"): name for name in asdict(self)}
        return {key: finite_or_none(getattr(self, name)) for key, name in names.items()}


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
    """How much the scores of one plan move under every setting, compared with the first setting."""

    model: str
    corpus: str
    plan: Plan
    repeat: int
    sequences: str  # what counts as a whole sequence: "documents" or "windows"
    settings: tuple[SettingNoise, ...]

    def __repr__(self) -> str:
        widest = max(s.drift.max for s in self.settings)
        return few_lines(
            f"Noise of {self.model} on {self.corpus}, {self.plan.targets:,} targets by {self.plan.method}",
            f"settings: {len(self.settings)}, passes: {self.repeat}; largest drift {rounded(widest)[0]} nats",
        )

    def as_json(self) -> list[dict[str, Any]]:
        """One object per setting, in nats per target (per sequence if the name says so); what is not finite is None."""
        return [
            {
                "settings": {_flag(name): value for name, value in s.settings.items()},
                **s.drift.as_json("drift"),
                "perplexity": finite_or_none(s.perplexity),
                "perplexity_ratio": finite_or_none(s.perplexity_ratio),
                **(s.repeats.as_json("repeat_drift") if s.repeats else {}),
                **({"promise": s.promise} if s.promise else {}),
                **describe_engine(s.facts),
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
    model: GivenModel | Model,
    *,
    vary: Mapping[str, str | Sequence[str | float | bool]] | None = None,
    repeat: int = 2,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> Noise:
    """Score one plan under every combination of the settings in ``vary``, ``repeat`` times each.

    ``vary`` names ``engine`` or any option of an engine, with its values; the first value of each makes the reference.
    ``arguments`` are those of a question and the engine's options, and hold for every setting. An open model has one.

    >>> import scoremode as sm
    >>> sm.noise("table:uniform", text="any text").settings[0].repeats.max
    0.0
    """
    question, options = read_arguments(arguments)
    question = question.with_text()
    if isinstance(model, Model):
        given = {**options, "vary": vary, "engine": engine, "tokenizer": tokenizer}
        return _noise_of(model, question, given, repeat, progress)
    settings = read_settings(vary or {})
    if repeat == 1 and len(settings) == 1:
        raise OptionError("there is nothing to compare", fix="give --vary dtype=float32,bfloat16, or --repeat 2")
    for name in settings[0]:
        if {"engine": engine, **options}.get(name) not in (None, False):
            raise OptionError(f"--{_flag(name)} is given and varied", fix=f"leave --{_flag(name)} out")
    models = []
    for setting in settings:  # what an engine would refuse is refused here, before any is opened
        model_options = {**options, **{name: value for name, value in setting.items() if name != "engine"}}
        models.append(LazyModel.named(model, setting.get("engine", engine), model_options, tokenizer))
        require_path(models[-1].plugin, question.path)
        models[-1].settings()
    full_question = models[0].ask(question, progress)
    pairs = zip(settings, models, strict=True)
    varied = [Variation(setting, _change(settings[0], setting), lazy, full_question) for setting, lazy in pairs]
    return _measured(varied, repeat, progress)


def _noise_of(
    model: Model, question: Question, options: Mapping[str, Any], repeat: int, progress: Progress | None
) -> Noise:
    """How far scores of an open model move from pass to pass."""
    if any(value is not None for value in options.values()):
        raise OptionError("an open model has one setting", fix="give its name to vary it, as in sm.noise(NAME, vary=…)")
    with model._asking():
        variation = Variation({}, "", model._model, model._model.ask(question, progress))
        return _measured([variation], repeat, progress, keep_open=True)


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def may_vary() -> dict[str, str]:
    """Everything that may be varied, and the kind of its values."""
    options = {name: option.kind for name, (_, option) in all_options().items() if option.details.may_vary}
    return {"engine": "str", **options}


def parse_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parses ``batch-tokens=512,2048`` and others into names and values. The engine's options check the values.

    >>> parse_vary(["batch-tokens=512,2048"])
    {'batch_tokens': [512, 2048]}
    """
    vary = dict[str, list[Any]]()
    for text in texts:
        flag, _, values = text.partition("=")
        name, value_texts = _known_name(flag), [value.strip() for value in values.split(",")]
        vary.setdefault(name, []).extend(value_texts if may_vary()[name] == "str" else map(_number, value_texts))
    return vary


def _number(text: str) -> Any:
    """A number, true or false; other text as it is, which an option refuses."""
    try:
        return strict_json.parse(text)
    except ValueError:
        return text


def _known_name(flag: str) -> str:
    """A flag as the name of an engine's option, or ``engine``; an error for names that are not worth varying."""
    name = flag.strip().removeprefix("--").replace("-", "_")
    if name not in may_vary():
        fix = did_you_mean(_flag(name), map(_flag, may_vary()))
        raise OptionError(f"--vary {flag} is not a setting to compare", fix=fix)
    return name


def read_settings(vary: Mapping[str, str | Sequence[Any]]) -> list[Setting]:
    """All combinations of the values in ``vary``; refuses names and lists of values that cannot be varied."""
    lists = {_known_name(flag): [values] if isinstance(values, str) else list(values) for flag, values in vary.items()}
    for name, values in lists.items():
        if not values or "" in values or len(set(values)) < len(values):
            message = f"--vary {_flag(name)} lacks a value, or has one twice"
            raise OptionError(message, fix=f"give --vary {_flag(name)}=A,B, or --repeat N to score one setting N times")
    return combinations(lists)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _change(first: Setting, setting: Setting) -> str:
    """What differs from the first setting, in words, if it moves no score of an engine that promises equal bits."""
    changed = sorted(name for name in setting if setting[name] != first[name])
    description = ", ".join(f"{_flag(name)} {setting[name]} instead of {first[name]}" for name in changed)
    return description if SAME_BITS.issuperset(changed) else ""


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _measured(
    variations: Sequence[Variation], repeat: int, progress: Progress | None, *, keep_open: bool = False
) -> Noise:
    """Scores each variation ``repeat`` times. Its engine is closed before the next one opens, unless it stays open."""
    if repeat < 1:
        raise OptionError(f"--repeat {repeat} scores nothing", fix="give --repeat 2")
    question, plan, settings = variations[0].asked, variations[0].asked.plan, list[SettingNoise]()
    check_fits(plan, question.subject.vocabulary, question.subject.context_length)
    tokens = plan.forward_tokens
    reference: Run | None = None
    tell_starts((variation.name, variation.model) for variation in variations)
    for variation in variations:
        begun = [(len(settings) * repeat + number) * tokens for number in range(repeat)]
        parts = [part_of(progress, before, len(variations) * repeat * tokens) for before in begun]
        try:
            runs = [variation.score(progress, part) for part in parts]
            facts = variation.engine(progress).facts
        finally:
            if not keep_open:
                variation.close()
        reference = runs[0] if reference is None else reference
        settings.append(_setting_noise(variation, facts, runs, reference))
    return Noise(question.subject.name, question.corpus.name, plan, repeat, _sequences(plan)[0], tuple(settings))


def _setting_noise(variation: Variation, facts: EngineFacts, runs: Sequence[Run], reference: Run) -> SettingNoise:
    plan, (first, *later) = variation.asked.plan, [run.scores.logprob for run in runs]
    expected, usual, perplexity = reference.scores.logprob, reference.perplexity.value, runs[0].perplexity.value
    promises = [variation.kept_promise(change(first, expected), variation.change)] if variation.change else []
    if later:
        promises.append(variation.kept_promise(np.concatenate([change(each, first) for each in later]), "a later pass"))
    return SettingNoise(
        settings=dict(variation.settings),
        facts=facts,
        perplexity=perplexity,
        perplexity_ratio=perplexity / usual if math.isfinite(usual) else math.nan,
        drift=drift(plan, first, expected),
        repeats=_widest([drift(plan, each, first) for each in later]) if later else None,
        promise="; ".join(filter(None, promises)),
    )


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
    largest = {name: max(getattr(d, name) for d in drifts) for name in asdict(drifts[0])}
    return Drift(**{**largest, "mean": math.fsum(d.mean for d in drifts) / len(drifts)})


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────
def noise_blocks(noise: Noise) -> list[Block]:
    settings, plan = noise.settings, noise.plan
    corner = ", ".join(map(_flag, settings[0].settings)) or "setting"
    values = [["default" if value is None else str(value) for value in s.settings.values()] for s in settings]
    rows = [Row(", ".join(texts) or s.facts.engine) for texts, s in zip(values, settings, strict=True)]

    def sizes(title: str, name: str, *, of: str = "drift", sign: str = "") -> Column:
        drifts = [getattr(s, of) for s in settings]
        return Column(title, [Cell("–" if d is None else _size(getattr(d, name), sign)) for d in drifts])

    drift = [
        words("head", [s.facts.head for s in settings]),
        sizes("mean", "mean", sign="+"),
        *map(sizes, ("mean |d|", "rms", "99.9%", "max"), ("mean_abs", "rms", "p999", "max")),
    ]
    ratios = [s.perplexity_ratio for s in settings]
    rest = [
        Column("perplexity", [Cell(f"{s.perplexity:,.5f}") for s in settings]),
        Column("ratio", [Cell(f"{ratio:.6f}" if math.isfinite(ratio) else "–") for ratio in ratios]),
        *map(sizes, ("seq. rms", "seq. max"), ("sequence_rms", "sequence_max")),
        *(sizes(f"repeat {name}", name, of="repeats") for name in ("rms", "max")),
    ]
    second = f"perplexity; drift of whole {noise.sequences}; drift of the same setting when repeated"
    scored = f"{counted(plan.targets, 'targets')} in {counted(len(plan), 'windows')} of {noise.corpus}"
    about = f"{scored}, {noise.model}; {noise.repeat} {'pass' if noise.repeat == 1 else 'passes'}"
    return [
        Table(rows, drift, "drift of log-probabilities against the first setting, nats per target", corner),
        "",
        Table(rows, rest, second, corner),
        "",
        *(Note(s.promise, "red" if "finding:" in s.promise else "") for s in settings if s.promise),
        *(Note(note, "yellow") for note in plan.notes),
        Note(about, "dim"),
    ]


def _size(value: float, sign: str = "") -> str:
    return "0" if value == 0 else "unbounded" if not math.isfinite(value) else f"{value:{sign}.2e}"
