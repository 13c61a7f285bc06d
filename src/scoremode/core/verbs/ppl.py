"""``scoremode ppl``: perplexity by a named method, text and model in, Run out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from scoremode.core.disk.uri import RemotePath, located
from scoremode.core.engine.base import Engine
from scoremode.core.store.run import Run
from scoremode.core.verbs.arguments import AllArguments, check_question, spelled_out, split_arguments
from scoremode.core.verbs.model import GivenModel, GivenTokenizer, LazyModel, outliving
from scoremode.core.verbs.progress import Progress, shows_progress
from scoremode.core.verbs.scoring import score_run
from scoremode.errors import InputError


@spelled_out(AllArguments)
@shows_progress
def ppl(
    model: GivenModel,
    *,
    engine: str | Engine | None = None,
    tokenizer: GivenTokenizer | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> Run:
    """Score a text with a model by a named method.

    ``arguments`` are those of a question (corpus or text, method, context_length, stride, …) and the engine's options
    (dtype, device, …). A run is kept in ``out`` (else in the cache folder) and read from there when it is asked for
    again; ``fresh`` scores it again and replaces it. ``engine`` may also be an Engine of your own: it is always asked,
    because only you know what it is, and it has its options already. Without ``out`` its run is not kept. ``model`` may
    also be a causal LM of Transformers that is loaded already; give its tokenizer too. It is scored as by ``wrap``.

    >>> import scoremode as sm
    >>> sm.ppl("table:uniform", text="any text").perplexity
    256.0 ± ?
    """
    question, options = split_arguments(arguments, needs_text=True)
    with closing(LazyModel.named(model, engine, options, tokenizer)) as lazy:
        return ppl_of(lazy, question, out=out, fresh=fresh, progress=progress)


def ppl_of(
    model: LazyModel,
    question: Mapping[str, Any],
    *,
    out: str | Path | RemotePath | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Run:
    """The run of a question to a model: read from its folder if it is there, else scored.

    A stored run gets the names of this question: the same text, weights and windows may have been named otherwise.
    """
    asked = model.ask(question, progress)
    with model.claimed(asked, out, fresh=fresh) as claim:
        found = claim.finished
        if found is not None and not model.is_given:
            names = {"corpus": asked.corpus.name, "model": asked.subject.name}
            settings = {"method_settings": dict(asked.plan.settings)}
            return replace(found, manifest={**found.manifest, **names, **settings})
        return outliving(model, score_run(asked, model.engine_for(asked, progress), claim, progress), out)


def ppl_many(
    model: str,
    questions: Sequence[Mapping[str, Any]],
    *,
    engine: str | None = None,
    tokenizer: str | None = None,
    options: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> list[Run]:
    """The runs of questions to one model, which is opened once. If there are several, each has a folder in ``out``."""
    several = len(questions) > 1
    asked = [check_question(question, needs_text=True) for question in questions]
    names = [_folder_name(question) for question in asked]
    if several and out is not None and len(set(names)) < len(names):
        raise InputError("two of the questions would be kept in one folder", fix="leave --out out, or ask one by one")
    with closing(LazyModel.named(model, engine, options, tokenizer, many_questions=several)) as lazy:
        found = []
        for question, name in zip(asked, names, strict=True):
            folder = located(out) / name if several and out is not None else out
            found.append(ppl_of(lazy, question, out=folder, fresh=fresh, progress=progress))
        return found


def _folder_name(question: Mapping[str, Any]) -> str:
    """The folder name of one of several questions, such as ``wikitext2-gptq``."""
    corpus = str(question.get("corpus") or question.get("dataset") or "text")
    readable = "".join(c if c.isalnum() or c in "._-" else "_" for c in Path(corpus).name or corpus)
    return f"{readable}-{question.get('method', 'sliding-once')}"
