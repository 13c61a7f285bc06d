"""A run: scores and their origin; the format of its manifest, and the checks when it is read. Files are not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from scoremode.core.disk.files import file_sha256
from scoremode.core.disk.folders import JOURNAL, MANIFEST
from scoremode.core.disk.manifests import Count, NotNegative, Positive, Sha256, Text, Whole, read_sealed
from scoremode.core.plan.question import Question
from scoremode.core.scores.columns import Divergences, Scores, TargetFacts
from scoremode.core.scores.frames import ArrowTable, few_lines
from scoremode.core.scores.parquet import ColumnFile, to_arrow
from scoremode.core.scores.schema import BUILT_IN
from scoremode.errors import RunError
from scoremode.values import Estimate, Floats

FORMAT = 2  # of manifests and columns
AGAIN = "score again with --fresh"

NEEDS = {metric.name: column.name for column, metric in BUILT_IN.metrics}
"""Metrics that need a column which not every engine gives, and that column."""

SIZES = ("context_length", "stride", "path", "sequences")  # settings of a method that repr() shows

IN_REPR = ("perplexity", "bits_per_byte", "top1_accuracy")  # metrics

NOT_SHOWN = ("metrics", "identity", "format", "scores_sha256", "seal")  # fields of a manifest that summary() leaves out


@dataclass(frozen=True, eq=False)
class Run(ArrowTable):
    """Scores and their origin. As a table, it has every column, and one row per target.

    >>> run = sm.ppl("smollm2-135m", text="The quick brown fox")   # doctest: +SKIP
    >>> run.perplexity                                             # doctest: +SKIP
    """

    plan_digest: str
    scores: Scores
    facts: TargetFacts
    manifest: Mapping[str, Any]  # model, tokenizer, corpus, method, engine, hardware, timings, metrics
    path: str | None = None  # the folder it is stored in
    cached: bool = False  # read from that folder instead of computed
    divergences: Divergences = field(default_factory=Divergences)  # measured if it was scored against a baseline

    @property
    def kl(self) -> Floats | None:
        """KL(baseline‖this model) of each target, (n,) in nats; None if it was not measured."""
        return self.divergences.kl

    @property
    def group_kind(self) -> str:
        """What its errors are over, as in "24 documents"."""
        return str(self.manifest.get("stderr_groups", "groups"))

    def __repr__(self) -> str:
        m = self.manifest
        metrics = {name: Estimate.from_json(stored) for name, stored in m.get("metrics", {}).items()}
        numbers = [f"{name.replace('_', ' ')} {metrics[name]}" for name in IN_REPR if name in metrics]
        settings = m.get("method_settings", {})
        sizes = [f"{name.replace('_', ' ')} {settings[name]}" for name in SIZES if settings.get(name)]
        return few_lines(
            f"Run of {m.get('model')} on {m.get('corpus')}",
            ", ".join(numbers),
            f"{len(self.scores):,} targets by {m.get('method')}" + (f" ({', '.join(sizes)})" if sizes else ""),
            ", ".join(str(m[name]) for name in ("engine", "dtype", "device") if m.get(name)),
            f"in {self.path}" if self.path is not None else "",
        )

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

    def by_slice(self) -> dict[str, dict[str, Estimate]]:
        """Perplexity and mean_nll of each slice of the text, by its name; {} if the text has no slices.

        Each target counts once.
        """
        stored: Mapping[str, Any] = self.manifest.get("by_slice", {})
        return {name: {metric: Estimate.from_json(e) for metric, e in means.items()} for name, means in stored.items()}

    def to_arrow(self) -> Any:
        """Every column, one row per target, as a ``pyarrow.Table``."""
        return to_arrow(self.scores, self.facts, self.divergences)

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


# ── manifests ─────────────────────────────────────────────────────────────────────────────────────────────────────────
class StoredEstimate(msgspec.Struct):
    value: float | None
    stderr: NotNegative | None
    n: Count
    groups: Count
    freedom: NotNegative | None
    low: float | None
    high: float | None


class Identity(msgspec.Struct):
    """The fields that identify a run: two runs in which they are equal are the same run."""

    model: Text
    tokenizer: Text
    corpus: Text
    plan: Text
    engine: Text
    settings: dict[str, object]
    versions: dict[str, Text] = {}
    numerics: Count = 0


class PartSize(msgspec.Struct):
    bytes: Count
    weights: Positive


class PartSizes(msgspec.Struct):
    body: PartSize | None = None
    embedding: PartSize | None = None
    head: PartSize | None = None


class ComparedWith(msgspec.Struct):
    model: Text
    fingerprint: Text


class StoredRerun(msgspec.Struct):
    """How far a few windows of a run moved when they were computed again."""

    rms: NotNegative | None  # nats per target; None: not measured, or infinite
    largest: NotNegative | None
    targets: Count
    words: Text  # how they were computed again, or why they were not


_STORED: dict[str, Any] = {"int": Whole, "bool": bool, "str": str}
StoredQuestion = msgspec.defstruct(
    "StoredQuestion",
    [
        *(
            (name, list[Text] | Text if o.details.repeated else _STORED[o.kind], None)
            for name, o in Question.options().items()
        ),
        ("tokenizer", Text, None),
    ],
    forbid_unknown_fields=True,
)
"""The question that a reference repeats for its candidates, with its tokenizer."""


class RunManifest(msgspec.Struct, kw_only=True):
    """The fields of a finished run's manifest; those with a default are in some manifests only."""

    format: Literal[2]
    identity: Identity
    metrics: dict[str, StoredEstimate]
    plan_digest: Sha256
    scores_sha256: Sha256
    targets: Positive
    windows: Positive
    forward_tokens: Count
    tokens: Count
    coverage: Annotated[float, Meta(ge=0, le=1)]
    method: Text
    method_settings: dict[str, bool | Whole | Text | None]
    notes: list[str]
    stderr_groups: Text
    corpus: str
    corpus_bytes: Count
    corpus_sha256: Sha256
    tokenizer: Text
    model: Text
    model_fingerprint: Text
    engine: Text
    dtype: str
    device: str
    head: str
    seconds: NotNegative
    tokens_per_second: NotNegative | None
    perplexity_stderr_llamacpp: NotNegative | None = None
    corpus_rows: Count | None = None
    documents: Count = 0
    model_revision: Text | None = None
    model_files: dict[str, Sha256] = {}
    weight_bytes: Count | None = None
    bits_per_weight: Annotated[float, Meta(ge=0, le=1024)] | None = None
    emulated_bytes: Count | None = None  # the size that an emulated quantization would have
    model_format: Text | None = None  # such as "GGUF Q4_K_M"; ``format`` is that of the manifest
    sizes: PartSizes | None = None
    by_slice: dict[str, dict[str, StoredEstimate]] = {}
    engine_settings: dict[str, object] = {}
    versions: dict[str, Text] = {}
    hardware: dict[str, str] = {}
    against: ComparedWith | None = None
    variant: Text | None = None  # the name of a candidate that is one of several variants of its model
    not_measured: list[Text] = []  # columns that the engine did not give
    noise_kl: list[NotNegative] | None = None
    noise_perturbed: str | None = None
    rerun: StoredRerun | None = None
    promise: str | None = None  # whether a promise of equal bits was kept
    model_notes: list[str] = []
    question: StoredQuestion | None = None  # type: ignore[valid-type]
    command: str | list[str | list[str]] | None = None
    created: str | None = None
    finished: str | None = None


def read_run_manifest(folder: Path) -> Mapping[str, Any]:
    """The checked manifest of a finished run; RunError if it is missing, changed or invalid."""
    path = folder / MANIFEST
    if not path.exists():
        if (folder / JOURNAL).exists():
            raise RunError(f"{folder} contains an unfinished run", fix="run the same command again to resume")
        raise RunError(f"{folder} is not a run", fix="give a folder that was written with --out")
    manifest = read_sealed(path, RunManifest, format=FORMAT, fix=AGAIN)
    if manifest.get("columns"):  # runs of engines that declared columns of their own, as they once could
        raise RunError(f"{folder} has columns that this scoremode does not read", fix=AGAIN)
    return manifest


def require_columns(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise RunError if the file's hash is not the one in the manifest, or if it has what no model can give."""
    if not path.is_file() or file_sha256(path) != manifest["scores_sha256"]:
        raise RunError(f"{path} is missing or was changed after the run", fix=AGAIN)
    file = ColumnFile(path)
    if file.rows != manifest["targets"]:
        raise RunError(f"{path} has {file.rows} rows instead of {manifest['targets']}", fix=AGAIN)
    file.require_possible()
