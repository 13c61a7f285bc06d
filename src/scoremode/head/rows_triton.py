"""Reduces rows of logits in one pass over them, on a GPU with Triton: to partials, or to one log-probability.

Each logit is read once for all results: the largest logit, its id, Σexp, Σexp·x, and how many ids rank before each
target. Every lane of a program has its own numbers, and the lanes are joined once at the end in a fixed order. So the
result has the same bits on every run and does not depend on which rows share a launch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

LANES = 2048
WIDE_LANES = 8192  # there are few rows, so each needs many loads under way


@triton.jit  # type: ignore[untyped-decorator]
def _reduce_row(  # type: ignore[no-untyped-def]  # a kernel takes pointers one by one
    logits,
    row_stride,
    width,
    targets,
    at_target,
    first_id,
    largest_out,
    total_out,
    weighted_out,
    where_out,
    before_out,
    k: tl.constexpr,
    k_padded: tl.constexpr,
    lanes: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, lanes)
    far = -3.0e38
    largest = tl.full((lanes,), far, tl.float32)
    where = tl.full((lanes,), 2147483647, tl.int32)
    total = tl.zeros((lanes,), tl.float32)
    weighted = tl.zeros((lanes,), tl.float32)
    any_nan = tl.zeros((lanes,), tl.int32)
    slot = tl.arange(0, k_padded)
    asked = slot < k
    target = tl.load(targets + row * k + slot, mask=asked, other=0) - first_id
    value = tl.load(at_target + row * k + slot, mask=asked, other=float("inf"))
    before = tl.zeros((k_padded,), tl.int32)
    for begin in range(0, width, lanes):
        ids = begin + lane
        real = ids < width
        x = tl.load(logits + row * row_stride + ids, mask=real, other=float("-inf")).to(tl.float32)
        any_nan = any_nan | ((x != x) & real).to(tl.int32)  # noqa: PLR0124  # Triton's isnan
        better = x > largest
        new = tl.where(better, x, largest)
        shrink = tl.exp(largest - new)
        gap = tl.maximum(x - new, -1.0e4)
        p = tl.where(real & (x > far), tl.exp(gap), 0.0)
        weighted = shrink * (weighted + (largest - new) * total) + p * gap
        total = shrink * total + p
        where = tl.where(better, ids, where)
        largest = new
        if k == 1:
            # only one target to compare with, so no second axis is needed
            v = tl.sum(tl.where(asked, value, 0.0))
            t = tl.sum(tl.where(asked, target, 0))
            ahead = ((x > v) | ((x == v) & (ids < t))) & real
            before += tl.where(asked, tl.sum(ahead.to(tl.int32)), 0)
        else:
            ahead = (x[None, :] > value[:, None]) | ((x[None, :] == value[:, None]) & (ids[None, :] < target[:, None]))
            before += tl.sum((ahead & real[None, :]).to(tl.int32), 1)
    top = tl.max(largest, 0)
    drop = largest - top
    share = tl.where(total > 0, tl.exp(drop), 0.0)
    poison = tl.where(tl.max(any_nan, 0) > 0, float("nan"), 0.0)
    sum_total = tl.sum(share * total, 0)
    sum_weighted = tl.sum(tl.where(total > 0, share * (weighted + drop * total), 0.0), 0)
    first_choice = tl.min(tl.where(largest == top, where, 2147483647), 0) + first_id
    tl.store(largest_out + row, tl.where(top <= far, float("-inf"), top) + poison)
    tl.store(total_out + row, sum_total + poison)
    tl.store(weighted_out + row, sum_weighted)
    tl.store(where_out + row, first_choice.to(tl.int64))
    tl.store(before_out + row * k + slot, before.to(tl.int64), mask=asked)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_exp(row, width, shift, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, lanes)
    whole = width // lanes * lanes
    total = tl.zeros((lanes,), tl.float32)
    for begin in range(0, whole, lanes):  # without a mask, loads are wide for every vocabulary
        total += tl.exp(tl.load(row + begin + lane).to(tl.float32) - shift)
    ids = whole + lane
    x = tl.load(row + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
    return tl.sum(total + tl.exp(x - shift), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _logprob(row, width, token, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    """Subtracts the token's own logit: then -log Σexp is the result, and the largest logit need not be known."""
    at_token = tl.load(row + token).to(tl.float32)
    shift = at_token
    total = _sum_exp(row, width, shift, lanes)
    if not (total < float("inf")):  # a logit is larger by more than 88, or something is not finite
        for begin in range(0, width, lanes):
            ids = begin + tl.arange(0, lanes)
            x = tl.load(row + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
            shift = tl.maximum(shift, tl.max(x, 0))
        total = _sum_exp(row, width, shift, lanes)
    return at_token - shift - tl.log(total)


@triton.jit(do_not_specialize=["first"])  # type: ignore[untyped-decorator]
def _write_logprobs(  # type: ignore[no-untyped-def]
    own,
    own_stride,
    drawn,
    drawn_stride,
    width,
    chosen,
    chosen_stride,
    lines,
    first,
    has_filters: tl.constexpr,
    lanes: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(chosen + row * chosen_stride).to(tl.int32)
    line = lines + (first + row) * 3
    if tl.program_id(1) == 0:
        found = _logprob(own + row * own_stride, width, token, lanes)
        tl.store(line + 1, found)
        tl.store(line + 2, token.to(tl.float32, bitcast=True))
        if not has_filters:
            tl.store(line, found)
    else:
        tl.store(line, _logprob(drawn + row * drawn_stride, width, token, lanes))


def write_logprobs(own: Tensor, drawn: Tensor | None, chosen: Tensor, lines: Tensor, at: range) -> None:
    """Writes the lines ``at`` for as many rows of logits: two log-probabilities, and the bits of the token.

    ``drawn`` are the logits after filters, None without; then both log-probabilities are those
    of ``own``. One launch and no other operation, because it runs between the steps of an engine.
    """
    second = own if drawn is None else drawn
    assert own.stride(1) == second.stride(1) == 1, "the logits of a row must be contiguous"
    assert lines.is_contiguous(), "a line has three numbers"
    if at:
        launch: Any = _write_logprobs[(len(at), 1 if drawn is None else 2)]
        logits = (own, own.stride(0), second, second.stride(0), own.shape[1])
        options = {"has_filters": drawn is not None, "lanes": WIDE_LANES, "num_warps": 16}
        launch(*logits, chosen, chosen.stride(0), lines, at.start, **options)


def reduce_rows(x: Tensor, targets: Tensor, at_target: Tensor, first_id: int, made: Any) -> None:
    """Reduces logits (n, width) of the ids from ``first_id`` on, and fills ``made``, a ``columns.Partials``."""
    n, k = targets.shape
    assert x.stride(1) == 1, "the logits of a row must be contiguous"
    inputs = (x, x.stride(0), x.shape[1], targets.contiguous(), at_target.contiguous(), first_id)
    outputs = (made.largest, made.total, made.weighted, made.where, made.before)
    lanes = LANES if k <= 4 else 256
    launch: Any = _reduce_row[(n,)]
    launch(*inputs, *outputs, k=k, k_padded=triton.next_power_of_2(k), lanes=lanes, num_warps=8)
