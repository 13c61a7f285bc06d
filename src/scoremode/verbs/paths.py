"""``scoremode paths``: one model against itself, decoded against prefilled, on the same targets."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, Unpack

from scoremode.engines.registry import require_path
from scoremode.errors import OptionError
from scoremode.plan.path import DECODE
from scoremode.remote.uri import located
from scoremode.statistics.comparison import Comparison
from scoremode.store.remote_copies import open_reference
from scoremode.verbs.arguments import PATH, AllArguments, spelled_out, split_arguments
from scoremode.verbs.model import GivenModel, GivenTokenizer, LazyModel, tokenizer_name
from scoremode.verbs.ppl import ppl_of
from scoremode.verbs.progress import Progress
from scoremode.verbs.progress_display import shows_progress
from scoremode.verbs.reference import reference_of
from scoremode.verbs.sides import NOISE, Folders, as_comparison, run_against


@spelled_out(AllArguments)
@shows_progress
def paths(
    model: GivenModel,
    *,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> Comparison:
    """Compares a model with itself: the candidate is its decode path, the baseline its prefill path.

    ``arguments`` are those of a question and the engine's options; ``sequences`` and ``prefill_tokens`` are those of
    the decode path. Both runs are kept in ``out`` (``prefill`` and ``decode``), else in the cache folder. An engine
    without hidden states gives everything but KL.

    >>> paths("table:uniform", text="any text").kl.max()
    np.float64(0.0)
    """
    if arguments.get("path") is not None:
        raise OptionError("paths measures both paths", fix="leave --path out")
    question, options = split_arguments({**arguments, "path": DECODE}, needs_text=True)
    prefilled = {name: value for name, value in question.items() if name not in PATH}
    folders = Folders(located(out) if out is not None else None, fresh, progress)
    with closing(LazyModel.named(model, engine, options, tokenizer)) as lazy:
        require_path(lazy.plugin, DECODE)
        return _compare_paths(lazy, prefilled, question, folders, tokenizer_name(tokenizer))


def _compare_paths(
    model: LazyModel, prefilled: dict[str, Any], decoded: dict[str, Any], folders: Folders, tokenizer: str | None
) -> Comparison:
    first, second = (folders.folder(name) for name in ("prefill", "decode"))
    how: dict[str, Any] = {"fresh": folders.fresh, "progress": folders.progress}
    has_states = model.plugin.able().hidden_states
    with closing(model.for_prefill()) as baseline:  # a cache that prefill does not read is not a part of the baseline
        if has_states:
            run_p = reference_of(baseline, prefilled, first, tokenizer=tokenizer, **how)
        else:
            run_p = ppl_of(baseline, prefilled, out=first, **how)
    if not has_states:
        missing = f"KL between the paths needs hidden states, which the {model.engine_name} engine does not give"
        return as_comparison(DECODE, run_p, ppl_of(model, decoded, out=second, **how), None, missing)
    noise = {name: run_p.manifest.get(name) for name in NOISE}
    asked, stored = model.ask(decoded, folders.progress), open_reference(str(run_p.path))
    run_q = run_against(model, asked, run_p, stored, folders, out=second, noise=noise)
    return as_comparison(DECODE, run_p, run_q, run_q.kl)
