"""Trainer against rollout: sampled tokens, with their log-probabilities under both.

In reinforcement learning one engine samples (the rollout, π) and another computes gradients (the trainer, τ). For each
sampled token, r = τ(token) / π(token) is its importance ratio. docs/rollouts.md has the formulas, and says what they
are of texts that were drawn with a temperature or a filter. Errors are over prompts: the samples of one are alike.

rollouts ──ids──▶ trainer: a name, sm.open, sm.wrap ──prefill──▶ log-probabilities ──▶ Mismatch
                  or a finished run on the rollouts, by any path, with KL if it was compared with their writer
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from scoremode.core.scores.answers import measured
from scoremode.core.scores.frames import ArrowTable, few_lines
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.statistics.depth import depth_edges
from scoremode.core.statistics.estimate import quantiles
from scoremode.core.statistics.statistic import (
    PlainStatistic,
    Statistic,
    computed,
    estimates,
    fields_from,
    fields_of,
    plain,
)
from scoremode.core.store.run import Run
from scoremode.core.typed import typed
from scoremode.core.verbs.arguments import ModelArguments, spelled_out
from scoremode.core.verbs.model import GivenModel, GivenTokenizer
from scoremode.core.verbs.progress import Progress, shows_progress
from scoremode.core.verbs.session import Model, open
from scoremode.errors import InputError
from scoremode.reports.gate import check, parse
from scoremode.reports.text import too_few
from scoremode.studies.rollouts.texts import Rollouts
from scoremode.values import Bools, Estimate, Floats, Ints

COLUMNS = ("rollout", "trainer", "prompt", "sample", "position")  # one entry per token
CLIP = (0.8, 1.2)  # ratios inside are not clipped by PPO's usual range
QUANTILES = {"min": 0.0, "p01": 0.01, "p05": 0.05, "median": 0.5, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0}
SAME = 1e-3  # nats: a token's two log-probabilities differ by more if it was drawn from a changed distribution
NOT_OWN = "texts were drawn with a temperature or filters: k1, k2 and k3 are means over them, not estimates of KL"
EXAMPLE = "write a rule such as 'k3 > 0.015 surely' or 'outside_clip > 0.01'"


@dataclass(frozen=True, eq=False)
class Ratios:
    """Importance ratios of tokens, or of whole samples: products of the ratios of their tokens."""

    log: Floats  # (n,) ln r; -∞ where the trainer thinks a sampled token impossible
    groups: Ints  # (n,) the prompt, numbered from 0
    clip: tuple[float, float]
    kl: Floats | None = None  # (n,) of tokens, if it was measured

    @property
    def outside_clip(self) -> Floats:
        low, high = map(math.log, self.clip)
        return ((self.log < low) | (self.log > high)).astype(np.float64)

    @cached_property
    def quantiles(self) -> dict[str, float]:
        return quantiles(np.exp(self.log), QUANTILES)


def _quantiles(prefix: str, rows: str) -> tuple[Statistic, ...]:
    def quantile(name: str) -> Statistic:
        return plain(f"{prefix}ratio_{name}", "a quantile of r", lambda ratios: ratios.quantiles[name], rows=rows)

    return tuple(map(quantile, QUANTILES))


def _outside_clip(rows: str) -> Statistic:
    return Statistic(about="share outside of the clip range", mean=lambda r: r.outside_clip, rows=rows, range="share")


def _effective(prefix: str, rows: str) -> PlainStatistic:
    about = "the share of samples that would be left after weighting by r"
    return plain(f"{prefix}effective_sample_size", about, lambda ratios: effective_share(ratios.log), rows=rows)


COUNTS = (
    plain("tokens", "sampled tokens", lambda m: len(m.rollout)),
    plain("samples", "texts that were sampled", lambda m: len(m.samples.log)),
    plain("prompts", "prompts with a token", lambda m: len(np.unique(m.samples.groups))),
    plain("zero_probability", "tokens that the trainer thinks impossible", lambda m: int(np.isneginf(m.trainer).sum())),
    plain("kl_infinite", "tokens with infinite KL", lambda m: int(np.isinf(m.kl).sum()), needs="kl"),
)


@dataclass(frozen=True, eq=False)
class Mismatch(ArrowTable):
    """Sampled tokens under a rollout engine and a trainer. As a table, it has one row per token."""

    rollout: Floats  # (n,) log-probability of each token under the engine that sampled it
    trainer: Floats  # (n,) under the trainer
    prompt: Ints  # (n,) which prompt
    sample: Ints  # (n,) which sample of the prompt
    position: Ints  # (n,) place in the written text, from 0
    slices: npt.NDArray[np.object_] | None = None  # (n,) labels of tokens; None: the texts have no slices
    kl: Floats | None = None  # (n,) nats, KL(rollout‖trainer) over the whole vocabulary; None: not measured
    clip: tuple[float, float] = CLIP
    names: tuple[str, str] = ("rollout", "trainer")  # of the two models
    notes: Sequence[str] = field(default=())
    texts_sha256: str = ""  # of the rollouts; "": not known

    k1 = Statistic(about="KL(π‖τ) estimated by -ln r, nats", mean=lambda r: -r.log, rows="tokens")
    k2 = Statistic(about="by ½ (ln r)²", mean=lambda r: r.log**2 / 2, rows="tokens", range="positive")
    k3 = Statistic(about="by r - 1 - ln r", mean=lambda r: np.expm1(r.log) - r.log, rows="tokens", range="positive")
    ratio_mean = Statistic(about="mean of r", mean=lambda r: np.exp(r.log), rows="tokens", range="positive")
    outside_clip = _outside_clip("tokens")
    sequence_k1 = Statistic(about="-ln r of whole samples, nats", mean=lambda r: -r.log, rows="samples")
    sequence_outside_clip = _outside_clip("samples")
    effective_sample_size = _effective("", "tokens")
    sequence_effective_sample_size = _effective("sequence_", "samples")

    def __post_init__(self) -> None:
        if not 0 < self.clip[0] < 1 < self.clip[1] < math.inf:
            raise InputError(f"the clip range {self.clip} does not lie around 1", fix="give one, as in (0.8, 1.2)")

    # ── values per token and per sample ──────────────────────────────────────────────────────────────────────────────
    @property
    def log_ratio(self) -> Floats:
        """(n,) ln r; -∞ where the trainer thinks a sampled token impossible."""
        log_ratios: Floats = self.trainer - self.rollout
        return log_ratios

    @cached_property
    def tokens(self) -> Ratios:
        groups: Ints = np.unique(self.prompt, return_inverse=True)[1].astype(np.int64)
        return Ratios(self.log_ratio, groups, self.clip, self.kl)

    @cached_property
    def samples(self) -> Ratios:
        pairs = np.stack([self.tokens.groups, self.sample], axis=1)
        unique_pairs, index = np.unique(pairs, axis=0, return_inverse=True)
        sums = np.bincount(index.reshape(-1), self.log_ratio, minlength=len(unique_pairs)).astype(np.float64)
        return Ratios(sums, unique_pairs[:, 0], self.clip)

    # ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def statistics(self) -> dict[str, Any]:
        """All numbers by name, ready for JSON: see docs/rollouts.md. None: not measured, not known or infinite."""
        about = {"name": self.names[1], "rollout": self.names[0]}
        counts, numbers = computed(COUNTS, self), fields_from(STATISTICS, self.estimates)
        return {**about, **counts, "clip": list(self.clip), **numbers, "notes": list(self.notes)}

    @cached_property
    def estimates(self) -> dict[str, Any]:
        """The numbers by name, as attributes have them; None: not measured, or not known."""
        return estimates(STATISTICS, self)

    def by_position(self) -> list[dict[str, Any]]:
        """k3, KL and the share outside the clip range, in stretches of positions: 0 to 63, 64 to 127, 128 to 255, …"""
        edges = depth_edges(int(self.position.max(initial=-1)))
        rows = []
        for first, end in pairwise(edges.tolist()):
            stretch = self._some((self.position >= first) & (self.position < end))
            if count := len(stretch.rollout):
                rows.append({"first": first, "last": end - 1, "tokens": count, **computed(BY_POSITION, stretch)})
        return rows

    def by_slice(self) -> list[dict[str, Any]]:
        """The statistics of each slice, in the order in which slices first appear; empty if there are none."""
        if self.slices is None:
            return []
        labels = dict.fromkeys(self.slices.tolist())
        return [{"slice": label, **self._some(self.slices == label).statistics()} for label in labels]

    def _some(self, chosen: Bools) -> Mismatch:
        columns: dict[str, Any] = {name: getattr(self, name)[chosen] for name in COLUMNS}
        return replace(self, **columns, slices=None, kl=None if self.kl is None else self.kl[chosen], notes=())

    # ── for people and machines ──────────────────────────────────────────────────────────────────────────────────────
    @typed
    def failures(self, *rules: str) -> list[str]:
        """Says in one line each which rules hold, such as ``k3 > 0.015 surely``; an empty list if the gate passes."""
        parsed, s = [parse(rule, FIELDS, EXAMPLE) for rule in rules], self.statistics()
        return [why for rule in parsed if (why := check(rule, s, why_unknown=_why_unknown))]

    def to_arrow(self) -> Any:
        """One row per sampled token, as a ``pyarrow.Table``."""
        import pyarrow as pa

        columns: dict[str, Any] = {
            **{name: getattr(self, name) for name in ("prompt", "sample", "position")},
            **({} if self.slices is None else {"slice": pa.array(self.slices.tolist()).dictionary_encode()}),
            **{f"logprob_{name}": getattr(self, name) for name in ("rollout", "trainer")},
            "log_ratio": self.log_ratio,
            **({} if self.kl is None else {"kl": self.kl}),
        }
        return pa.table(columns)

    def __repr__(self) -> str:
        s = self.statistics()
        numbers = [
            f"{name} {Estimate(s[name], s[f'{name}_stderr'], 0, 0)}"
            for name in ("k1", "k3", "kl")
            if s[name] is not None
        ]
        return few_lines(
            f"Mismatch of {self.names[1]} and the rollouts of {self.names[0]}",
            ", ".join(numbers),
            f"{s['tokens']:,} tokens of {s['samples']:,} samples, {s['prompts']:,} prompts",
            *self.notes,
        )


_KL = Statistic("kl", "KL(π‖τ), exact", lambda r: measured(r.kl), rows="tokens", needs="kl", range="positive")
STATISTICS = (
    *(Mismatch.k1, Mismatch.k2, Mismatch.k3, _KL, Mismatch.ratio_mean, Mismatch.outside_clip),
    *(Mismatch.sequence_k1, Mismatch.sequence_outside_clip),
    *_quantiles("", "tokens"),
    *_quantiles("sequence_", "samples"),
    *(Mismatch.effective_sample_size, Mismatch.sequence_effective_sample_size),
)
BY_POSITION = (Mismatch.k3, _KL, Mismatch.outside_clip)
FIELDS = fields_of((*COUNTS, *STATISTICS))
"""The fields of ``Mismatch.statistics`` that a rule may name."""


def effective_share(log_weights: Floats) -> float | None:
    """(Σ w)² / (n Σ w²) from ln w; None without a weight above zero.

    >>> round(effective_share(np.log([1.0, 3.0])), 6), effective_share(np.zeros(3))
    (0.8, 1.0)
    """
    if not len(log_weights) or not math.isfinite(largest := float(log_weights.max())):
        return None
    weights = np.exp(log_weights - largest)
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def _why_unknown(name: str, statistics: Mapping[str, Any]) -> str:
    """Says why a number of ``Mismatch.statistics`` is None."""
    if statistics.get(re.sub("_(stderr|low|high)$", "", name)) is not None:
        return too_few(statistics.get("prompts"), "prompts")
    if name.startswith("kl") and statistics.get("kl_infinite") is None:
        return "the distributions were not compared"
    return f"of {statistics['tokens']} tokens, {statistics['zero_probability']} are impossible for the trainer"


# ── texts and a trainer ──────────────────────────────────────────────────────────────────────────────────────────────
@spelled_out(ModelArguments)
@shows_progress
def mismatch(
    rollouts: Rollouts | str | Path,
    trainer: GivenModel | Model | Run | Comparison,
    *,
    clip: tuple[float, float] = CLIP,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    progress: Progress | None = None,
    **options: Unpack[ModelArguments],
) -> Mismatch:
    """Compares the log-probabilities of sampled tokens when they were sampled with those of a trainer.

    ``rollouts`` are texts of ``sm.rollouts``, or their folder.
    ``trainer`` is a model that reads the texts by prefill (a name, ``sm.open``, ``sm.wrap``), a run that scored the
    texts, or a comparison, on these texts, of their writer with the trainer, which has the exact KL.
    ``clip`` is the range of importance ratios outside of which tokens are counted.

    >>> sm.mismatch(rollouts, sm.wrap(hf_model, tokenizer)).failures("k3 > 0.015 surely")      # doctest: +SKIP
    []
    """
    if isinstance(rollouts, str | Path):
        rollouts = Rollouts.open(rollouts)
    slices = kl = None
    notes = [] if drawn_from_own(rollouts) else [NOT_OWN]
    if isinstance(trainer, Comparison):
        trainer = trainer.candidate
    if isinstance(trainer, Run):
        name, order = str(trainer.manifest["model"]), in_order_of(rollouts, trainer)
        scored = np.asarray(trainer.scores.logprob)[order]
        slices = None if trainer.facts.slice is None else trainer.facts.slice[order]
        kl, kl_notes = _exact_kl(rollouts, trainer)
        kl, notes = None if kl is None else kl[order], notes + kl_notes
    elif isinstance(trainer, Model):
        name, scored = trainer.name, _scored(rollouts, trainer, notes, progress)
    else:
        with open(trainer, engine=engine, tokenizer=tokenizer, **options) as model:
            name, scored = model.name, _scored(rollouts, model, notes, progress)
    lengths = [len(ids) for ids in rollouts.written]
    return Mismatch(
        rollout=_joined(rollouts.raw_logprob),
        trainer=scored,
        prompt=np.repeat(rollouts.prompt, lengths),
        sample=np.repeat(rollouts.sample, lengths),
        position=np.concatenate([np.zeros(0, np.int64), *map(np.arange, lengths)]),
        slices=slices,
        kl=kl,
        clip=clip,
        names=(str(rollouts.manifest["model"]), name),
        notes=tuple(notes),
        texts_sha256=rollouts.manifest["texts_sha256"],
    )


def _joined(columns: Sequence[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *columns])


def _scored(rollouts: Rollouts, model: Model, notes: list[str], progress: Progress | None) -> Floats:
    notes += rollouts.tokenizer_notes(model.text_tokenizer)
    return _joined(model.logprobs(rollouts.prompt_ids, rollouts.written, progress=progress))


def drawn_from_own(rollouts: Rollouts) -> bool:
    """Was every token drawn from the model's own distribution, without a temperature or filters?"""
    drawn, raw = _joined(rollouts.logprob), _joined(rollouts.raw_logprob)
    return bool((np.abs(drawn - raw) <= SAME).all())  # NaN: nobody knows


