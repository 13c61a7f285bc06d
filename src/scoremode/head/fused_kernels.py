"""The Triton kernels of fused.py, and the functions that they use.

Sums use powers of 2 relative to an *integer* c = ⌈largest · log₂e⌉, not relative to the largest logit itself. Then
z = x·log₂e - c is rounded only once however large x is, and changing c multiplies a sum by a power of two, which is
exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MASKED = tl.constexpr(-5.0e6)  # stands for -inf: below any logit, and exact to a few units when multiplied by log₂e
UNREAL = tl.constexpr(4.0e6)  # larger magnitudes are not logits: negative ones are masked, positive ones become NaN
PAST_END = tl.constexpr(1 << 30)  # stands for an id after all tiles
HUGE = tl.constexpr(2.0**100)
TINY = tl.constexpr(2.0**-99)
SMALLEST = tl.constexpr(2.0**-149)  # the smallest float above 0

# the planes of floats that a span stores; scores have the first ones, a divergence all
LARGEST, TOTAL, WEIGHTED, LARGEST_P, TOTAL_P, CROSS = map(tl.constexpr, range(6))
SCORE_PLANES, DIVERGENCE_PLANES = LARGEST_P.value, CROSS.value + 1
WHERE, COUNTS = map(tl.constexpr, range(2))  # the planes of whole numbers: the first choice, and a count per target

# sizes vary from call to call, so Triton must not compile special versions for 1 or multiples of 16
SIZES = ("rows", "columns", "first_id", "tiles", "long_spans", "spans", "k")


# ── parts of kernels ─────────────────────────────────────────────────────────────────────────────────────────────────
@triton.jit
def _product_of_rows(
    hidden, weight, row, real_row, column, real_column, width, hidden_stride, weight_stride,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, depth: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """Computes the products of some rows of ``hidden`` and ``weight`` in float32. Rows that are not real count as 0."""
    inner = tl.arange(0, depth)
    a_ptr = hidden + row.to(tl.int64)[:, None] * hidden_stride + inner[None, :]
    b_ptr = weight + column.to(tl.int64)[None, :] * weight_stride + inner[:, None]
    acc = tl.zeros((tile_rows, tile_columns), tl.float32)
    for step in range(0, tl.cdiv(width, depth)):
        real = inner < width - step * depth
        a = tl.load(a_ptr + step * depth, mask=real_row[:, None] & real[None, :], other=0.0)
        b = tl.load(b_ptr + step * depth, mask=real_column[None, :] & real[:, None], other=0.0)
        if precision == "ieee":
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision=precision)
    return acc


@triton.jit
def _product(
    hidden,
    weight,
    first_row,
    first_column,
    rows,
    columns,
    width,
    hidden_stride,
    weight_stride,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    depth: tl.constexpr,
    descriptors: tl.constexpr,
    precision: tl.constexpr,
):
    """Computes a tile of ``hidden @ weight.T`` in float32. Elements outside the matrices count as 0."""
    if descriptors:
        acc = tl.zeros((tile_rows, tile_columns), tl.float32)
        for step in range(0, tl.cdiv(width, depth)):
            a = hidden.load([first_row, step * depth])
            b = weight.load([first_column, step * depth])
            if precision == "ieee":
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b.T, acc, input_precision=precision)
    else:
        row = first_row + tl.arange(0, tile_rows)
        column = first_column + tl.arange(0, tile_columns)
        acc = _product_of_rows(
            hidden, weight, row, row < rows, column, column < columns, width, hidden_stride, weight_stride,
            tile_rows, tile_columns, depth, precision,
        )  # fmt: skip
    return acc


@triton.jit
def _read(kept, row, first_row, first_column, rows, stride, tile_columns: tl.constexpr, descriptors: tl.constexpr):
    """Reads a tile of logits that ``reduce_spans`` kept."""
    if descriptors:
        x = kept.load([first_row, first_column])
    else:
        place = row.to(tl.int64)[:, None] * stride + first_column + tl.arange(0, tile_columns)[None, :]
        x = tl.load(kept + place, mask=(row < rows)[:, None], other=0.0)
    return x


@triton.jit
def _tanh(u):
    """Computes tanh, near 0 by its series as 1 - e would cancel. Some Triton versions and the interpreter lack tanh."""
    e = tl.exp2(tl.abs(u) * (-2.0 * LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    square = u * u
    near = u * (1.0 + square * (-0.333333333 + square * (0.133333333 + square * (-0.053968254 + square * 0.021869489))))
    return tl.where(tl.abs(u) < 0.25, near, tl.where(u < 0, -far, far))


@triton.jit
def _shaped(x, scale, cap, has_scale: tl.constexpr, has_cap: tl.constexpr):
    if has_scale:
        x = x * scale
    if has_cap:
        x = cap * _tanh(x / cap)
    return x


@triton.jit
def _to_logits(
    x,
    bias,
    first_column,
    columns,
    scale,
    cap,
    has_bias: tl.constexpr,
    has_scale: tl.constexpr,
    has_cap: tl.constexpr,
):
    """Turns products into logits: bias, scale, cap. Forbidden ids get MASKED, ids past the vocabulary a lower value."""
    local = tl.arange(0, x.shape[1])  # relative to the tile: ids are computed only in the rare cases that need them
    if has_bias:
        added = tl.load(bias + first_column + local, mask=local < columns - first_column, other=0.0)
        x += added.to(tl.float32)[None, :]
    x = _shaped(x, scale, cap, has_scale, has_cap)
    if has_bias:
        x = tl.where(x < MASKED, MASKED, x)  # a bias of -inf forbids an id
    if first_column + x.shape[1] > columns:
        x = tl.where((local < columns - first_column)[None, :], x, 2.0 * MASKED)
    return x


@triton.jit
def _next_below(x):
    """Returns the next float below x: ``y > _next_below(x)`` is ``y >= x``. For 0, returns a float ``_above`` sees."""
    bits = x.to(tl.int32, bitcast=True)
    stepped = tl.where(bits > 0, bits - 1, bits + 1).to(tl.float32, bitcast=True)
    return tl.where(x == 0.0, -TINY, stepped)


@triton.jit
def _above(x, threshold, compare: tl.constexpr):
    """Returns 1.0 where x > threshold, else 0.0, for a column of thresholds.

    A comparison takes twice as long as a fused multiply-add, and its result must be converted to a number. Instead, one
    saturating multiply-add computes (x - threshold) · 2¹⁰⁰ and clamps it to 0 … 1. Different floats differ by more than
    2⁻¹⁰⁰ unless both are below 2⁻⁷⁶; in that case the caller counts by id instead.
    """
    if compare:
        answer = (x > threshold[:, None]).to(tl.float32)
    else:
        answer = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0f71800000, $2;", "=f,f,f", [x, (threshold * -HUGE)[:, None]], tl.float32, True, 1
        )
    return answer


@triton.jit
def _is_tiny(x):
    """Is x so close to 0 that ``_above`` may not distinguish neighbouring floats?"""
    return tl.abs(x) < TINY * 1.0e9


@triton.jit
def _sum_of_places(chosen):
    """Returns the sum of 8192 + place over the places of each row that contain a 1.

    Matrix units give columns 8j + 2i and 8j + 2i + 1 of a row to the i-th of four threads. In this order of summation
    8j is a compile-time constant. A number that depends on the thread would need one register per column.
    """
    rows: tl.constexpr = chosen.shape[0]
    columns: tl.constexpr = chosen.shape[1]
    by_thread = tl.permute(tl.reshape(chosen, (rows, columns // 8, 4, 2)), (0, 2, 1, 3))
    by_thread = tl.reshape(by_thread, (rows, 4, columns // 4))
    step = tl.arange(0, columns // 4)
    number = (8192 + (step >> 1) * 8 + (step & 1)).to(tl.float32)
    sums = tl.sum(by_thread * number[None, None, :], 2)
    return tl.sum(tl.where(sums > 0.0, sums + (2 * tl.arange(0, 4)).to(tl.float32)[None, :], 0.0), 1)


@triton.jit
def _place_by_id(x, ids, largest):
    return tl.min(tl.where(x == largest[:, None], ids[None, :], PAST_END), 1)


@triton.jit
def _count_by_id(x, ids, value, target):
    """Counts the ids that rank before the target: those with larger logits, and lower ids with equal logits."""
    below = tl.where(value == 0.0, -SMALLEST, _next_below(value))
    limit = tl.where(ids[None, :] < target[:, None], below[:, None], value[:, None])
    return tl.sum((x > limit).to(tl.int32), 1)


@triton.jit
def _quick_place_and_count(x, largest, value, target, first_column, has_target, compare: tl.constexpr):
    """Returns (id of the largest logit, ids that rank before the target, is this doubtful?) for each row of a tile.

    The sum of 8192 + place over all places with the largest logit gives its place if there is only one. In a tile that
    is entirely before the target, equal logits count. In a tile after the target, they do not. So one threshold per row
    is enough. If equal logits would have to be distinguished by their ids, the result is doubtful.
    """
    place = _sum_of_places(_above(x, _next_below(largest), compare))
    count = tl.sum(_above(x, tl.where(target >= first_column + x.shape[1], _next_below(value), value), compare), 1)
    doubtful = _is_tiny(value) | _is_tiny(largest) | (place < 8192.0) | (place >= 16384.0)
    if has_target:
        inside = (target >= first_column) & (target < first_column + x.shape[1])
        at_least = tl.sum(_above(x, _next_below(value), compare), 1)
        doubtful = doubtful | (inside & (at_least - count != 1.0))
    return first_column + place.to(tl.int32) - 8192, count.to(tl.int32), doubtful.to(tl.int32)


@triton.jit
def _place_and_count(x, largest, value, target, first_column, has_target, compare: tl.constexpr):
    """Returns (lowest id with the largest logit, count of ids that rank before the target) for each row of a tile."""
    where, count, doubtful = _quick_place_and_count(x, largest, value, target, first_column, has_target, compare)
    if tl.max(doubtful, 0) != 0:
        ids = first_column + tl.arange(0, x.shape[1])
        where = _place_by_id(x, ids, largest)
        count = _count_by_id(x, ids, value, target)
    return where, count


@triton.jit
def _target(targets, at_target, row, real_row, columns, first_id, j, k):
    """Returns (local id, logit) of the j-th target of each row; PAST_END for a target after this slice of ids."""
    at = row.to(tl.int64) * k + j
    target = tl.load(targets + at, mask=real_row, other=-1).to(tl.int32) - first_id
    target = tl.where(target >= columns, PAST_END, target)
    return target, tl.maximum(tl.load(at_target + at, mask=real_row, other=0.0), MASKED)


@triton.jit
def _place_and_counts(
    x, tile_largest, targets, at_target, counts, row, real_row,
    columns, first_id, k, first_column, has_target, is_first,
    plane, compare: tl.constexpr,
):  # fmt: skip
    """Does ``_place_and_count`` for k targets. Adds their counts to those of the span's earlier tiles in memory."""
    where = row
    for j in range(0, k):
        target, value = _target(targets, at_target, row, real_row, columns, first_id, j, k)
        where, count = _place_and_count(x, tile_largest, value, target, first_column, has_target, compare)
        slot = counts + j * plane
        if not is_first:
            count += tl.load(slot, mask=real_row, other=0)
        tl.store(slot, count, mask=real_row)
    return where


