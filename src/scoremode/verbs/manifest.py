"""The manifest of a run: its numbers, and everything another person needs to get them again."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scoremode.disk.manifests import without_secrets
from scoremode.engines.base import EngineFacts
from scoremode.models.subject import Subject
from scoremode.plan.plan import Plan
from scoremode.scores.schema import Schema
from scoremode.statistics.estimate import as_json
from scoremode.statistics.groups import grouping
from scoremode.statistics.run import ScoreRows, all_metrics, llamacpp_stderr
from scoremode.store.run import described
from scoremode.values import Floats
from scoremode.verbs.question import Question, library_versions


def make_manifest(
    asked: Question, engine: EngineFacts, scores: ScoreRows, seconds: float, identity: dict[str, Any]
) -> dict[str, Any]:
    """The manifest: the numbers, and everything another person needs to get them again."""
    plan, subject = asked.plan, asked.subject
    zero = sum(int(np.isneginf(logprob).sum()) for logprob in logprobs_of(plan, scores))
    of_model = [*engine.notes, *_unnamed_ids(asked, engine)]
    notes = [*plan.notes, *of_model] + (
        [f"{zero} target{'s have' if zero > 1 else ' has'} probability zero"] if zero else []
    )
    if kernel_note := engine.settings.get("head_kernel_note"):
        notes.append(f"head kernel {engine.settings['head_kernel']}: {kernel_note}")
    notes += subject.notes
    missing = not_measured(plan, scores, engine.schema)
    return {
        "metrics": as_json(all_metrics(plan, asked.tokens, scores, engine.schema)),
        "windows": len(plan),
        "forward_tokens": plan.forward_tokens,
        "method": plan.method,
        "method_settings": dict(plan.settings),
        "notes": notes,
        "model_notes": of_model,
        **({"not_measured": missing} if missing else {}),
        **described(engine.schema),
        "coverage": plan.coverage,
        "stderr_groups": grouping(plan).kind,
        **_error_of_llamacpp(plan, scores),
        "plan_digest": plan.digest,
        "corpus": asked.corpus.name,
        "corpus_sha256": asked.corpus.sha256,
        "corpus_rows": asked.corpus.row_count,
        "corpus_bytes": asked.corpus.byte_count,
        "documents": asked.tokens.documents,
        "tokens": len(asked.tokens),
        "tokenizer": asked.tokens.tokenizer.fingerprint,
        "model": asked.subject.name,
        "model_fingerprint": asked.subject.fingerprint,
        "model_revision": subject.revision,
        "model_files": dict(subject.files),
        "weight_bytes": subject.weight_bytes,
        "bits_per_weight": subject.bits_per_weight,
        **_stored_as(subject),
        "engine": engine.engine,
        "dtype": engine.dtype,
        "device": engine.device,
        "head": engine.head,
        "engine_settings": without_secrets(engine.settings),
        "versions": {**library_versions(engine.engine), **engine.versions, "python": platform.python_version()},
        "hardware": {"machine": platform.machine(), "processor": processor_name(), "system": platform.system()},
        "seconds": seconds,
        "tokens_per_second": plan.forward_tokens / seconds if seconds > 0 else None,
        "identity": identity,
    }


def add_account(manifest: dict[str, Any], account: Mapping[str, Any]) -> None:
    """Put what happened while an engine scored with the numbers; its notes are printed with the others."""
    manifest["notes"] = [*manifest["notes"], *account.get("notes", ())]
    manifest.update({name: value for name, value in account.items() if name != "notes"})


def _stored_as(subject: Subject) -> dict[str, Any]:
    """The format of the weights, and the sizes of their parts, where they are known."""
    found = {"model_format": subject.format, "sizes": subject.sizes.as_json() if subject.sizes else None}
    return {name: value for name, value in found.items() if value is not None}


def _unnamed_ids(asked: Question, engine: EngineFacts) -> list[str]:
    """Ids of the model that the tokenizer does not have: what they are given, the others lack."""
    if engine.vocabulary is None:
        return []
    unnamed = engine.vocabulary - asked.tokens.tokenizer.size
    if unnamed <= 0:
        return []
    return [f"{unnamed:,} of the model's {engine.vocabulary:,} ids have no token, and may be given probability"]


def not_measured(plan: Plan, scores: ScoreRows, schema: Schema) -> list[str]:
    """Columns that the engine did not give."""
    first = next(plan.blocks())
    there = scores.rows(first.begin, first.end)
    return [name for name in schema.names if not there.has(name)]


def logprobs_of(plan: Plan, scores: ScoreRows) -> Iterator[Floats]:
    for block in plan.blocks():
        yield scores.rows(block.begin, block.end).logprob


def _error_of_llamacpp(plan: Plan, scores: ScoreRows) -> dict[str, float | None]:
    if plan.method != "llamacpp":
        return {}
    return {"perplexity_stderr_llamacpp": llamacpp_stderr(logprobs_of(plan, scores), plan.targets)}


def processor_name() -> str:
    """The processor's name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
