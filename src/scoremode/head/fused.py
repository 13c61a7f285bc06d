"""Scores hidden states in one pass over the head's weights, in Triton.

A program multiplies a block of rows with one tile of the vocabulary after the other, and reduces each tile while it is
still in registers. It stores the numbers of ``Partials`` per row for a span of tiles; a second kernel joins the spans.

    hidden, weight ──write_target_logits──▶ the targets' logits
    hidden, weight, targets' logits ──reduce_spans──▶ Partials of each span
                                    ──join_spans───▶ Partials

Three things make the result the same bits on every run of a GPU, however the rows are batched: spans depend only on
the vocabulary, every sum has one fixed order, and a row's products never depend on its neighbours. Triton's interpreter
leaves products to NumPy, where they may. fused_divergence.py compares two models with the same parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from scoremode.head.chunked import Share, in_blocks, keep_own, reduce_in_chunks
from scoremode.head.columns import Partials, empty_partials, unfilled_partials
from scoremode.head.fused_kernels import COUNTS, SCORE_PLANES, join_spans, reduce_spans, write_target_logits
from scoremode.head.matrix import SHALLOW, Head

WORKSPACE = 48 << 20  # most bytes of partials per launch


@dataclass(frozen=True, slots=True)
class Tiles:
    """The division of a kernel's work. The bits of results depend on it, so only device, dtype and depth decide it."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    span: int  # tiles that share one set of partials
    descriptors: bool  # the device has a copy engine for tiles (from Hopper on)
    unit: int  # columns that are added up together: a whole tile, or half of one
    short: int = 1  # tiles per short span; the short spans are at the end
    group: int = 16  # row blocks that go through the vocabulary together, so that its tiles stay in the L2 cache
    shorts: int = 12  # the last 1/shorts of the vocabulary has short spans, so that programs end at about the same time

    def fits(self, *tensors: Tensor) -> bool:
        """Can the copy engine read these matrices? Their rows must start at multiples of 16 bytes."""
        return self.descriptors and all(
            t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.shape[0] > 0 for t in tensors
        )


def tiles_for(weight: Tensor, two_products: bool = False) -> Tiles:
    """Returns the tiles for one product, or for the two products of a divergence, with the same units and spans."""
    if weight.device.type != "cuda":  # in Triton's interpreter
        tiles = Tiles(16, 32, 16, 4, 1, span=2, descriptors=True, unit=16)
        return _halved(tiles) if two_products else tiles
    modern = torch.cuda.get_device_capability(weight.device) >= (9, 0)
    if weight.dtype == torch.float32:
        return Tiles(64, 64, 32, 4, 2, span=16, descriptors=modern, unit=64)
    if not modern:  # 64 rows with 4 warps are added up in the same order as 128 rows with 8
        tiles = Tiles(128, 128, 32, 8, 3, span=16, descriptors=False, unit=128)
        return replace(tiles, rows=64, warps=4) if two_products else tiles
    if weight.shape[1] <= SHALLOW:  # two programs run per processor: one reduces its tile while the other multiplies
        tiles = Tiles(128, 128, 64, 4, 3, span=16, descriptors=True, unit=128, group=32, shorts=24)
        return replace(tiles, warps=8, stages=5) if two_products else tiles
    tiles = Tiles(128, 256, 64, 8, 3, span=8, descriptors=True, unit=128)
    return replace(_halved(tiles), stages=4) if two_products else tiles