@triton.jit
def span_of_tiles(index, tiles, long_spans, span: tl.constexpr, short: tl.constexpr):
    """Returns (first tile, end tile) of a span. Spans of ``span`` tiles come first, then those of ``short`` tiles."""
    long = index < long_spans
    first = tl.where(long, index * span, long_spans * span + (index - long_spans) * short)
    return first, tl.minimum(first + tl.where(long, span, short), tiles)


@triton.jit
def _place(program, row_blocks, spans, group: tl.constexpr):
    """Returns (row block, span) of a program. All row blocks of a group process a span before the next one begins."""
    in_group = group * spans
    first = program // in_group * group
    size = tl.minimum(row_blocks - first, group)
    rest = program % in_group
    return first + rest % size, rest // size


@triton.jit
def _exponentials(x, unit_largest, largest):
    """Returns (new largest logit, old c - new c, z, exp₂(z)) for a unit of logits and the largest logit before it."""
    new = tl.maximum(largest, unit_largest)
    c = tl.ceil(new * LOG2_E)
    z = tl.fma(x, LOG2_E, -c[:, None])
    return new, tl.ceil(largest * LOG2_E) - c, z, tl.exp2(z)


@triton.jit
def _add_unit(x, unit_largest, largest, total, weighted):
    """Adds a unit of logits to the sums of a span. Returns (largest, total, weighted, and ``drop`` and z of the unit).

    ``reduce_spans`` and ``diverge_spans`` both add unit by unit, in the order of the ids. So a model has the same
    scores, to the bit, whether it is scored alone or compared.
    """
    largest, drop, z, e = _exponentials(x, unit_largest, largest)
    moved = tl.exp2(drop)
    weighted = moved * (weighted + drop * total) + tl.sum(e * z, 1)
    total = moved * total + tl.sum(e, 1)
    return largest, total, weighted, drop, z


