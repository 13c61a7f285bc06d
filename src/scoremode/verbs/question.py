"""A question: model, text, method and plan, everything that decides a run's numbers before a weight is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypedDict, Unpack

from scoremode import __version__
from scoremode.arguments import require_flag, whole_number
from scoremode.cache.token_store import STORED_FROM, kept_tokens
from scoremode.cluster.spread import SPREAD
from scoremode.disk.manifests import without_secrets
from scoremode.engines.registry import all_options, known_engines
from scoremode.errors import UnknownArgumentError, did_you_mean
from scoremode.models.subject import Subject
from scoremode.plan.build import make_plan
from scoremode.plan.plan import Plan
from scoremode.plan.recipes import Method, find_method
from scoremode.text.corpus import Corpus, Spec, load
from scoremode.text.documents import RereadDocuments, notes_on
from scoremode.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TextTokenizer
from scoremode.text.tokens import Tokens, TokenStream, first_tokens
from scoremode.values import NUMERICS


class QuestionArguments(TypedDict, total=False):
    """What is asked of a model: a text, and the method that it is scored by. All of it has defaults but the text."""

    corpus: Spec | Sequence[Spec] | Corpus | None  # names, files, folders or patterns; several are one corpus
    text: str | None  # a text given here
    method: str  # default: sliding-once
    context_length: int | None  # tokens per window; default: the method's
    stride: int | None  # tokens between windows; default: the method's
    max_windows: int | None  # 0 for all; default: the method's own limit
    num_samples: int | None  # only the first rows of the corpus
    document_tokens: int | None  # only the first tokens of each document
    field: str | None  # of .jsonl or .parquet rows
    dataset: str | None  # a dataset on the Hugging Face hub
    dataset_config: str | None
    split: str | None  # of the dataset; default: test
    assistant_only: bool  # of chat rows, score the assistant's tokens alone


QUESTION = tuple(QuestionArguments.__annotations__)


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that decides a run's numbers, before any weight is loaded."""

    subject: Subject
    corpus: Corpus
    method: Method
    documents: RereadDocuments
    tokens: Tokens
    plan: Plan


Tokenized = tuple[RereadDocuments, Tokens]


@dataclass(slots=True)
class LastTokens:
    """The text that was tokenized last, for a question that asks about it again by another method."""

    key: tuple[Any, ...] | None = None
    found: Tokenized | None = None

    def get(self, key: tuple[Any, ...], make: Callable[[], Tokenized]) -> Tokenized:
        if self.found is None or self.key != key:
            self.key = self.found = None  # before the next is made: both at once may not fit in memory
            self.found, self.key = make(), key
        return self.found


def prepare_question(
    subject: Subject, *, memory: LastTokens | None = None, **given: Unpack[QuestionArguments]
) -> Question:
    """Read the text, cut it into tokens and plan the windows: what ``scoremode plan`` shows."""
    check_question(given)
    assistant_only = given.get("assistant_only", False)
    require_flag("assistant_only", assistant_only)
    document_tokens = whole_number("document_tokens", given.get("document_tokens"))
    rule = find_method(given.get("method", "sliding-once"))
    corpus = load(
        given.get("corpus"),
        text=given.get("text"),
        field=given.get("field"),
        num_samples=given.get("num_samples"),
        dataset=given.get("dataset"),
        dataset_config=given.get("dataset_config"),
        split=given.get("split"),
    )
    if corpus.layout == "chat":
        rule = replace(rule, special=False)  # a chat template writes its special tokens itself
    making = partial(_tokenized, subject.tokenizer, corpus, rule, assistant_only=assistant_only)
    key = (corpus.sha256, corpus.layout, rule.arrangement, rule.special, assistant_only)
    documents, tokens = making() if memory is None else memory.get(key, making)
    notes = [*notes_on(corpus, rule.arrangement), *tokens.notes]
    if document_tokens is not None:
        tokens, cut = first_tokens(tokens, document_tokens)
        notes.append(f"{cut} of {tokens.documents} documents cut to their first {document_tokens} tokens")
    plan = make_plan(
        rule,
        tokens,
        context_length=given.get("context_length"),
        stride=given.get("stride"),
        max_windows=given.get("max_windows"),
        model_context=subject.context_length,
    )
    plan = replace(plan, notes=(*notes, *plan.notes))
    return Question(subject, corpus, rule, documents, tokens, plan)


def _tokenized(tokenizer: TextTokenizer, corpus: Corpus, rule: Method, *, assistant_only: bool) -> Tokenized:
    """The documents and tokens of a corpus; those of a long one are kept in the cache."""
    documents = RereadDocuments(corpus, rule.arrangement, tokenizer, assistant_only=assistant_only)
    stream = TokenStream(documents, tokenizer, special=rule.special)
    if corpus.byte_count < STORED_FROM:
        return documents, stream.in_memory()
    key = None
    if corpus.layout != "chat" and isinstance(tokenizer, HuggingFaceTokenizer | ByteTokenizer):
        key = {  # all that decides the tokens; of a chat template, or of tokenizers elsewhere, that is not known
            "corpus": corpus.sha256,
            "layout": corpus.layout,
            "arrangement": rule.arrangement,
            "special": rule.special,
            "tokenizer": tokenizer.definition(),
        }
    return documents, kept_tokens(key, stream)


def check_question(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a question; any other is refused, with the nearest name."""
    for name in given:
        if name not in QUESTION:
            raise UnknownArgumentError(f"there is no argument {name}", fix=did_you_mean(name, QUESTION))
    return dict(given)


def split_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments by name: those of a question, and those of an engine. Any other is refused, with the nearest name."""
    question = {name: value for name, value in arguments.items() if name in QUESTION}
    options = {name: value for name, value in arguments.items() if name not in QUESTION}
    known = [*all_options(), *SPREAD]
    for name in options:
        if name not in known:
            raise UnknownArgumentError(f"there is no argument {name}", fix=did_you_mean(name, [*QUESTION, *known]))
    return question, options


# ── identity ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def identify(asked: Question, engine: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for a stored run to be this run."""
    identity = {
        "model": asked.subject.fingerprint,
        "tokenizer": asked.tokens.tokenizer.fingerprint,
        "corpus": asked.corpus.sha256,
        "plan": asked.plan.digest,
        "engine": engine,
        "settings": without_secrets(settings),
        **numbers_version(engine),
    }
    as_stored: dict[str, Any] = json.loads(json.dumps(identity))  # tuples are lists there, and must compare equal
    return as_stored


def numbers_version(engine: str) -> dict[str, Any]:
    """The part of every identity that says whose arithmetic it is."""
    libraries = {name: found for name, found in library_versions(engine).items() if name != "scoremode"}
    return {"versions": libraries, "numerics": NUMERICS}


def library_versions(engine: str) -> dict[str, str]:
    """Of scoremode and of the libraries that an engine's numbers come from, as installed."""
    return dict(_library_versions(engine))


@cache
def _library_versions(engine: str) -> dict[str, str]:
    plugins = [p for name, p in known_engines().items() if p.known_to_all_runs or name == engine]
    return {"scoremode": __version__, **installed_versions(name for plugin in plugins for name in plugin.packages)}


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of packages; those that are not installed are left out."""
    found = {}
    for package in dict.fromkeys(packages):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
