"""``scoremode plan``: a dry run that loads no weight."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Unpack

from scoremode.engines.options import Options
from scoremode.plan.plan import Plan
from scoremode.references.format import RAW_DTYPES, estimate_bytes
from scoremode.values import BLOCK
from scoremode.verbs.arguments import AllArguments, spelled_out
from scoremode.verbs.model import HeldModel, hold
from scoremode.verbs.progress import Progress
from scoremode.verbs.question import Question, split_arguments
from scoremode.verbs.scoring import check_fits


@spelled_out(AllArguments)
def plan(
    model: str,
    *,
    engine: str | None = None,
    tokenizer: str | None = None,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> dict[str, Any]:
    """A dry run: the windows, targets, work and memory of a run, without loading a weight.

    >>> import scoremode as sm
    >>> sm.plan("table:uniform", text="any text")["targets"]
    7
    """
    question, options = split_arguments(arguments)
    held = hold(model, engine, options, tokenizer)
    held.settings()  # refuses options that cannot work
    return plan_of(held, question, progress)


def plan_of(held: HeldModel, question: dict[str, Any], progress: Progress | None = None) -> dict[str, Any]:
    """What a question to a model would take."""
    asked, options = held.ask(question, progress), held.chosen.options
    made = asked.plan
    check_fits(made, asked.subject.vocabulary, asked.subject.context_length)
    return {
        "model": asked.subject.name,
        "engine": held.engine_name,
        "method": made.method,
        "method_settings": dict(made.settings),
        "corpus": asked.corpus.name,
        "corpus_sha256": asked.corpus.sha256,
        "documents": asked.tokens.documents,
        "tokens": len(asked.tokens),
        "windows": len(made),
        "targets": made.targets,
        "forward_tokens": made.forward_tokens,
        "coverage": made.coverage,
        "notes": list(made.notes),
        "average": made.average,
        "plan_digest": made.digest,
        "tokenizer": asdict(asked.tokens.tokenizer),
        "memory": memory_estimate(asked, options),
        "reference": reference_estimate(asked, options) if held.plugin.able().hidden_states else None,
        "first_windows": [_drawn(made, w) for w in range(min(3, len(made)))],
    }


def _drawn(made: Plan, w: int) -> dict[str, int]:
    return {
        "feeds_from": int(made.start[w]),
        "feeds_to": int(made.stop[w]),
        "lead": int(made.lead[w]),
        "scores_from": int(made.first[w]),
        "scores_to": int(made.last[w]),
    }


def reference_estimate(asked: Question, options: Options) -> dict[str, int] | None:
    """Bytes that ``scoremode reference`` would keep on disk, and what logits in float16 would take instead."""
    subject = asked.subject
    if not subject.hidden_size or not subject.vocabulary:
        return None
    wanted = _given(options, "dtype")
    on_cpu = wanted is None and (_given(options, "device") or "cpu") == "cpu"
    dtype = wanted if wanted not in (None, "auto") else subject.dtype or "float32"
    kept = "float32" if on_cpu or dtype not in RAW_DTYPES else str(dtype)
    return estimate_bytes(asked.plan.targets, subject.hidden_size, kept, subject.vocabulary)


def memory_estimate(asked: Question, options: Options) -> dict[str, int]:
    """Bytes, roughly: weights as stored, the states of a batch, the logits alive at once, and scores."""
    from scoremode.head.budget import default_budget

    subject, longest = asked.subject, int(asked.plan.lengths.max())
    batch = max(longest, _given(options, "batch_tokens") or 512)
    vocabulary = subject.vocabulary or 0
    return {
        "weights": subject.weight_bytes or 0,
        "activations": batch * (subject.hidden_size or 0) * 4 * 12,  # a layer's states and its MLP's, about
        "logits": min(default_budget(_given(options, "device") or "cpu"), longest * vocabulary * 4),
        "logits_if_whole": longest * vocabulary * 4,
        "scores": min(asked.plan.targets, BLOCK) * 36,  # the rest lies on disk
    }


def _given(options: Options, name: str) -> Any:
    """An option where the engine has it and it was chosen; else None."""
    return options.given().get(name)
