"""``scoremode ppl``: perplexity by a named method, text and model in, Run out."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Unpack

from scoremode.core.engine.base import Engine
from scoremode.core.store.run import Run
from scoremode.core.verbs.arguments import AllArguments, read_arguments, spelled_out
from scoremode.core.verbs.model import GivenModel, GivenTokenizer, LazyModel
from scoremode.core.verbs.place import Place
from scoremode.core.verbs.progress import Progress, shows_progress


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

    ``arguments`` say what to score (corpus or text, method, context_length, stride, …) and set the engine's options
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
