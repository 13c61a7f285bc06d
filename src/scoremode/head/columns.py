"""The columns of a head: their definition in float64, and how they are computed from slices of the vocabulary.

``define_columns`` is slow and obvious, and every kernel is tested against it. Kernels reduce a slice of the vocabulary
to a few numbers per row, which are then combined:

logits (n, slice) ──partials──▶ Partials ──combine──▶ Partials of the whole vocabulary ──finish──▶ Columns

A slice is a tensor-parallel shard, a tile of a kernel, or the whole vocabulary. A target's logit must be known before
its rank can be counted, so it is read first (``target_logits``) and shared between the slices.

A new column is a field of ``Columns`` here and one of ``ScoreColumns`` in core/scores/schema.py. If it needs a new
number of each slice, that is a field of ``Partials`` too, which each kernel computes: here, blocked.py, rows_triton.py
and fused_kernels.py. Nothing else lists fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, cast

import torch
from torch import Tensor

from scoremode.head.budget import rows_of_workspace

MANY_TARGETS = 64  # per row; with more, counting for each target costs more than one pass saves
FEW_TARGETS = 4  # per row; with more, sorting is faster than counting on a CPU
CACHE_SLICE = 3 << 19  # bytes of logits reduced at a time on a CPU: 1.5 MiB, less than the usual L2 cache
FAR_BELOW = -1e4  # its exp() is 0 in float32; replaces -inf where -inf · 0 would give NaN
LOWEST = torch.finfo(torch.float32).min  # replaces a largest logit of -inf, because -inf - -inf would give NaN


# ── blocks of rows ────────────────────────────────────────────────────────────────────────────────────────────────────
class RowBlock:
    """A block of rows. Its fields are tensors with one line per row, other blocks of the same rows, or None."""

    __slots__ = ()

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Concatenates the rows of several blocks."""
        if len(parts) == 1:
            return parts[0]
        build: Any = cls  # a dataclass, whose slots are its fields
        each: list[list[Any]] = [[getattr(part, name) for part in parts] for name in build.__slots__]
        block: Self = build(*map(_joined, each))
        return block

    def to_words(self) -> Tensor:
        """Packs all fields as 32-bit words, one line per row, to be sent between ranks.

        The words are viewed as float32, because some collectives know no other type of 32 bits; they only copy bits.
        """
        return torch.cat([_words(field) for field in self._fields() if field is not None], dim=1)

    def _fields(self) -> list[Any]:
        block: Any = self  # a dataclass, whose slots are its fields
        return [getattr(self, name) for name in block.__slots__]

    def like_from_words(self, words: Tensor) -> Self:
        """Unpacks the words of another slice, which has the same fields and as many rows as this one."""
        block, rest = _unpacked(self, words)
        assert rest.shape[1] == 0, "the slices have different fields"
        return cast(Self, block)


