"""Makes a Plan from a method and tokens: chooses sizes, applies limits, and notes deviations from the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from scoremode.core.plan.path import DecodePath
from scoremode.core.plan.plan import Plan, counts_between
from scoremode.core.plan.recipes import Method, WindowSizes, WindowSpans
from scoremode.core.text.tokens import Tokens
from scoremode.errors import CorpusError, InputError, MethodError, ModelError
from scoremode.values import Ids, Ints


def choose_sizes(method: Method, context: int | None, stride: int | None, model_context: int | None) -> WindowSizes:
    """Chooses window and stride: the user's, else the recipe's. The window is never longer than the model's context."""
    if model_context is not None and model_context < 2:
        raise ModelError("the model's context of 1 token leaves no room for a target", fix="choose another model")
    chosen = context or method.context or model_context
    if chosen is None:
        raise MethodError("this model does not say how long its context is", fix="give --context-length")
    if model_context is not None and chosen > model_context:
        if context is None and method.fits_model:
            chosen = model_context
        else:
            whose = f"--context-length {chosen}" if context else f"{method.name}'s own context of {chosen}"
            raise MethodError(
                f"{whose} is longer than the model's {model_context}", fix=f"give --context-length {model_context}"
            )
    step = stride if stride is not None else min(method.stride or chosen, chosen)
    if step > chosen:
        raise MethodError(
            f"--stride {step} is larger than the context of {chosen} and would skip tokens",
            fix=f"give --stride {chosen} or less",
        )
    return WindowSizes(chosen, step)


def make_plan(
    method: Method,
    tokens: Tokens,
    *,
    context_length: int | None = None,
    stride: int | None = None,
    max_windows: int | None = None,
    model_context: int | None = None,
    path: DecodePath | None = None,
) -> Plan:
    """Makes a method's plan over tokens. ``max_windows`` 0 means all windows, None means the recipe's own limit."""
    sizes = choose_sizes(method, context_length, stride, model_context)
    cut = method.windows(tokens, sizes)
    spans = cut if isinstance(cut, WindowSpans) else WindowSpans.of(cut)
    limit = method.max_windows if max_windows is None else max_windows
    windows = spans.taken(slice(limit)) if limit else spans
    if tokens.target_mask is not None:
        windows = windows.taken(counts_between(tokens.target_mask, windows.first, windows.last) > 0)
    if not (windows.last > windows.first).any():
        raise _nothing_to_score(method, tokens, sizes, len(windows))
    settings: dict[str, Any] = {
        "context_length": sizes.context,
        "special_tokens": method.special,
        "max_windows": limit,
        **(path.settings() if path else {}),  # nothing for prefill: plans from before there were paths stay the same
    }
    if method.stride is not None:
        settings["stride"] = sizes.stride
    weight = windows.weight if windows.weight is not None and windows.weight.any() else np.ones(len(windows))
    made = Plan(
        method=method.name,
        settings=tuple(sorted(settings.items())),
        ids=tokens.ids,
        doc_starts=tokens.doc_starts,
        start=windows.start,
        stop=windows.stop,
        first=windows.first,
        last=windows.last,
        lead=windows.lead,
        mask=tokens.target_mask,
        joined_at=tokens.joined_at,
        doc_group=tokens.doc_group,
        weight=weight if method.average == "window" else None,
        average=method.average,
        vocabulary=tokens.tokenizer.size if method.real_vocabulary else None,
        whole_documents=method.whole_documents,
        notes=tuple(_notes(method, tokens, sizes, len(spans), len(windows))),
    )
    return made if path is None else replace(made, notes=(*made.notes, *_path_notes(made, path)))


def _nothing_to_score(method: Method, tokens: Tokens, sizes: WindowSizes, windows: int) -> InputError:
    count = len(tokens)
    if windows:
        return MethodError(
            f"{method.name} has no target in windows of {sizes.context} tokens", fix="give a larger --context-length"
        )
    if count < 2 and method.arrangement != "texts":
        return CorpusError(
            f"the text has {count} token{'s' * (count != 1)}; the first has no context, so there is nothing to score",
            fix="give a text of at least two tokens",
        )
    if tokens.target_mask is not None and not tokens.target_mask.any():
        return CorpusError(
            "no token that is fed may be a target", fix="leave --assistant-only out, or raise --document-tokens"
        )
    return CorpusError(
        f"{method.name} needs full windows of {sizes.context} tokens and the text has {count}",
        fix=f"give a longer text, --context-length {max(2, count // 2)}, or --method sliding-once",
    )


def _path_notes(plan: Plan, path: DecodePath) -> Iterator[str]:
    """Yields what a reader of decoded scores must know: targets that no step predicts, and steps with few windows."""
    first_decoded = plan.start - (plan.lead >= 0) + path.prefill_tokens + 1  # the first target that a step predicts
    early = int(plan.allowed(plan.first, np.clip(first_decoded, plan.first, plan.last)).sum())
    if path.prefill_tokens > 1 and early:
        yield f"{early:,} of {plan.targets:,} targets are predicted by prefill, the others by decode"
    if len(plan) < path.sequences:
        yield f"{len(plan)} of {path.sequences} sequences in use: there are no more windows"


def _notes(method: Method, tokens: Tokens, sizes: WindowSizes, total: int, window_count: int) -> Iterator[str]:
    if method.context is not None and sizes.context != method.context:
        yield f"context length {sizes.context} instead of the recipe's {method.context}"
    if method.stride is not None and sizes.stride != min(method.stride, sizes.context):
        yield f"stride {sizes.stride} instead of the recipe's {method.stride}"
    if window_count < total:
        yield f"{window_count} of {total} windows scored"
    short = int((np.diff(tokens.doc_starts) < (1 if method.arrangement in ("pages", "texts") else 2)).sum())
    if short:
        yield f"{short} document{'s' if short > 1 else ''} too short to have a target"
    if method.arrangement == "texts":
        cut = int((np.diff(tokens.doc_starts) > sizes.context - 1).sum())
        if cut:
            yield f"{cut} texts cut to the context"


def plan_of_pairs(sequences: list[tuple[Ids, int]], groups: Ints) -> Plan:
    """Makes a plan for P(target | prompt) from sequences (ids, index of first target). Equal groups share a prompt.

    tokens   0 1 2 | 3 4      prompt | target
    feed    [0 1 2   3]       score 3 4       the last target is not fed
    """
    lengths = np.array([len(ids) for ids, _ in sequences], dtype=np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    firsts = starts + np.array([first for _, first in sequences], dtype=np.int64)
    return Plan(
        method="sequence",
        settings=(),
        ids=np.concatenate([ids for ids, _ in sequences]).astype(np.int32),
        doc_starts=np.concatenate([[0], ends]).astype(np.int64),
        start=starts,
        stop=ends - 1,
        first=firsts,
        last=ends,
        lead=np.full(len(sequences), -1, dtype=np.int32),
        prefix_group=groups,
    )