@triton.jit
def _halves(x):
    """Returns the left and the right half of a tile."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, (rows, 2, columns // 2)), (0, 2, 1)))


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@triton.jit(do_not_specialize=SIZES)
def write_target_logits(
    hidden,
    weight,
    bias,
    targets,
    at_target,
    touched,
    rows,
    columns,
    width,
    hidden_stride,
    weight_stride,
    first_id,
    scale,
    cap,
    tiles,
    k,
    tile_columns: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    depth: tl.constexpr,
    has_bias: tl.constexpr,
    has_scale: tl.constexpr,
    has_cap: tl.constexpr,
    precision: tl.constexpr,
):
    """Writes the diagonal of hidden · weight[targets]ᵀ, computed by the same instructions as in ``reduce_spans``.

    The order of addition is also the same: another order could change the last bit, and a target could rank after
    itself. Also marks which tiles contain a target of which block of rows.
    """
    row = tl.program_id(0) * block + tl.arange(0, block)
    j = tl.program_id(1)
    real_row = row < rows
    local = tl.load(targets + row.to(tl.int64) * k + j, mask=real_row, other=0) - first_id
    inside = real_row & (local >= 0) & (local < columns)
    column = tl.where(inside, local, 0)
    acc = _product_of_rows(
        hidden,
        weight,
        row,
        real_row,
        column,
        inside,
        width,
        hidden_stride,
        weight_stride,
        block,
        block,
        depth,
        precision,
    )
    own = tl.arange(0, block)
    x = tl.sum(tl.where(own[:, None] == own[None, :], acc, 0.0), 1)
    if has_bias:
        x += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    x = _shaped(x, scale, cap, has_scale, has_cap)
    x = tl.where(inside & (x > -UNREAL) | (x != x), x, float("-inf"))  # noqa: PLR0124  # Triton's isnan
    tl.store(at_target + row.to(tl.int64) * k + j, x, mask=real_row)
    tl.store(touched + row // block_rows * tiles + column // tile_columns, tl.full((block,), 1, tl.int8), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def reduce_spans(
    hidden,
    weight,
    bias,
    targets,
    at_target,
    touched,
    floats,
    ints,
    kept,
    rows,
    columns,
    width,
    hidden_stride,
    weight_stride,
    first_id,
    scale,
    cap,
    tiles,
    long_spans,
    spans,
    k,
    span: tl.constexpr,
    short: tl.constexpr,
    group: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    depth: tl.constexpr,
    unit: tl.constexpr,
    one_target: tl.constexpr,
    keep: tl.constexpr,
    has_bias: tl.constexpr,
    has_scale: tl.constexpr,
    has_cap: tl.constexpr,
    descriptors: tl.constexpr,
    precision: tl.constexpr,
    compare: tl.constexpr,
):
    """Reduces the logits of a block of rows over one span of tiles. With ``keep``, also writes them to ``kept``."""
    row_block, span_index = _place(tl.program_id(0), tl.cdiv(rows, tile_rows), spans, group)
    first_tile, end_tile = span_of_tiles(span_index, tiles, long_spans, span, short)
    row = row_block * tile_rows + tl.arange(0, tile_rows)
    real_row = row < rows
    at = span_index.to(tl.int64) * rows + row  # where this span's numbers are stored
    plane = spans.to(tl.int64) * rows
    largest = tl.full((tile_rows,), 2.0 * MASKED, tl.float32)
    where = tl.zeros((tile_rows,), tl.int32)
    total = tl.zeros((tile_rows,), tl.float32)
    weighted = tl.zeros((tile_rows,), tl.float32)
    before = tl.zeros((tile_rows,), tl.int32)
    if one_target:
        target, value = _target(targets, at_target, row, real_row, columns, first_id, 0, k)
    for tile in range(first_tile, end_tile):
        first_column = tile * tile_columns
        x = _product(
            hidden,
            weight,
            row_block * tile_rows,
            first_column,
            rows,
            columns,
            width,
            hidden_stride,
            weight_stride,
            tile_rows,
            tile_columns,
            depth,
            descriptors,
            precision,
        )
        x = _to_logits(x, bias, first_column, columns, scale, cap, has_bias, has_scale, has_cap)
        if keep:
            place = row.to(tl.int64)[:, None] * (tiles * tile_columns) + first_column
            tl.store(kept + place + tl.arange(0, tile_columns)[None, :], x, mask=real_row[:, None])
        has_target = tl.load(touched + row_block * tiles + tile) != 0
        if unit == tile_columns:
            tile_largest = tl.max(x, 1)
        else:
            left, right = _halves(x)
            left_largest, right_largest = tl.max(left, 1), tl.max(right, 1)
            tile_largest = tl.maximum(left_largest, right_largest)
        if one_target:
            tile_where, count = _place_and_count(x, tile_largest, value, target, first_column, has_target, compare)
            before += count
        else:
            tile_where = _place_and_counts(
                x, tile_largest, targets, at_target, ints + COUNTS * plane + at, row, real_row,
                columns, first_id, k, first_column,
                has_target, tile == first_tile, plane, compare,
            )  # fmt: skip
        where = tl.where(tile_largest > largest, tile_where, where)
        if unit == tile_columns:
            largest, total, weighted, _, _ = _add_unit(x, tile_largest, largest, total, weighted)
        else:
            largest, total, weighted, _, _ = _add_unit(left, left_largest, largest, total, weighted)
            largest, total, weighted, _, _ = _add_unit(right, right_largest, largest, total, weighted)
    tl.store(floats + LARGEST * plane + at, largest, mask=real_row)
    tl.store(floats + TOTAL * plane + at, total, mask=real_row)
    tl.store(floats + WEIGHTED * plane + at, weighted, mask=real_row)
    tl.store(ints + WHERE * plane + at, where, mask=real_row)
    if one_target:
        tl.store(ints + COUNTS * plane + at, before, mask=real_row)


@triton.jit(do_not_specialize=SIZES)
def diverge_spans(
    hidden_p,
    weight_p,
    bias_p,
    hidden_q,
    weight_q,
    bias_q,
    targets,
    at_target,
    touched,
    floats,
    ints,
    rows,
    columns,
    width_p,
    width_q,
    hidden_stride_p,
    weight_stride_p,
    hidden_stride_q,
    weight_stride_q,
    first_id,
    scale_p,
    scale_q,
    cap_p,
    cap_q,
    tiles,
    long_spans,
    spans,
    k,
    span: tl.constexpr,
    short: tl.constexpr,
    group: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    depth: tl.constexpr,
    one_target: tl.constexpr,
    has_bias_p: tl.constexpr,
    has_bias_q: tl.constexpr,
    has_scale_p: tl.constexpr,
    has_scale_q: tl.constexpr,
    has_cap_p: tl.constexpr,
    has_cap_q: tl.constexpr,
    descriptors_p: tl.constexpr,
    descriptors_q: tl.constexpr,
    precision_p: tl.constexpr,
    precision_q: tl.constexpr,
    read_p: tl.constexpr,
    compare: tl.constexpr,
):
    """Does ``reduce_spans`` for q. Adds p's largest logit, Σ exp₂(z_p) and Σ exp₂(z_p) · (z_p - z_q), which KL needs.

    A tile is one unit. With ``read_p``, ``hidden_p`` is what ``reduce_spans`` kept of p.
    """
    row_block, span_index = _place(tl.program_id(0), tl.cdiv(rows, tile_rows), spans, group)
    first_tile, end_tile = span_of_tiles(span_index, tiles, long_spans, span, short)
    row = row_block * tile_rows + tl.arange(0, tile_rows)
    real_row = row < rows
    at = span_index.to(tl.int64) * rows + row
    plane = spans.to(tl.int64) * rows
    largest_p = tl.full((tile_rows,), 2.0 * MASKED, tl.float32)
    largest_q = tl.full((tile_rows,), 2.0 * MASKED, tl.float32)
    total_p = tl.zeros((tile_rows,), tl.float32)
    total_q = tl.zeros((tile_rows,), tl.float32)
    weighted_q = tl.zeros((tile_rows,), tl.float32)
    cross = tl.zeros((tile_rows,), tl.float32)
    where = tl.zeros((tile_rows,), tl.int32)
    before = tl.zeros((tile_rows,), tl.int32)
    if one_target:
        target, value = _target(targets, at_target, row, real_row, columns, first_id, 0, k)
    for tile in range(first_tile, end_tile):
        first_column = tile * tile_columns
        first_row = row_block * tile_rows
        if not read_p:
            x_p = _product(
                hidden_p, weight_p, first_row, first_column, rows, columns, width_p, hidden_stride_p, weight_stride_p,
                tile_rows, tile_columns, depth, descriptors_p, precision_p,
            )  # fmt: skip
            x_p = _to_logits(x_p, bias_p, first_column, columns, scale_p, cap_p, has_bias_p, has_scale_p, has_cap_p)
        x_q = _product(
            hidden_q, weight_q, first_row, first_column, rows, columns, width_q, hidden_stride_q, weight_stride_q,
            tile_rows, tile_columns, depth, descriptors_q, precision_q,
        )  # fmt: skip
        x_q = _to_logits(x_q, bias_q, first_column, columns, scale_q, cap_q, has_bias_q, has_scale_q, has_cap_q)
        if read_p:  # after the product, which needs all registers
            x_p = _read(hidden_p, row, first_row, first_column, rows, hidden_stride_p, tile_columns, descriptors_p)
            # Where q is not NaN, nothing changes. But p gets the layout of a product: the same order of sums, and so
            # the same bits, and no second copy in registers.
            x_p = tl.where(x_q == x_q, x_p, x_q)  # noqa: PLR0124
        has_target = tl.load(touched + row_block * tiles + tile) != 0
        top_p, top_q = tl.max(x_p, 1), tl.max(x_q, 1)
        if one_target:
            tile_where, count = _place_and_count(x_q, top_q, value, target, first_column, has_target, compare)
            before += count
        else:
            tile_where = _place_and_counts(
                x_q, top_q, targets, at_target, ints + COUNTS * plane + at, row, real_row,
                columns, first_id, k, first_column,
                has_target, tile == first_tile, plane, compare,
            )  # fmt: skip
        where = tl.where(top_q > largest_q, tile_where, where)
        largest_q, total_q, weighted_q, drop_q, z_q = _add_unit(x_q, top_q, largest_q, total_q, weighted_q)
        largest_p, drop_p, z_p, e_p = _exponentials(x_p, top_p, largest_p)
        apart = z_p - z_q
        if has_bias_q:  # an id that only q forbids makes KL infinite; an id that p forbids adds 0
            apart = tl.where(x_q <= MASKED, float("inf"), apart)
            terms = tl.where((e_p > 0.0) & (x_p > MASKED), e_p * apart, 0.0)
        else:
            terms = e_p * apart
        moved_p = tl.exp2(drop_p)
        cross = tl.where(moved_p > 0.0, moved_p * (cross + (drop_p - drop_q) * total_p), 0.0) + tl.sum(terms, 1)
        total_p = moved_p * total_p + tl.sum(e_p, 1)
    tl.store(floats + LARGEST * plane + at, largest_q, mask=real_row)
    tl.store(floats + TOTAL * plane + at, total_q, mask=real_row)
    tl.store(floats + WEIGHTED * plane + at, weighted_q, mask=real_row)
    tl.store(floats + LARGEST_P * plane + at, largest_p, mask=real_row)
    tl.store(floats + TOTAL_P * plane + at, total_p, mask=real_row)
    tl.store(floats + CROSS * plane + at, cross, mask=real_row)
    tl.store(ints + WHERE * plane + at, where, mask=real_row)
    if one_target:
        tl.store(ints + COUNTS * plane + at, before, mask=real_row)


@triton.jit
def _lines(span, spans, row, rows):
    """Returns (where the numbers of these spans and rows are stored, which of them exist), one line per span."""
    at = span.to(tl.int64)[:, None] * rows + row[None, :]
    return at, (span < spans)[:, None] & (row < rows)[None, :]


@triton.jit
def _whole(best, total):
    """Converts a sum relative to c to (largest logit, sum relative to it in natural units); (-inf, 0) if no id."""
    total = tl.exp2(-tl.fma(best, LOG2_E, -tl.ceil(best * LOG2_E))) * total
    total = tl.where(total < 1.0, 1.0, total)  # the largest logit alone adds 1; NaN stays NaN
    empty = best < -UNREAL
    largest = tl.where(empty, float("-inf"), tl.where(best > UNREAL, float("nan"), best))
    return largest, tl.where(empty, 0.0, tl.where(best > UNREAL, float("nan"), total))


@triton.jit(do_not_specialize=SIZES)
def join_spans(
    floats,
    ints,
    largest_out,
    total_out,
    weighted_out,
    where_out,
    before_out,
    rows,
    spans,
    first_id,
    k,
    block_rows: tl.constexpr,
    block_spans: tl.constexpr,
):
    """Joins all spans of a block of rows into ``Partials``, in nats and relative to the largest logit of each row."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    real_row = row < rows
    plane = spans.to(tl.int64) * rows
    index = tl.arange(0, block_spans)
    best = tl.full((block_rows,), float("-inf"), tl.float32)
    for begin in range(0, spans, block_spans):
        at, real = _lines(begin + index, spans, row, rows)
        best = tl.maximum(best, tl.max(tl.load(floats + LARGEST * plane + at, mask=real, other=float("-inf")), 0))
    c = tl.ceil(best * LOG2_E)
    total = tl.zeros((block_rows,), tl.float32)
    weighted = tl.zeros((block_rows,), tl.float32)
    where = tl.full((block_rows,), 2147483647, tl.int32)
    for begin in range(0, spans, block_spans):
        at, real = _lines(begin + index, spans, row, rows)
        largest = tl.load(floats + LARGEST * plane + at, mask=real, other=2.0 * MASKED)
        own_total = tl.load(floats + TOTAL * plane + at, mask=real, other=0.0)
        own_weighted = tl.load(floats + WEIGHTED * plane + at, mask=real, other=0.0)
        own_where = tl.load(ints + WHERE * plane + at, mask=real, other=2147483647)
        drop = tl.ceil(largest * LOG2_E) - c[None, :]
        share = tl.exp2(drop)
        total += tl.sum(share * own_total, 0)
        weighted += tl.sum(share * (own_weighted + drop * own_total), 0)
        where = tl.minimum(where, tl.min(tl.where(largest == best[None, :], own_where, 2147483647), 0))
    # change the base from c to the largest logit: z = x·log₂e - c, and x - largest = (z - z_top) / log₂e
    top = tl.fma(best, LOG2_E, -c)
    weighted = tl.exp2(-top) * (weighted - top * total) * LN_2
    largest, total = _whole(best, total)
    tl.store(largest_out + row, largest, mask=real_row)
    tl.store(total_out + row, total, mask=real_row)
    tl.store(weighted_out + row, tl.where(best < -UNREAL, 0.0, weighted), mask=real_row)
    tl.store(where_out + row, where.to(tl.int64) + first_id, mask=real_row)
    for j in range(0, k):
        before = tl.zeros((block_rows,), tl.int32)
        for begin in range(0, spans, block_spans):
            at, real = _lines(begin + index, spans, row, rows)
            before += tl.sum(tl.load(ints + (COUNTS + j) * plane + at, mask=real, other=0), 0)
        tl.store(before_out + row.to(tl.int64) * k + j, before.to(tl.int64), mask=real_row)


