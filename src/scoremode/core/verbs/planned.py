"""A question to one model, planned: text, tokens and windows; and its identity. No weight is loaded for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from scoremode.core.disk.manifests import without_secrets
from scoremode.core.engine.registry import known_engines
from scoremode.core.installation import installed_versions
from scoremode.core.models.subject import Subject
from scoremode.core.plan.build import make_plan
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.question import DEFAULT_METHOD, Question
from scoremode.core.plan.recipes import Method
from scoremode.core.text.corpus import Corpus, open_text
from scoremode.core.text.documents import RereadDocuments, notes_on
from scoremode.core.text.slices import ANSWER, TEMPLATE
from scoremode.core.text.tokens import Tokens, first_tokens, tokenize
from scoremode.errors import MethodError, OptionError
from scoremode.values import NUMERICS
from scoremode.version import __version__


@dataclass(frozen=True, slots=True)
class PlannedQuestion:
    """A question to one model with its text, tokens and plan: all that decides a run's numbers."""

    subject: Subject
    corpus: Corpus
    method: Method
    documents: RereadDocuments
    tokens: Tokens
    plan: Plan


LastTokens = dict[tuple[Any, ...], tuple[RereadDocuments, Tokens]]
"""The tokens of the last text, kept for a question that scores the same text by another method."""


def plan_question(subject: Subject, question: Question, memory: LastTokens | None = None) -> PlannedQuestion:
    """Reads the text, cuts it into tokens and plans the windows. ``scoremode plan`` shows the result."""
    rule, assistant_only = question.rule, bool(question.assistant_only)
    corpus = open_text(question)
    if corpus.layout == "chat":
        rule = replace(rule, special=False)  # a chat template writes special tokens itself
    if corpus.own_tokens is not None:
        _check_prompted(corpus, question)
        rule = replace(rule, special=False)
    key = (corpus.sha256, corpus.layout, rule.arrangement, rule.special, assistant_only, question.slices)
    last = {} if memory is None else memory
    if key not in last:
        last.clear()  # before new tokens are made, because both at once may not fit in memory
        if corpus.own_tokens is not None:
            last[key] = corpus.own_tokens(subject.tokenizer, question.slices)
        else:
            documents = RereadDocuments(
                corpus, rule.arrangement, subject.tokenizer, assistant_only=assistant_only, rules=question.slices
            )
            last[key] = documents, tokenize(documents, subject.tokenizer, special=rule.special)
    documents, tokens = last[key]
    if corpus.own_tokens is not None:
        rule = replace(rule, context=_longest(tokens, question, subject))
    notes = [*notes_on(corpus, rule.arrangement), *tokens.notes]
    if question.document_tokens is not None:
        tokens, cut = first_tokens(tokens, question.document_tokens)
        notes.append(f"{cut} of {tokens.documents} documents cut to their first {question.document_tokens} tokens")
    plan = make_plan(
        rule,
        tokens,
        context_length=question.context_length,
        stride=question.stride,
        max_windows=question.max_windows,
        model_context=subject.context_length,
        path=question.decode_path,
    )
    if not assistant_only and tokens.slices is not None and {ANSWER, TEMPLATE} <= {*tokens.slice_names}:
        count = int((tokens.slices[plan.target_token] == tokens.slice_names.index(TEMPLATE)).sum())
        share = f"{count:,} of {plan.targets:,} targets are the chat template's"
        notes.append(f"{share}; --assistant-only scores the assistant's alone")
    plan = replace(plan, notes=(*notes, *plan.notes))
    return PlannedQuestion(subject, corpus, rule, documents, tokens, plan)


def _check_prompted(corpus: Corpus, question: Question) -> None:
    """Refuses settings that do not fit texts whose prompts are context."""
    if question.rule.name != DEFAULT_METHOD:
        what = f"{question.rule.name} does not score {corpus.name}, whose prompts are context"
        raise MethodError(what, fix=f"use --method {DEFAULT_METHOD}")
    if question.assistant_only:
        what = f"--assistant-only does not apply to {corpus.name}"
        raise OptionError(what, fix="leave it out: the targets are known")


def _longest(tokens: Tokens, question: Question, subject: Subject) -> int:
    """Returns the length of windows in which every text fits whole; the user may choose a shorter one."""
    lengths, most = np.diff(tokens.doc_starts), subject.context_length
    longest = max(2, int(lengths.max()))
    if question.context_length is None and most is not None and longest > most:
        raise MethodError(
            f"text {int(lengths.argmax())} has {longest:,} tokens with its prompt, and the model's context {most:,}",
            fix=f"give --context-length {most} for windows that overlap, or write with fewer --max-tokens",
        )
    return longest


# ── identity ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def identify(subject: Subject, engine: str, settings: Mapping[str, Any], **more: object) -> Mapping[str, Any]:
    """Returns the facts that must be equal for stored numbers to count as those of this model, engine and settings.

    ``more`` adds facts about the question, such as the plan.
    """
    identity = {
        "model": subject.fingerprint,
        "tokenizer": subject.tokenizer.facts.fingerprint,
        "engine": engine,
        "settings": without_secrets(settings),
        "versions": {name: found for name, found in library_versions(engine).items() if name != "scoremode"},
        "numerics": NUMERICS,
        **more,
    }
    as_stored: Mapping[str, Any] = json.loads(json.dumps(identity))  # tuples become lists, as in stored identities
    return as_stored


@cache
def library_versions(engine: str) -> dict[str, str]:
    """Returns the installed versions of scoremode and of the libraries that compute an engine's numbers."""
    plugins = [p for name, p in known_engines().items() if p.known_to_all_runs or name == engine]
    return {"scoremode": __version__, **installed_versions(name for plugin in plugins for name in plugin.packages)}
