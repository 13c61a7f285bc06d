"""``scoremode plan``: a dry run that loads no weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any, Unpack

from scoremode.core.engine.plugin import Work
from scoremode.core.references.format import RAW_DTYPES, estimate_bytes
from scoremode.core.verbs.arguments import AllArguments, read_arguments, spelled_out
from scoremode.core.verbs.model import GivenModel, GivenTokenizer, LazyModel, cache_bytes
from scoremode.core.verbs.planned import PlannedQuestion
from scoremode.core.verbs.progress import Progress, shows_progress
from scoremode.core.verbs.scoring import check_fits


@spelled_out(AllArguments)
@shows_progress
def plan(
    model: GivenModel,
    *,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> dict[str, Any]:
    """A dry run: the windows, targets, work and memory of a run, without loading a weight.

    >>> import scoremode as sm
    >>> sm.plan("table:uniform", text="any text")["targets"]
    7
    """
    question, model_options = read_arguments(arguments)
    question = question.with_text()
    lazy = LazyModel.named(model, engine, model_options, tokenizer)
    lazy.settings()  # refuses options that cannot work
    planned, options = lazy.ask(question, progress), lazy.chosen.options.given()
    made = planned.plan
    check_fits(made, planned.subject.vocabulary, planned.subject.context_length)
    size = cache_bytes(lazy, Work(int(made.lengths.max()), path=made.path))
    names = ("feeds_from", "feeds_to", "lead", "scores_from", "scores_to")
    edges = zip(made.start, made.stop, made.lead, made.first, made.last, strict=True)
    return {
        "model": planned.subject.name,
        "engine": lazy.engine_name,
        "method": made.method,
        "method_settings": dict(made.settings),
        "corpus": planned.corpus.name,
        "corpus_sha256": planned.corpus.sha256,
        "documents": planned.tokens.documents,
        "tokens": len(planned.tokens),
        "windows": len(made),
        "targets": made.targets,
        "forward_tokens": made.forward_tokens,
        "coverage": made.coverage,
        "notes": list(made.notes),
        "average": made.average,
        "plan_digest": made.digest,
        "tokenizer": asdict(planned.tokens.tokenizer),
        "memory": {**memory_estimate(planned, options), **({} if size is None else {"kv_cache": size})},
        "reference": reference_estimate(planned, options) if lazy.plugin.able().hidden_states else None,
        "first_windows": [dict(zip(names, map(int, window), strict=True)) for window in islice(edges, 3)],
    }


def reference_estimate(planned: PlannedQuestion, options: Mapping[str, Any]) -> dict[str, int] | None:
    """The bytes that ``scoremode reference`` would keep on disk, and those that float16 logits would take instead."""
    subject = planned.subject
    if not subject.hidden_size or not subject.vocabulary:
        return None
    wanted = options.get("dtype")
    on_cpu = wanted is None and (options.get("device") or "cpu") == "cpu"
    dtype = wanted if wanted not in (None, "auto") else subject.dtype or "float32"
    kept = "float32" if on_cpu or dtype not in RAW_DTYPES else str(dtype)
    return estimate_bytes(planned.plan.targets, subject.hidden_size, kept, subject.vocabulary)


def memory_estimate(planned: PlannedQuestion, options: Mapping[str, Any]) -> dict[str, int]:
    """Estimated bytes of memory for weights as stored, the states of a batch, the logits alive at once, and scores."""
    from scoremode.head.budget import default_budget

    subject, longest = planned.subject, int(planned.plan.lengths.max())
    batch = max(longest, options.get("batch_tokens") or 512)
    vocabulary = subject.vocabulary or 0
    return {
        "weights": subject.weight_bytes or 0,
        "activations": batch * (subject.hidden_size or 0) * 4 * 12,  # a layer's states and its MLP's, about
        "logits": min(default_budget(options.get("device") or "cpu"), longest * vocabulary * 4),
        "logits_if_whole": longest * vocabulary * 4,
        "scores": planned.plan.targets * 100,
    }
