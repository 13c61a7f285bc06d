"""A run: scores and their origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scoremode.errors import RunError
from scoremode.scores.columns import Scores, TargetFacts
from scoremode.scores.parquet import to_arrow
from scoremode.scores.schema import BUILT_IN, Schema
from scoremode.store.run_format import schema_of
from scoremode.values import Estimate, Floats

NEEDS = {metric.name: column.name for column, metric in BUILT_IN.metrics}
"""Metrics that need a column which not every engine gives, and that column."""

NOT_SHOWN = ("metrics", "identity", "format", "scores_sha256", "seal")  # fields of a manifest that summary() leaves out


@dataclass(frozen=True, eq=False)
class Run:
    """Scores and their origin.

    >>> run = sm.ppl("smollm2-135m", text="The quick brown fox")   # doctest: +SKIP
    >>> run.perplexity                                             # doctest: +SKIP
    """

    plan_digest: str
    scores: Scores
    facts: TargetFacts
    manifest: Mapping[str, Any]  # model, tokenizer, corpus, method, engine, hardware, timings, metrics
    path: str | None = None  # the folder it is stored in
    cached: bool = False  # read from that folder instead of computed
    kl: Floats | None = None  # (n,) nats, KL(baseline‖this model), if it was scored against a baseline

    @property
    def schema(self) -> Schema:
        """The columns that this run may have: the built-in ones, and those that its engine declared."""
        return schema_of(self.manifest)

    def _estimate(self, name: str) -> Estimate:
        if name not in self.manifest["metrics"] and name in NEEDS:
            raise RunError(
                f"{name} was not measured: the {self.manifest['engine']} engine gave no {NEEDS[name]}",
                fix=f"score with an engine that gives {NEEDS[name]}, such as --engine transformers",
            )
        if name not in self.manifest["metrics"]:
            raise RunError(f"this run has no {name}", fix="it scored no whole word or byte: give a longer text")
        return Estimate.from_json(self.manifest["metrics"][name])

    @property
    def perplexity(self) -> Estimate:
        return self._estimate("perplexity")

    @property
    def mean_nll(self) -> Estimate:
        """Nats per target, averaged as the method does; perplexity is its exponential (except for mean-of-texts)."""
        return self._estimate("mean_nll")

    @property
    def bits_per_byte(self) -> Estimate:
        return self._estimate("bits_per_byte")

    @property
    def word_perplexity(self) -> Estimate:
        return self._estimate("word_perplexity")

    @property
    def mean_rank(self) -> Estimate:
        return self._estimate("mean_rank")

    @property
    def top1_accuracy(self) -> Estimate:
        return self._estimate("top1_accuracy")

    def to_arrow(self) -> Any:
        """Every column, one row per target, as a ``pyarrow.Table``."""
        return to_arrow(self.scores, self.facts, self.kl, self.schema)

    def summary(self) -> dict[str, Any]:
        """What ``--json`` prints: first the numbers, then how to reproduce them. None: not measured, or infinite."""
        metrics = self.manifest["metrics"]
        numbers: dict[str, Any] = {name: metrics[name]["value"] for name in ("perplexity", "mean_nll")}
        for name in metrics:
            numbers[name] = metrics[name]["value"]
            numbers[f"{name}_stderr"] = metrics[name]["stderr"]
        for name in NEEDS:
            if name not in metrics:
                numbers |= {name: None, f"{name}_stderr": None}
        rest = {name: value for name, value in self.manifest.items() if name not in NOT_SHOWN}
        return {**numbers, **rest, "cached": self.cached, "run": self.path}
