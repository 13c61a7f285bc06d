"""What a run stores: a manifest with its numbers and where they come from, and a row of columns for each target."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from scoremode.core.disk.manifests import without_secrets
from scoremode.core.engine.base import EngineFacts
from scoremode.core.models.subject import Subject
from scoremode.core.scores.columns import CodedTexts, Scores, TargetFacts
from scoremode.core.scores.journal import Journal
from scoremode.core.scores.parquet import RunRows
from scoremode.core.scores.schema import BUILT_IN
from scoremode.core.statistics.estimate import as_json
from scoremode.core.statistics.groups import grouping, weights_of
from scoremode.core.statistics.run import all_metrics, llamacpp_stderr
from scoremode.core.text.tokenizer import TextTokenizer
from scoremode.core.text.tokens import Tokens
from scoremode.core.verbs.planned import PlannedQuestion, library_versions
from scoremode.values import Ids, Ints


def make_manifest(
    planned: PlannedQuestion,
    engine: EngineFacts,
    journal: Journal,
    identity: Mapping[str, object],
    account: Mapping[str, Any],
) -> dict[str, Any]:
    """The manifest: the numbers, and everything another person needs to get them again.

    ``account`` is about what happened while the engine scored; its notes join the others.
    """
    scores, seconds = journal.scores, journal.seconds
    plan, subject = planned.plan, planned.subject
    zero = int(np.isneginf(scores.logprob).sum())
    of_model = [*engine.notes, *_unnamed_ids(planned, engine)]
    notes = [*plan.notes, *of_model] + (
        [f"{zero} target{'s have' if zero > 1 else ' has'} probability zero"] if zero else []
    )
    if kernel_note := engine.settings.get("head_kernel_note"):
        notes.append(f"head kernel {engine.settings['head_kernel']}: {kernel_note}")
    notes += [*subject.notes, *account.get("notes", ())]
    missing = [name for name in BUILT_IN.names if not scores.has(name)]
    has_llamacpp_error = planned.method.independent_error
    return {
        "metrics": as_json(all_metrics(plan, planned.tokens, scores)),
        **_by_slice(planned, scores),
        "windows": len(plan),
        "forward_tokens": plan.forward_tokens,
        "method": plan.method,
        "method_settings": dict(plan.settings),
        "notes": notes,
        "model_notes": of_model,
        **({"not_measured": missing} if missing else {}),
        "coverage": plan.coverage,
        "stderr_groups": grouping(plan).kind,
        **({"perplexity_stderr_llamacpp": llamacpp_stderr(scores.logprob)} if has_llamacpp_error else {}),
        "plan_digest": plan.digest,
        "corpus": planned.corpus.name,
        "corpus_sha256": planned.corpus.sha256,
        "corpus_rows": planned.corpus.row_count,
        "corpus_bytes": planned.corpus.byte_count,
        "documents": planned.tokens.documents,
        "tokens": len(planned.tokens),
        "tokenizer": planned.tokens.tokenizer.fingerprint,
        **describe_model(subject),
        **describe_engine(engine),
        "seconds": seconds,
        "tokens_per_second": plan.forward_tokens / seconds if seconds > 0 else None,
        "identity": identity,
        **{name: value for name, value in account.items() if name != "notes"},
    }


def _by_slice(planned: PlannedQuestion, scores: Scores) -> dict[str, object]:
    if planned.tokens.slices is None:
        return {}
    from scoremode.core.statistics.parts import metrics_by_slice

    metrics = metrics_by_slice(planned.plan, planned.tokens, scores)
    return {"by_slice": metrics} if metrics else {}


def describe_model(subject: Subject) -> Mapping[str, object]:
    """The manifest's fields about the model, with its weights' format and its parts' sizes where they are known."""
    stored_as = {
        "model_format": subject.format,
        "sizes": subject.sizes.as_json() if subject.sizes else None,
        "emulated_bytes": subject.emulated_bytes,
    }
    return {
        "model": subject.name,
        "model_fingerprint": subject.fingerprint,
        "model_revision": subject.revision,
        "model_files": dict(subject.files),
        "weight_bytes": subject.weight_bytes,
        "bits_per_weight": subject.bits_per_weight,
        **{name: value for name, value in stored_as.items() if value is not None},
    }


def describe_engine(engine: EngineFacts) -> Mapping[str, object]:
    """The manifest's fields about the engine: its settings, and the libraries and the machine that it ran on."""
    return {
        "engine": engine.engine,
        "dtype": engine.dtype,
        "device": engine.device,
        "head": engine.head,
        "engine_settings": without_secrets(engine.settings),
        "versions": {**library_versions(engine.engine), **engine.versions, "python": platform.python_version()},
        "hardware": {"machine": platform.machine(), "processor": processor_name(), "system": platform.system()},
    }


def _unnamed_ids(planned: PlannedQuestion, engine: EngineFacts) -> list[str]:
    """A note on ids of the model that the tokenizer lacks: they may take probability from the others."""
    if engine.vocabulary is None:
        return []
    unnamed = engine.vocabulary - planned.tokens.tokenizer.size
    if unnamed <= 0:
        return []
    return [f"{unnamed:,} of the model's {engine.vocabulary:,} ids have no token, and may be given probability"]


def processor_name() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def rows_to_keep(planned: PlannedQuestion, journal: Journal) -> RunRows:
    """The columns of a run: the scores, and for each target its place in the text, its group, its weight and texts."""
    plan, tokens, scores = planned.plan, planned.tokens, journal.scores
    index = plan.target_token
    text, top_text = _texts_of(planned.subject.tokenizer, tokens.ids[index], scores.top)
    facts = TargetFacts(
        window=plan.target_window,
        document=plan.target_document,
        token=index,
        id=tokens.ids[index],
        byte_len=tokens.byte_len[index].astype(np.int32),
        word_starts=tokens.word_starts[index].astype(np.int32),
        group=grouping(plan).of_target,
        weight=weights_of(plan),
        text=cast(Any, text),
        top_text=cast(Any, top_text),
        slice=cast(Any, _slices_of(tokens, index)),
    )
    return RunRows(scores, facts, journal.divergences)


def _texts_of(tokenizer: TextTokenizer, ids: Ids, top: Ids | None) -> tuple[CodedTexts, CodedTexts | None]:
    """The texts of tokens and of first choices, with one dictionary, so that the two columns can be compared."""
    found, where = np.unique(ids if top is None else np.concatenate([ids, top]), return_inverse=True)
    places: dict[str, int] = {}  # two ids may have the same text
    texts = map(tokenizer.token_text, found.tolist())
    codes = np.array([places.setdefault(text, len(places)) for text in texts], np.int32)[where]
    words = list(places)
    return CodedTexts(codes[: len(ids)], words), None if top is None else CodedTexts(codes[len(ids) :], words)


def _slices_of(tokens: Tokens, index: Ints) -> CodedTexts | None:
    """The names of the slices in which tokens begin; None if the text has no slices."""
    if tokens.slices is None:
        return None
    found, codes = np.unique(tokens.slices[index], return_inverse=True)
    return CodedTexts(codes.astype(np.int32), [tokens.slice_names[code] for code in found.tolist()])
