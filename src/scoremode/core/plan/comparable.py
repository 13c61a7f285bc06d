"""Decides whether two models can be compared target by target, and says what differs if they cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoremode.core.plan.path import PREFILL
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
    settings: Mapping[str, Any]  # of the method
    corpus_sha256: str


def require_comparable(
    baseline: ComparableFacts,
    candidate: ComparableFacts,
    where: Callable[[], str | None],
    *,
    own_question: str | None = None,
) -> None:
    """Raises InputError if two models cannot be compared: what differs, and what would make them comparable.

    A plan contains the ids of the text. So two tokenizers may have different names and files, as long as they cut this
    text into the same ids: ``where`` says where they first do not; None if they do. ``own_question`` is the name of a
    baseline that brings its own question.
    """
    same_plan, same_text = (
        getattr(baseline, name) == getattr(candidate, name) for name in ("plan_digest", "corpus_sha256")
    )
    settings = _plan_difference(baseline, candidate)
    other_ids = baseline.tokenizer != candidate.tokenizer or not settings  # one merge may differ without a trace
    if not same_plan and same_text and other_ids and (difference := where()) is not None:
        fix = "feed both with one: --tokenizer FOLDER; or compare bits per byte, which scoremode ppl prints"
        raise InputError(f"different tokenizers: {difference}", fix=fix)
    if baseline.vocabulary != candidate.vocabulary:
        both = f"{baseline.vocabulary} vs {candidate.vocabulary}"
        message = f"vocabulary {both}: distributions over different ids cannot be compared"
        raise InputError(message, fix="compare models with one vocabulary")
    if same_plan:
        return
    if same_text:
        message = f"different plans: {settings or 'different windows or texts'}"
        fix = "give --context-length and --stride that both models allow"
    else:
        message, fix = "different texts: the baseline was scored on another corpus", "give both the same text"
    if own_question is not None:
        fix = f"leave text, method and sizes out: scoremode compare {own_question} CANDIDATE has those of the baseline"
    raise InputError(message, fix=fix)


def first_difference(indices: Ints, ids: Ids, count: int, tokens: Tokens, documents: RereadDocuments) -> str | None:
    """Says where the candidate's ids differ from the baseline's; None if they do not.

    ``indices`` are those in the baseline's stream whose ``ids`` are known; ``count`` is the length of that stream.
    ``tokens`` and ``documents`` are the candidate's.
    """
    inside = indices < len(tokens)
    differs = np.flatnonzero(tokens.ids[indices[inside]] != ids[inside])
    if len(differs):
        at = int(indices[differs[0]])
    elif count != len(tokens):
        at = min(count, len(tokens), int(indices[inside][-1]) + 1 if inside.any() else 0)
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
    """Says how two plans differ, as far as the difference is known; '' if it is not."""
    if baseline.method != candidate.method:
        return f"method {harmless(str(baseline.method))} vs {harmless(str(candidate.method))}"
    theirs, mine = ({"path": PREFILL, **facts.settings} for facts in (baseline, candidate))
    names = ["path"] if theirs["path"] != mine["path"] else sorted(theirs.keys() | mine.keys())
    differing = [
        f"{harmless(str(name)).replace('_', ' ')} {harmless(str(theirs.get(name)))} vs {mine.get(name)}"
        for name in names
        if theirs.get(name) != mine.get(name)
    ]
    return ", ".join(differing)