@triton.jit(do_not_specialize=SIZES)
def join_divergences(
    floats,
    largest_p_out,
    largest_q_out,
    total_p_out,
    total_q_out,
    cross_out,
    rows,
    spans,
    block_rows: tl.constexpr,
    block_spans: tl.constexpr,
):
    """Joins the spans of ``diverge_spans``: natural units, relative to both largest logits."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    real_row = row < rows
    plane = spans.to(tl.int64) * rows
    index = tl.arange(0, block_spans)
    best_p = tl.full((block_rows,), float("-inf"), tl.float32)
    best_q = tl.full((block_rows,), float("-inf"), tl.float32)
    for begin in range(0, spans, block_spans):
        at, real = _lines(begin + index, spans, row, rows)
        best_p = tl.maximum(best_p, tl.max(tl.load(floats + LARGEST_P * plane + at, mask=real, other=float("-inf")), 0))
        best_q = tl.maximum(best_q, tl.max(tl.load(floats + LARGEST * plane + at, mask=real, other=float("-inf")), 0))
    highest_p, highest_q = tl.maximum(best_p, MASKED), tl.maximum(best_q, MASKED)
    c_p, c_q = tl.ceil(highest_p * LOG2_E), tl.ceil(highest_q * LOG2_E)
    cross = tl.zeros((block_rows,), tl.float32)
    total_p = tl.zeros((block_rows,), tl.float32)
    total_q = tl.zeros((block_rows,), tl.float32)
    for begin in range(0, spans, block_spans):
        at, real = _lines(begin + index, spans, row, rows)
        drop_p = (
            tl.ceil(tl.load(floats + LARGEST_P * plane + at, mask=real, other=2.0 * MASKED) * LOG2_E) - c_p[None, :]
        )
        drop_q = tl.ceil(tl.load(floats + LARGEST * plane + at, mask=real, other=2.0 * MASKED) * LOG2_E) - c_q[None, :]
        own_p = tl.load(floats + TOTAL_P * plane + at, mask=real, other=0.0)
        own_q = tl.load(floats + TOTAL * plane + at, mask=real, other=0.0)
        own_cross = tl.load(floats + CROSS * plane + at, mask=real, other=0.0)
        share = tl.exp2(drop_p)
        moved = share * (own_cross + (drop_p - drop_q) * own_p)
        cross += tl.sum(tl.where(share > 0.0, moved, 0.0), 0)
        total_p += tl.sum(share * own_p, 0)
        total_q += tl.sum(tl.exp2(drop_q) * own_q, 0)
    top_p, top_q = tl.fma(highest_p, LOG2_E, -c_p), tl.fma(highest_q, LOG2_E, -c_q)
    cross = tl.exp2(-top_p) * (cross - (top_p - top_q) * total_p) * LN_2
    largest_p, total_p = _whole(highest_p, total_p)
    largest_q, total_q = _whole(highest_q, total_q)
    tl.store(largest_p_out + row, largest_p, mask=real_row)
    tl.store(largest_q_out + row, largest_q, mask=real_row)
    tl.store(total_p_out + row, total_p, mask=real_row)
    tl.store(total_q_out + row, total_q, mask=real_row)
    tl.store(cross_out + row, cross, mask=real_row)
