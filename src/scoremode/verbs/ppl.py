"""``scoremode ppl``: perplexity by a named method, text and model in, Run out."""

from __future__ import annotations

import tempfile
import uuid
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from scoremode.engines.base import Engine, EngineOptions, gather_options
from scoremode.engines.registry import chosen_settings, engine_name, open_engine
from scoremode.errors import OptionError
from scoremode.store import runs
from scoremode.store.run import Run
from scoremode.verbs.question import Question, ask, identify
from scoremode.verbs.scoring import Progress, score_into


def ppl(
    model: str,
    *,
    engine: str | Engine | None = None,
    options: EngineOptions | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **question: Any,
) -> Run:
    """Score a text with a model by a named method.

    ``question`` is what :func:`ask` takes (corpus or text, method, context_length, stride, …) and, by name, what
    EngineOptions has (dtype, device, batch_tokens, …).
    A run is kept in ``out`` (else in the cache folder) and read from there when it is asked for again; ``fresh`` scores
    it again and replaces it. ``engine`` may also be an Engine of your own: it is always asked, because only you know
    what it is, and it has its options already. Without ``out`` its run is not kept.

    >>> import scoremode as sm
    >>> sm.ppl("table:uniform", text="any text").perplexity
    256 ± ?
    """
    options = gather_options(options, question)
    asked = ask(model, trust_remote_code=bool(options.trust_remote_code), **question)
    if isinstance(engine, Engine):
        _refuse_options_of_open_engine(options)
        return _score_with(engine, asked, Path(out) if out is not None else None, fresh=fresh, progress=progress)
    chosen = engine_name(engine, asked.subject)
    identity = identify(asked, chosen, chosen_settings(asked.subject, chosen, options))
    folder = Path(out) if out is not None else runs.default_folder(identity)
    with runs.claimed(folder, identity, fresh=fresh, waits=out is None) as claim:
        if claim.finished is not None:
            return _as_asked(claim.finished, asked)
        longest = int(asked.plan.lengths.max())
        with closing(open_engine(asked.subject, chosen, options, longest=longest)) as worker:
            return score_into(asked, worker, claim, progress)


def _as_asked(found: Run, asked: Question) -> Run:
    """A stored run under the names of this question: the same text, weights and windows may have had others."""
    names = {
        "corpus": asked.corpus.name,
        "model": asked.subject.name,
        "method_settings": dict(asked.plan.settings),
    }
    return replace(found, manifest={**found.manifest, **names})


def _refuse_options_of_open_engine(options: EngineOptions) -> None:
    for name, value in options.given().items():
        if name != "trust_remote_code" and value is not False:  # that one is for the tokenizer too
            raise OptionError(
                f"{name} does not apply to an engine that is already open", fix=f"give {name} where the engine is made"
            )


def _score_with(engine: Engine, asked: Question, out: Path | None, *, fresh: bool, progress: Progress | None) -> Run:
    """Score with an engine that the caller holds: never from the cache, because only the caller knows what it is."""
    identity = identify(asked, engine.facts.engine, {"instance": uuid.uuid4().hex, **engine.facts.settings})
    if out is not None:
        with runs.claimed(out, identity, fresh=fresh) as claim:
            return score_into(asked, engine, claim, progress)
    with (
        tempfile.TemporaryDirectory(prefix="scoremode-") as folder,
        runs.claimed(Path(folder), identity) as claim,
    ):
        run = score_into(asked, engine, claim, progress)
        # replacing nothing reads every column, before the folder goes
        return replace(run, scores=replace(run.scores), facts=replace(run.facts), path=None)
