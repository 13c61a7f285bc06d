"""``scoremode ppl``: perplexity by a named method, text and model in, Run out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Unpack

from scoremode.core.engine.base import Engine
from scoremode.core.plan.question import DEFAULT_METHOD, Question
from scoremode.core.store.run import Run
from scoremode.core.verbs.arguments import AllArguments, read_arguments, spelled_out
from scoremode.core.verbs.model import GivenModel, GivenTokenizer, LazyModel
from scoremode.core.verbs.place import Place
from scoremode.core.verbs.progress import Progress, shows_progress
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
    question, options = read_arguments(arguments)
    with closing(LazyModel.named(model, engine, options, tokenizer)) as lazy:
        return lazy.score(question.with_text(), Place.at(out, fresh=fresh, progress=progress))


def ppl_many(
    model: str,
    questions: Sequence[Question],
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
    names = [_folder_name(question) for question in questions]
    if several and out is not None and len(set(names)) < len(names):
        raise InputError("two of the questions would be kept in one folder", fix="leave --out out, or ask one by one")
    with closing(LazyModel.named(model, engine, options, tokenizer, many_questions=several)) as lazy:
        found, place = list[Run](), Place.at(out, fresh=fresh, progress=progress)
        for question, name in zip(questions, names, strict=True):
            found.append(lazy.score(question, place.within(name) if several else place))
        return found


def _folder_name(question: Question) -> str:
    """The folder name of one of several questions, such as ``wikitext2-gptq``."""
    corpus = str(question.corpus or question.dataset or "text")
    readable = "".join(c if c.isalnum() or c in "._-" else "_" for c in Path(corpus).name or corpus)
    return f"{readable}-{question.method or DEFAULT_METHOD}"
