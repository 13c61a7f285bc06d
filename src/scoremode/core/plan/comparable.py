"""Decides whether two models can be compared target by target, and says what differs if they cannot."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from scoremode.core.plan.path import DECODE, PREFILL
from scoremode.core.text.documents import RereadDocuments
from scoremode.core.text.tokens import Tokens
from scoremode.errors import InputError, harmless
from scoremode.values import Ids, Ints

NEAR = 24  # characters that are shown where two tokenizers begin to differ


@dataclass(frozen=True, slots=True)
class ComparableFacts:
    """The facts that must be equal for two models to be comparable."""

    tokenizer: str
    vocabulary: int | None
    plan_digest: str
    method: str
    settings: Mapping[str, Any] | None = None  # settings of the method, if they are known
    corpus_sha256: str | None = None  # hash of the text, if it is known


@dataclass(frozen=True, slots=True)
class Difference:
    """The reason why two models cannot be compared."""

    kind: Literal["tokenizer", "vocabulary", "text", "plan"]
    reason: str


Where = Callable[[], str | None]
"""Says where two tokenizers first give different ids; None if they give the same ids."""


def difference(baseline: ComparableFacts, candidate: ComparableFacts, where: Where | None = None) -> Difference | None:
    """Returns the first difference that makes two models incomparable; None if they can be compared.

    A plan contains the ids of the text. So two tokenizers may have different names and files, as long as they cut this
    text into the same ids.
    """
    same_plan = baseline.plan_digest == candidate.plan_digest
    if not same_plan and baseline.tokenizer != candidate.tokenizer and not _other_text(baseline, candidate):
        found = "the baseline and the candidate do not have the same tokens" if where is None else where()
        if found is not None:
            return Difference("tokenizer", f"different tokenizers: {found}")
    if baseline.vocabulary != candidate.vocabulary:
        both = f"{baseline.vocabulary} vs {candidate.vocabulary}"
        return Difference("vocabulary", f"vocabulary {both}: distributions over different ids cannot be compared")
    if same_plan:
        return None
    if _other_text(baseline, candidate):
        return Difference("text", "different texts: the baseline was scored on another corpus")
    return Difference("plan", f"different plans: {_plan_difference(baseline, candidate)}")


def _other_text(baseline: ComparableFacts, candidate: ComparableFacts) -> bool:
    texts = baseline.corpus_sha256, candidate.corpus_sha256
    return None not in texts and texts[0] != texts[1]


def first_difference(known: Ints, ids: Ids, count: int, tokens: Tokens, documents: RereadDocuments) -> str | None:
    """Says where the candidate's ids differ from the baseline's; None if they do not.

    ``known`` has the indices in the baseline's stream whose ``ids`` are known; ``count`` is the length of that stream.
    ``tokens`` and ``documents`` are the candidate's.
    """
    inside = known < len(tokens)
    differs = np.flatnonzero(tokens.ids[known[inside]] != ids[inside])
    if len(differs):
        at = int(known[differs[0]])
    elif count != len(tokens):
        at = min(count, len(tokens), int(known[inside][-1]) + 1 if inside.any() else 0)
    else:
        return None
    totals = f"{count:,} tokens in the baseline and {len(tokens):,} in the candidate"
    if at >= len(tokens):
        return f"the candidate's end early, {totals}"
    document = int(np.searchsorted(tokens.doc_starts, at, side="right")) - 1
    character = int(tokens.char_start_of(np.array([at]))[0])
    end = min(character + NEAR, int(tokens.char_end[tokens.doc_starts[document + 1] - 1]))
    near = documents.excerpt(document, character, end)
    place = f"character {character:,}" + (f" of document {document + 1:,}" if tokens.documents > 1 else "")
    return f"they give other ids from {place} on, at {near!r}; {totals}"


def _plan_difference(baseline: ComparableFacts, candidate: ComparableFacts) -> str:
    """Says how two plans differ, as far as the difference is known."""
    if baseline.method != candidate.method:
        return f"method {harmless(str(baseline.method))} vs {harmless(str(candidate.method))}"
    theirs = baseline.settings or {}
    paths = [settings.get("path", PREFILL) for settings in (theirs, candidate.settings or theirs)]
    if paths[0] != paths[1]:
        return f"path {harmless(str(paths[0]))} vs {paths[1]}"
    mine = theirs if candidate.settings is None else candidate.settings
    differing = [
        f"{harmless(str(name)).replace('_', ' ')} {harmless(str(theirs.get(name)))} vs {mine.get(name)}"
        for name in sorted(theirs.keys() | mine.keys())
        if theirs.get(name) != mine.get(name)
    ]
    return ", ".join(differing) or "different windows or texts"


# ── against a reference ──────────────────────────────────────────────────────────────────────────────────────────────
def require_comparable(reference: Mapping[str, Any], candidate: ComparableFacts, where: Where | None = None) -> None:
    """Raises InputError if a candidate cannot be compared with a reference, whose manifest is given.

    The reason names settings and texts that differ, if they are known; ``where`` says where the ids of two tokenizers
    differ.
    """
    baseline = ComparableFacts(
        reference["tokenizer"],
        reference["vocabulary"],
        reference["plan_digest"],
        reference["method"],
        reference.get("method_settings"),
        reference.get("corpus_sha256"),
    )
    found = difference(baseline, candidate, where)
    if found is None:
        return
    corpus = shlex.quote(harmless(reference["corpus"])) if reference.get("corpus") else "…"
    again = f"scoremode ppl CANDIDATE --corpus {corpus} --method {harmless(str(baseline.method))}"
    decoded = (baseline.settings or {}).get("path") == DECODE
    if decoded:
        again += f" --path {DECODE}"
    for name in ("context_length", "stride", "max_windows", *(("sequences", "prefill_tokens") if decoded else ())):
        value = (baseline.settings or {}).get(name)
        if type(value) is int:
            again += f" --{name.replace('_', '-')} {value}"
    fixes = {
        "tokenizer": f"feed both with one: {again} --tokenizer FOLDER; or compare bits per byte",
        "vocabulary": f"make a reference of a model with {candidate.vocabulary} ids: "
        f"scoremode reference MODEL --corpus {corpus} --out ref/",
        "text": f"score the same text: {again}",
        "plan": f"use the reference's settings: {again}",
    }
    raise InputError(found.reason, fix=fixes[found.kind])