def _halved(tiles: Tiles) -> Tiles:
    """Returns tiles with half as many columns, and spans of the same columns as before."""
    return replace(tiles, columns=tiles.columns // 2, span=2 * tiles.span, short=2 * tiles.short)


@dataclass(frozen=True, slots=True)
class Spans:
    """The division of a vocabulary: ``long`` long spans, then short ones. Only the number of ids decides it."""

    tiles: int
    long: int
    count: int

    @staticmethod
    def of(columns: int, tiles: Tiles) -> Spans:
        shorts = -(-columns // (tiles.columns * tiles.short))  # the number of spans if all were short
        each = tiles.span // tiles.short
        long = (shorts - shorts // tiles.shorts) // each
        return Spans(-(-columns // tiles.columns), long, long + shorts - long * each)


@dataclass(frozen=True, slots=True)
class KernelOperands:
    """Hidden states and a head as the kernels take them: plain matrices, or descriptors for the copy engine."""

    hidden: Tensor
    head: Head
    tiles: Tiles
    descriptors: bool

    @staticmethod
    def of(hidden: Tensor, head: Head, tiles: Tiles) -> KernelOperands:
        if hidden.shape[1] == 1:
            # Triton compiles a width of 1 as a constant: the loop has one step and starts from the bias instead of
            # adding it at the end. A target's logit would then differ in the last bit from the same logit in its tile.
            hidden, head = _widened(hidden), replace(head, weight=_widened(head.weight))
        hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
        if head.weight.stride(-1) != 1:
            head = replace(head, weight=head.weight.contiguous())
        return KernelOperands(hidden, head, tiles, tiles.fits(hidden, head.weight))

    def matrices(self) -> tuple[Any, Any]:
        weight = self.head.weight[: self.head.vocabulary]
        if not self.descriptors:
            return self.hidden, weight
        t = self.tiles
        return (
            TensorDescriptor.from_tensor(self.hidden, [t.rows, t.depth]),
            TensorDescriptor.from_tensor(weight, [t.columns, t.depth]),
        )

    def strides(self) -> tuple[int, int]:
        return self.hidden.stride(0), self.head.weight.stride(0)

    def bias(self) -> Tensor:
        return self.head.weight if self.head.bias is None else self.head.bias  # without a bias, it is never read

    def shape_options(self) -> dict[str, Any]:
        head = self.head
        return {
            "has_bias": head.bias is not None,
            "has_scale": head.scale != 1.0,
            "has_cap": head.softcap is not None,
            # Triton's interpreter must convert bfloat16 to float32 before it multiplies; a GPU's matrix units need not
            "precision": "ieee" if head.weight.dtype == torch.float32 or not head.weight.is_cuda else "tf32",
        }


def _widened(matrix: Tensor) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, 1))


def find_target_logits(side: KernelOperands, targets: Tensor, touched: Tensor, spans: Spans) -> Tensor:
    """Returns the targets' logits (n, k), -inf outside the slice; marks in ``touched`` the tiles with a target."""
    n, k = targets.shape
    head = side.head
    at_target = torch.empty(n, k, dtype=torch.float32, device=targets.device)
    block = min(64, side.tiles.rows)
    pointers = (side.hidden, head.weight, side.bias(), targets, at_target, touched)
    sizes = (n, head.vocabulary, side.hidden.shape[1], *side.strides())
    tiles = {"tile_columns": side.tiles.columns, "block_rows": side.tiles.rows, "block": block, "num_warps": 4}
    launch: Any = write_target_logits[(triton.cdiv(n, block), k)]
    shaped = (head.first_id, head.scale, head.softcap or 1.0, spans.tiles, k)
    launch(*pointers, *sizes, *shaped, depth=side.tiles.depth, **tiles, **side.shape_options())
    return at_target


@dataclass(frozen=True, slots=True)
class Launch:
    """The arguments of a kernel over all spans of a vocabulary, except matrices: targets, and space for results."""

    programs: tuple[int]
    spans: Spans
    at_target: Tensor  # (n, k) the targets' logits in the whole vocabulary
    tensors: tuple[Tensor, ...]
    options: dict[str, Any]  # constants that the kernel is compiled for

    @staticmethod
    def of(side: KernelOperands, targets: Tensor, share: Share, planes: int = SCORE_PLANES) -> Launch:
        """Prepares a launch: finds the targets' logits, and makes space for the floats of each span.

        There may be no targets (n, 0).
        """
        (n, k), tiles, device = targets.shape, side.tiles, targets.device
        spans = Spans.of(side.head.vocabulary, tiles)
        row_blocks = triton.cdiv(n, tiles.rows)
        touched = torch.zeros(row_blocks, spans.tiles, dtype=torch.int8, device=device)
        at_target = share(find_target_logits(side, targets, touched, spans)) if k else targets.float()
        numbers = torch.empty(planes, spans.count, n, dtype=torch.float32, device=device)
        ints = torch.empty(COUNTS.value + k, spans.count, n, dtype=torch.int32, device=device)
        # Triton's interpreter cannot run GPU instructions
        options = {"one_target": k == 1, "compare": not targets.is_cuda, "depth": tiles.depth}
        options |= {"span": tiles.span, "short": tiles.short, "group": tiles.group}
        options |= {"tile_rows": tiles.rows, "tile_columns": tiles.columns}
        options |= {"num_warps": tiles.warps, "num_stages": tiles.stages}
        tensors = (targets, at_target, touched, numbers, ints)
        return Launch((row_blocks * spans.count,), spans, at_target, tensors, options)

    @property
    def numbers(self) -> tuple[Tensor, Tensor]:
        """The floats (planes, spans, n) and ints (WHERE and k COUNTS, spans, n) that the kernel stores."""
        return self.tensors[-2], self.tensors[-1]

    @property
    def counts(self) -> tuple[int, ...]:
        return self.spans.tiles, self.spans.long, self.spans.count, self.at_target.shape[1]


def reduce_side(
    side: KernelOperands, targets: Tensor, share: Share, logits: Tensor | None = None
) -> tuple[Launch, Partials]:
    """Returns the launch, for its numbers by span, and the partials. Writes the logits to ``logits`` if it is given."""
    head, launch = side.head, Launch.of(side, targets, share)
    sizes = (len(targets), head.vocabulary, side.hidden.shape[1], *side.strides())
    shaped = (head.first_id, head.scale, head.softcap or 1.0, *launch.counts)
    options = launch.options | side.shape_options() | {"unit": side.tiles.unit, "descriptors": side.descriptors}
    floats, ints = launch.numbers
    kernel: Any = reduce_spans[launch.programs]
    place = floats if logits is None else logits  # without ``keep`` it is not written
    kernel(*side.matrices(), side.bias(), *launch.tensors, place, *sizes, *shaped, keep=logits is not None, **options)
    return launch, join_numbers(floats, ints, targets, head.first_id)


def join_numbers(floats: Tensor, ints: Tensor, targets: Tensor, first_id: int) -> Partials:
    """Joins the numbers of all spans, floats and ints of a launch, into partials."""
    (n, k), spans, made = targets.shape, floats.shape[1], unfilled_partials(targets)
    outputs = (made.largest, made.total, made.weighted, made.where, made.before)
    launch: Any = join_spans[(triton.cdiv(n, 32),)]
    launch(floats, ints, *outputs, n, spans, first_id, k, block_rows=32, block_spans=32, num_warps=4)
    return made


def reduce_fused(hidden: Tensor, head: Head, targets: Tensor, share: Share = keep_own) -> tuple[Partials, Tensor]:
    """Returns the partials of a head's slice for rows (n, d), and their targets' logits (n, k). See kernels.Reduce."""
    if hidden.dtype != head.weight.dtype:  # matrix units need equal dtypes, and a conversion would round
        return reduce_in_chunks(hidden, head, targets, share)
    tiles = tiles_for(head.weight)
    targets = targets.contiguous()
    # the padded width is equal on all ranks, which must divide their rows in the same way
    row_words = Spans.of(head.weight.shape[0], tiles).count * (SCORE_PLANES + COUNTS.value + targets.shape[1])

    def reduce(rows: slice) -> tuple[Partials, Tensor]:
        if head.vocabulary == 0 or len(hidden) == 0:
            return empty_partials(hidden[rows], targets[rows]), share(absent_logits(targets[rows]))
        launch, made = reduce_side(KernelOperands.of(hidden[rows], head, tiles), targets[rows], share)
        return made, launch.at_target

    return in_blocks(reduce, launches(len(hidden), row_words, tiles))


def launches(n: int, row_words: int, tiles: Tiles) -> list[slice]:
    """Returns the rows of each launch, in whole groups; each row needs ``row_words`` 32-bit words of the workspace."""
    together = tiles.rows * tiles.group
    step = max(1, WORKSPACE // (4 * row_words) // together) * together
    return [slice(begin, begin + step) for begin in range(0, max(1, n), step)]


def absent_logits(targets: Tensor) -> Tensor:
    """Returns the targets' logits in a slice that contains no target."""
    return torch.full(targets.shape, float("-inf"), device=targets.device)
