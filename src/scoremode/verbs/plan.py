"""``scoremode plan``: a dry run that loads no weight."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from scoremode.engines.base import EngineOptions, gather_options
from scoremode.engines.registry import chosen_settings, engine_name
from scoremode.plan.plan import Plan
from scoremode.store.reference import estimate_bytes
from scoremode.store.reference_format import RAW_DTYPES
from scoremode.values import BLOCK
from scoremode.verbs.question import Question, ask
from scoremode.verbs.scoring import check_fits


def plan(
    model: str, *, options: EngineOptions | None = None, engine: str | None = None, **question: Any
) -> dict[str, Any]:
    """A dry run: the windows, targets, work and memory of a run, without loading a weight.

    >>> import scoremode as sm
    >>> sm.plan("table:uniform", text="any text")["targets"]
    7
    """
    options = gather_options(options, question)
    asked = ask(model, trust_remote_code=bool(options.trust_remote_code), **question)
    made = asked.plan
    chosen = engine_name(engine, asked.subject)
    chosen_settings(asked.subject, chosen, options)
    check_fits(made, asked.subject.vocabulary, asked.subject.context_length)
    return {
        "model": model,
        "engine": chosen,
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
        "reference": reference_estimate(asked, options),
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


def reference_estimate(asked: Question, options: EngineOptions) -> dict[str, int] | None:
    """Bytes that ``scoremode reference`` would keep on disk, and what logits in float16 would take instead."""
    facts = asked.subject.facts
    if facts is None or not facts.hidden_size or not facts.vocabulary:
        return None
    stored = facts.config.get("dtype") or facts.config.get("torch_dtype") or "float32"
    wanted = options.dtype if options.dtype not in (None, "auto") else stored
    on_cpu = options.dtype is None and (options.device or "cpu") == "cpu"
    dtype = "float32" if on_cpu or wanted not in RAW_DTYPES else str(wanted)
    return estimate_bytes(asked.plan.targets, facts.hidden_size, dtype, facts.vocabulary)


def memory_estimate(asked: Question, options: EngineOptions) -> dict[str, int]:
    """Bytes, roughly: weights as stored, the states of a batch, the logits alive at once, and scores."""
    from scoremode.head.budget import default_budget

    facts = asked.subject.facts
    longest = int(asked.plan.lengths.max())
    batch = max(longest, options.batch_tokens or 512)
    hidden = (facts.hidden_size or 0) if facts else 0
    vocabulary = (facts.vocabulary or 0) if facts else 256
    return {
        "weights": facts.weight_bytes if facts else 0,
        "activations": batch * hidden * 4 * 12,  # a layer's states and its MLP's, about
        "logits": min(default_budget(options.device or "cpu"), longest * vocabulary * 4),
        "logits_if_whole": longest * vocabulary * 4,
        "scores": min(asked.plan.targets, BLOCK) * 36,  # the rest lies on disk
    }