def in_order_of(rollouts: Rollouts, run: Run) -> Ints:
    """Returns the targets of a run in the order of the sampled tokens; refuses a run of other tokens."""
    document, token, ids = (np.asarray(getattr(run.facts, name)) for name in ("document", "token", "id"))
    order: Ints = np.lexsort((token, document)).astype(np.int64)
    lengths = [len(written) for written in rollouts.written]
    expected = np.concatenate([np.zeros(0, np.int32), *rollouts.written])
    same_texts = np.array_equal(document[order], np.repeat(np.arange(len(lengths)), lengths))
    if not same_texts or not np.array_equal(ids[order], expected):
        raise InputError(
            f"the run of {run.manifest['model']} did not score exactly these sampled tokens",
            fix="score the rollouts as a corpus, all of them, or give the model itself",
        )
    return order


def _exact_kl(rollouts: Rollouts, run: Run) -> tuple[Floats | None, list[str]]:
    """Returns the KL of a run that was compared with the writer of the rollouts, and why it cannot be used."""
    against = run.manifest.get("against")
    if run.kl is None or against is None:
        return None, []
    writer = rollouts.manifest.get("model_fingerprint")
    if writer is not None and writer != against["fingerprint"]:
        return None, [f"KL of the run is left out: it is against {against['model']}, which did not write these texts"]
    return run.kl, []
