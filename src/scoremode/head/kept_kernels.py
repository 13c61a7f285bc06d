"""Triton kernels that read logits of both models from memory, and give every column of a divergence."""

from __future__ import annotations

import triton
import triton.language as tl

from scoremode.head.fused_kernels import LOG2_E, MASKED, SIZES, span_of_tiles


@triton.jit
def _terms(x_p, x_q, c_p, rest_p, c_q, rest_q, gap, gap_rest, forbids: tl.constexpr):
    """Returns what ids add to KL(p‖q), to KL(q‖p) and to Σ |p - q|. All are at least 0.

    d = log p - log q. An id adds p · (d + exp(-d) - 1) to KL(p‖q), where the last two terms are q - p and add up to 0
    over the vocabulary. So an error of the normalizers cancels. For small d, d + exp(-d) - 1 is a series.
    """
    d = x_p - x_q - gap - gap_rest
    p = tl.exp2(tl.fma(x_p, LOG2_E, -c_p) - rest_p)
    q = tl.exp2(tl.fma(x_q, LOG2_E, -c_q) - rest_q)
    series = 0.0013888889 + d * (-0.00019841270 + d * 0.000024801587)
    series = 0.5 + d * (-0.16666667 + d * (0.041666667 + d * (-0.0083333333 + d * series)))
    bend = d * d * series
    less = bend - d  # exp(-d) - 1
    near = tl.abs(d) < 0.5
    gained = q - p
    kl = tl.where(near, p * bend, p * d + gained)
    kl_reverse = tl.where(near, -p * (d * less + bend), -q * d - gained)
    apart = tl.abs(tl.where(near, p * less, gained))
    if forbids:  # an id that only one of them forbids makes the divergence from the other infinite
        kl = tl.where((x_q <= MASKED) & (p > 0.0) & (x_p > MASKED), float("inf"), kl)
        kl_reverse = tl.where((x_p <= MASKED) & (q > 0.0) & (x_q > MASKED), float("inf"), kl_reverse)
    return kl, kl_reverse, apart


@triton.jit
def _normalizer(largest, total):
    """Returns log₂ of Σ exp(x) in float64, for logits that are multiplied by LOG2_E as float32 rounds it."""
    return largest.to(tl.float64) * 1.44269502162933349609375 + tl.log2(total.to(tl.float64))


@triton.jit(do_not_specialize=["columns", "stride_p", "stride_q"])
def diverge_rows(
    kept_p,
    kept_q,
    largest_p,
    total_p,
    largest_q,
    total_q,
    kl_out,
    kl_reverse_out,
    apart_out,
    columns,
    stride_p,
    stride_q,
    chunk: tl.constexpr,
    forbids: tl.constexpr,
):
    """Adds up ``_terms`` of a row of logits of both models, which the largest logits and the totals normalize."""
    row = tl.program_id(0)
    most_p, all_p = tl.load(largest_p + row), tl.load(total_p + row)
    most_q, all_q = tl.load(largest_q + row), tl.load(total_q + row)
    log_p, log_q = _normalizer(most_p, all_p), _normalizer(most_q, all_q)
    c_p, c_q = tl.ceil(log_p), tl.ceil(log_q)
    rest_p, rest_q = (log_p - c_p).to(tl.float32), (log_q - c_q).to(tl.float32)
    c_p, c_q = c_p.to(tl.float32), c_q.to(tl.float32)
    exact_gap = (
        most_p.to(tl.float64) - most_q.to(tl.float64) + tl.log(all_p.to(tl.float64)) - tl.log(all_q.to(tl.float64))
    )
    gap = exact_gap.to(tl.float32)
    gap_rest = (exact_gap - gap.to(tl.float64)).to(tl.float32)
    at_p, at_q = kept_p + row.to(tl.int64) * stride_p, kept_q + row.to(tl.int64) * stride_q
    kl = tl.zeros((chunk,), tl.float32)
    kl_reverse = tl.zeros((chunk,), tl.float32)
    apart = tl.zeros((chunk,), tl.float32)
    for begin in range(0, columns, chunk):
        column = begin + tl.arange(0, chunk)
        real = column < columns
        x_p = tl.load(at_p + column, mask=real, other=2.0 * MASKED, eviction_policy="evict_first")
        x_q = tl.load(at_q + column, mask=real, other=2.0 * MASKED, eviction_policy="evict_first")
        more, more_reverse, more_apart = _terms(x_p, x_q, c_p, rest_p, c_q, rest_q, gap, gap_rest, forbids)
        kl += more
        kl_reverse += more_reverse
        apart += more_apart
    tl.store(kl_out + row, tl.sum(kl.to(tl.float64), 0))
    tl.store(kl_reverse_out + row, tl.sum(kl_reverse.to(tl.float64), 0))
    tl.store(apart_out + row, tl.sum(apart.to(tl.float64), 0))


@triton.jit
def _keys(x, ids):
    """Returns the keys of first_choices.py: ordered like the logits; of equal logits, the lower id has the larger."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit(do_not_specialize=SIZES)
def find_first_choices(
    kept,
    largest,
    out,
    rows,
    columns,
    first_id,
    tiles,
    long_spans,
    spans,
    span: tl.constexpr,
    short: tl.constexpr,
    tile_columns: tl.constexpr,
    block_spans: tl.constexpr,
    count: tl.constexpr,
    slots: tl.constexpr,
):
    """Writes the keys (rows, count) of a row's first choices.

    Looks only at the ``count`` spans with the largest logits: no logit of another span comes before all of those.
    """
    absent = -9223372036854775807 - 1
    row = tl.program_id(0)
    index = tl.arange(0, block_spans)
    x = tl.load(largest + index.to(tl.int64) * rows + row, mask=index < spans, other=2.0 * MASKED)
    order = tl.where(index < spans, _keys(x, index), absent)
    slot = tl.arange(0, slots)
    begin = tl.zeros((slots,), tl.int32)
    end = tl.zeros((slots,), tl.int32)
    for j in tl.static_range(count):
        best = tl.max(order, 0)
        order = tl.where(order == best, absent, order)
        first, last = span_of_tiles(0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), tiles, long_spans, span, short)
        taken = (slot == j) & (best > absent)
        begin = tl.where(taken, first * tile_columns, begin)
        end = tl.where(taken, tl.minimum(last * tile_columns, columns), end)
    column = begin[:, None] + tl.arange(0, span * tile_columns)[None, :]
    real = column < end[:, None]
    x = tl.load(kept + row.to(tl.int64) * (tiles * tile_columns) + column, mask=real, other=0.0)
    keys = tl.where(real, _keys(x, column + first_id), absent)
    for j in tl.static_range(count):
        best = tl.max(tl.max(keys, 1), 0)
        keys = tl.where(keys == best, absent, keys)
        tl.store(out + row.to(tl.int64) * count + j, best)