def _joined(parts: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    return type(parts[0]).cat(parts) if isinstance(parts[0], RowBlock) else torch.cat(list(parts))


def _words(field: Tensor | RowBlock) -> Tensor:
    if isinstance(field, RowBlock):
        return field.to_words()
    lines = field.reshape(len(field), field.shape[1:].numel())
    return lines.clone(memory_format=torch.contiguous_format).view(torch.float32)


def _unpacked(template: Any, words: Tensor) -> tuple[Any, Tensor]:
    """Returns a field like ``template`` from the first words of each line, and the other words."""
    if template is None:
        return None, words
    if isinstance(template, RowBlock):
        fields = []
        for like in template._fields():
            field, words = _unpacked(like, words)
            fields.append(field)
        build: Any = type(template)
        return build(*fields), words
    width = template.shape[1:].numel() * template.element_size() // 4
    first = words[:, :width].clone(memory_format=torch.contiguous_format)
    return first.view(template.dtype).reshape(template.shape), words[:, width:]


# ── the definition ────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Columns(RowBlock):
    """One line per row of hidden states, one column per target of that row."""

    logprob: Tensor  # (n, k) nats
    rank: Tensor  # (n, k) int64, 1 = first choice
    entropy: Tensor  # (n,) nats
    top: Tensor  # (n,) int64
    top_logprob: Tensor  # (n,) nats


def define_columns(logits: Tensor, targets: Tensor, dtype: torch.dtype = torch.float64) -> Columns:
    """Returns ``log_softmax(logits)`` at the targets, with rank, entropy and first choice.

    ``rank = 1 + #{v : x_v > x_t, or x_v = x_t and v < t}``: of equal logits the lower id ranks first. So rank 1 means
    that the target *is* the first choice, and a uniform model does not get rank 1 for every target.

    With another ``dtype`` it is the naive computation, whose error tests allow kernels.
    """
    x = logits.to(dtype)
    logp = torch.log_softmax(x, dim=-1)
    at_target = x.gather(-1, targets)
    ids = torch.arange(x.shape[-1], device=x.device)
    above = x[:, None, :] > at_target[:, :, None]
    tied_before = (x[:, None, :] == at_target[:, :, None]) & (ids < targets[:, :, None])
    p = logp.exp()
    top = torch.argmax(x, dim=-1)
    return Columns(
        logprob=logp.gather(-1, targets),
        rank=1 + (above | tied_before).sum(-1),
        entropy=-torch.where(p > 0, p * logp, torch.zeros_like(p)).sum(-1),
        top=top,
        top_logprob=logp.gather(-1, top[:, None])[:, 0],
    )


def define_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Returns ``cap · tanh((hidden @ weight.T + bias) · scale / cap)``, in float64."""
    x = hidden.double() @ weight.double().T
    if bias is not None:
        x = x + bias.double()
    x = x * scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


# ── from slices ───────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Partials(RowBlock):
    """The numbers that one slice of the vocabulary contributes to each row."""

    largest: Tensor  # (n,) float32, -inf if the slice is empty
    total: Tensor  # (n,) float32, Σ exp(x - largest)
    weighted: Tensor  # (n,) float32, Σ exp(x - largest) · (x - largest)
    where: Tensor  # (n,) int64, lowest id with the largest logit
    before: Tensor  # (n, k) int64, ids of the slice that rank before the target


def unfilled_partials(targets: Tensor) -> Partials:
    """Returns memory for a kernel's results, for targets (n, k)."""
    n, device = len(targets), targets.device
    largest, total, weighted = (torch.empty(n, dtype=torch.float32, device=device) for _ in range(3))
    where, before = (torch.empty(shape, dtype=torch.int64, device=device) for shape in ((n,), targets.shape))
    return Partials(largest, total, weighted, where, before)


def target_logits(x: Tensor, targets: Tensor, first_id: int = 0) -> Tensor:
    """Returns the targets' logits (n, k) in float32; -inf for a target outside ``first_id .. first_id + width``."""
    width = x.shape[1]
    if width == 0:
        return torch.full(targets.shape, float("-inf"), device=x.device)
    local = targets - first_id
    inside = (local >= 0) & (local < width)
    return x.gather(1, local.clamp(0, width - 1)).float().masked_fill(~inside, float("-inf"))


def partials(x: Tensor, targets: Tensor, at_target: Tensor, first_id: int = 0, one_pass: bool = True) -> Partials:
    """Reduces a block of logits (n, width), whose columns are the ids from ``first_id`` on. May overwrite ``x``.

    ``one_pass`` allows the Triton kernel, if it is available.
    """
    if x.shape[1] == 0 or x.shape[0] == 0:
        return empty_partials(x, targets)
    on_cpu = x.device.type == "cpu"
    few = targets.shape[1] <= MANY_TARGETS
    if not on_cpu and one_pass and few and (reduce_rows := _row_kernel(x.device.type)) is not None:
        return reduced_by(reduce_rows, x, targets, at_target, first_id)
    # a GPU needs memory for a float32 copy, exponentials, and a few bytes of results
    step = max(1, CACHE_SLICE // (4 * x.shape[1])) if on_cpu else rows_of_workspace(x.shape[1], 16, x.device.type)
    reduce = _on_cpu if on_cpu else _on_device
    blocks = (slice(i, i + step) for i in range(0, len(x), step))
    return Partials.cat([reduce(x[rows].float(), targets[rows], at_target[rows], first_id) for rows in blocks])


RowKernel = Callable[[Tensor, Tensor, Tensor, int, Partials], None]
"""Reduces logits (n, width) for targets (n, k), whose logits are given, with the first id; fills the partials."""


def reduced_by(kernel: RowKernel, x: Tensor, targets: Tensor, at_target: Tensor, first_id: int) -> Partials:
    made = unfilled_partials(targets)
    kernel(x, targets, at_target, first_id, made)
    return made


@lru_cache
def _row_kernel(kind: str) -> RowKernel | None:
    """Returns the one-pass kernel if Triton is available and the kernel is right on a probe; else None."""
    if kind != "cuda":
        return None
    try:
        from scoremode.head.rows_triton import reduce_rows

        x = torch.linspace(-9, 9, 2 * 5003, device=kind).reshape(2, 5003)
        targets = torch.tensor([[7], [5002]], device=kind)
        at_target = target_logits(x, targets)
        ours = finish(reduced_by(reduce_rows, x, targets, at_target, 0), at_target)
        truth = define_columns(x, targets)
        good = bool((ours.logprob - truth.logprob).abs().max() < 1e-4) and torch.equal(ours.rank, truth.rank)
    except Exception:  # no Triton, or one that does not support this device: the plain path works everywhere
        return None
    return reduce_rows if good else None


def combine(parts: list[Partials]) -> Partials:
    """Combines the partials of neighbouring slices, which are given and added in the order of their ids."""
    if len(parts) == 1:
        return parts[0]
    each = torch.stack([p.largest for p in parts])  # (slices, n)
    largest, winner = each.max(dim=0)  # of equal maxima the first, in the slice with the lower ids
    totals = torch.stack([p.total for p in parts])
    # clamp_min keeps NaN, and an empty slice then adds 0. A divergence has its totals in float64
    drop = (each.to(totals.dtype) - largest.to(totals.dtype)).clamp_min(FAR_BELOW)
    share = drop.exp()
    weighted = torch.stack([p.weighted for p in parts])
    return Partials(
        largest=largest,
        total=(share * totals).sum(0),
        weighted=(share * (weighted + drop * totals)).sum(0),
        where=torch.stack([p.where for p in parts]).gather(0, winner[None])[0],
        before=torch.stack([p.before for p in parts]).sum(0),
    )


def finish(whole: Partials, at_target: Tensor) -> Columns:
    """Computes columns from the partials of the whole vocabulary and the targets' logits."""
    log_total = whole.total.log()
    return Columns(
        logprob=at_target - whole.largest[:, None] - log_total[:, None],
        rank=whole.before + 1,
        entropy=(log_total - whole.weighted / whole.total).clamp_min(0.0),
        top=whole.where,
        top_logprob=-log_total,
    )


def empty_partials(x: Tensor, targets: Tensor) -> Partials:
    """Returns the partials of an empty slice of the vocabulary, for the rows of ``x``."""
    n = len(x)
    zeros = torch.zeros(n, device=x.device)
    return Partials(
        largest=torch.full((n,), float("-inf"), device=x.device),
        total=zeros,
        weighted=zeros,
        where=torch.zeros(n, dtype=torch.int64, device=x.device),
        before=torch.zeros(targets.shape, dtype=torch.int64, device=x.device),
    )


def _on_device(x: Tensor, targets: Tensor, at_target: Tensor, first_id: int) -> Partials:
    """Reduces with whole-block operations that never make the host wait for the device; overwrites ``x``."""
    before = torch.stack(
        [_before_without_waiting(x, at_target[:, j], targets[:, j] - first_id) for j in range(targets.shape[1])], dim=1
    )
    largest, where = x.max(dim=1)
    x.sub_(largest.clamp_min(LOWEST)[:, None]).clamp_min_(FAR_BELOW)
    p = x.exp()
    return Partials(largest=largest, total=p.sum(1), weighted=p.mul_(x).sum(1), where=where + first_id, before=before)


def _before_without_waiting(x: Tensor, at_target: Tensor, target: Tensor) -> Tensor:
    ids = torch.arange(x.shape[1], device=x.device)
    wins_ties = ids < target[:, None]
    return ((x > at_target[:, None]) | ((x == at_target[:, None]) & wins_ties)).sum(1)


def _on_cpu(x: Tensor, targets: Tensor, at_target: Tensor, first_id: int) -> Partials:
    where, largest = _first_choice(x)
    before = _before(x, at_target, targets - first_id)
    below = x - largest.clamp_min(LOWEST)[:, None]
    p = below.exp()
    total = p.sum(1)
    weighted = torch.linalg.vecdot(p, below)
    if not bool(torch.isfinite(weighted).all()):  # a logit is -inf: 0 · -inf must count as 0, not NaN
        weighted = torch.linalg.vecdot(p, below.clamp_min(FAR_BELOW))
    return Partials(largest=largest, total=total, weighted=weighted, where=where + first_id, before=before)


def _first_choice(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the lowest id among the largest logits, and its logit.

    Finds the block with the maximum, then its place in that block, in a third of the time of ``torch.max`` on a CPU.
    """
    width = 256
    whole = x.shape[1] // width * width
    if whole == 0:
        largest, where = x.max(dim=1)
        return where, largest
    blocks = x[:, :whole].reshape(len(x), -1, width)
    block = blocks.amax(2).argmax(1)
    inside = blocks[torch.arange(len(x)), block].argmax(1)
    where = block * width + inside
    largest = x.gather(1, where[:, None])[:, 0]
    if whole < x.shape[1]:
        tail_largest, tail_where = x[:, whole:].max(dim=1)
        better = (tail_largest > largest) | torch.isnan(tail_largest)
        where = torch.where(better, tail_where + whole, where)
        largest = torch.where(better, tail_largest, largest)
    return where, largest


def _before(x: Tensor, at_target: Tensor, target: Tensor) -> Tensor:
    """Counts the logits that are above the target's, or equal to it with a lower id, (n, k)."""
    if target.shape[1] <= FEW_TARGETS:
        counted = [_count(x, at_target[:, j : j + 1]) for j in range(target.shape[1])]
        above, at_least = (torch.stack(counts, dim=1) for counts in zip(*counted, strict=True))
    else:
        ordered, wanted = x.sort(dim=1).values, at_target.contiguous()
        above = x.shape[1] - torch.searchsorted(ordered, wanted, right=True)
        at_least = x.shape[1] - torch.searchsorted(ordered, wanted, right=False)
    here = (target >= 0) & (target < x.shape[1])  # a target in this slice is itself counted in ``at_least``
    tied = at_least - above > here.long()
    if bool(tied.any()):  # rare, so only these rows are compared again
        ids = torch.arange(x.shape[1])
        for row, j in tied.nonzero().tolist():
            above[row, j] += ((x[row] == at_target[row, j]) & (ids < target[row, j])).sum()
    return above


def _count(x: Tensor, at_target: Tensor) -> tuple[Tensor, Tensor]:
    """Counts the logits that are above the target's, and those that are at least equal to it.

    Counting in float32 is fastest, and exact below 2**24 ids.
    """
    counter = torch.empty_like(x)
    above = torch.gt(x, at_target, out=counter).sum(1).long()
    at_least = torch.ge(x, at_target, out=counter).sum(1).long()
    return above, at_least
