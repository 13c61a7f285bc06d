"""Chooses the kernel that turns hidden states into scores, by device, dtype and shape, and tests it before use.

A kernel is used only after it agrees with the float64 definition on a probe, on this device, in this process. A kernel
that does not agree is skipped for a simpler one, and the result says so (``Choice.note``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from scoremode.errors import EngineError, OptionError
from scoremode.head.budget import check_kernel_name
from scoremode.head.chunked import Share, diverge_in_chunks, keep_own, reduce_in_chunks
from scoremode.head.columns import Columns, Partials, define_columns, define_logits, finish
from scoremode.head.divergence import (
    Divergence,
    DivergencePartials,
    Gather,
    Kept,
    define_divergence,
    finish_divergence,
    gather_own,
)
from scoremode.head.matrix import SHALLOW, Head
from scoremode.head.precision import full_float32


class Reduce(Protocol):
    def __call__(self, hidden: Tensor, head: Head, targets: Tensor, share: Share = keep_own) -> tuple[Partials, Tensor]:
        """Returns the partials of the head's slice for rows (n, d) with targets (n, k), and the targets' logits (n, k).

        ``share`` is called with the targets' logits of this slice (-inf for a target outside it) and returns those of
        the whole vocabulary. Ranks that score together call ``share`` equally often, with equally many rows.
        """


class Diverge(Protocol):
    def __call__(
        self,
        hidden_p: Tensor,
        head_p: Head,
        hidden_q: Tensor,
        head_q: Head,
        targets: Tensor,
        share: Share = keep_own,
        gather: Gather | None = None,
        kept: Kept | None = None,
    ) -> tuple[DivergencePartials, Tensor]:
        """Returns the partials of the same slice of two heads, and the targets' logits of q.

        The partials and logits of q have the same bits as from ``Reduce`` for the same rows. ``gather`` is called like
        ``share``: equally often on all ranks, with equally many rows.
        """


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute scores. All kernels give the same answers, up to the last digits of float32."""

    name: str
    reduce: Reduce
    diverge: Diverge

    def score(self, hidden: Tensor, head: Head, targets: Tensor) -> Columns:
        """Computes the columns of rows (n, d) for a head that is not sliced.

        >>> head = Head(torch.eye(3), vocabulary=3)
        >>> choose(head).kernel.score(torch.tensor([[0.0, 2.0, 0.0]]), head, torch.tensor([[1]])).rank.tolist()
        [[1]]
        """
        return finish(*self.reduce(hidden, head, targets))

    def divergence(
        self,
        hidden_p: Tensor,
        head_p: Head,
        hidden_q: Tensor,
        head_q: Head,
        targets: Tensor,
        whole: bool = True,
        kept: Kept | None = None,
    ) -> Divergence:
        """Computes the divergence, and q's columns with the bits of ``score``, for two heads that are not sliced.

        Of the divergence, only KL(p‖q) unless it is to be ``whole``. ``kept`` changes no bit of it.
        """
        gather = gather_own if whole else None
        return finish_divergence(*self.diverge(hidden_p, head_p, hidden_q, head_q, targets, gather=gather, kept=kept))


@dataclass(frozen=True, slots=True)
class ChosenKernel:
    """The kernel for a head, and a note that says why a faster kernel was skipped; empty if none was skipped."""

    kernel: Kernel
    note: str = ""


def describe_kernel(choice: ChosenKernel | None) -> dict[str, str]:
    """Returns the entries for a run's settings: the kernel's name, and its note if it has one."""
    if choice is None:
        return {"head_kernel": "logits"}  # the model itself computes logits, a few rows at a time
    return {"head_kernel": choice.kernel.name} | ({"head_kernel_note": choice.note} if choice.note else {})


def choose(head: Head, forced: str | None = None, *, divergence: bool = True) -> ChosenKernel:
    """Returns the fastest kernel for this head's device, dtype and shape that agrees with the definition.

    Without ``divergence`` only the kernel's scores are compared with the definition: half as much must be compiled.
    ``forced`` names one of ``KERNELS``; it is an error if that kernel does not run on this device or does not agree.
    """
    skipped: list[str] = []
    for name in _candidates(head, forced):
        problem = _problem(name, _kind(head), divergence)
        if problem is None:
            return ChosenKernel(_kernel(name), "; ".join(skipped))
        skipped.append(f"{name} skipped: {problem}")
        if forced:
            raise OptionError(f"--head-kernel {forced} cannot be used here: {problem}", fix="leave --head-kernel out")
    raise EngineError(
        f"no kernel gives the scores of the definition on {head.weight.device.type} ({skipped[-1]})",
        fix="use --device cpu, and run scoremode info --test",
    )


SMALL_VOCABULARY = 2048  # below this size, a fused kernel has too few tiles to keep a GPU busy


def _candidates(head: Head, forced: str | None) -> tuple[str, ...]:
    """Returns the names of kernels in order of preference."""
    check_kernel_name(forced)
    device, dtype = head.weight.device.type, head.weight.dtype
    half = dtype in (torch.bfloat16, torch.float16)
    possible: tuple[str, ...] = ("plain",)
    preferred: tuple[str, ...] = ("plain",)
    if device == "cpu":
        possible = preferred = ("blocked", "plain")
    elif device == "cuda" and (half or dtype == torch.float32):
        possible = ("fused", "rows", "plain")
        # float32 products do not use the matrix units, and PyTorch computes them much faster than Triton
        suits = half and head.weight.shape[0] >= SMALL_VOCABULARY and head.weight.stride(-1) == 1
        preferred = possible if suits else ("rows", "plain")
    if forced is None:
        return preferred
    if forced not in possible:
        where = f"{device} with {str(dtype).removeprefix('torch.')} weights"
        raise OptionError(f"--head-kernel {forced} is not for {where}", fix=f"give one of {', '.join(possible)}")
    return (forced,)


@lru_cache
def _kernel(name: str) -> Kernel:
    one_pass = name == "rows"
    reduce: Reduce = partial(reduce_in_chunks, one_pass=one_pass)
    diverge: Diverge = partial(diverge_in_chunks, one_pass=one_pass)
    if name == "fused":
        from scoremode.head.fused import reduce_fused
        from scoremode.head.fused_divergence import diverge_fused

        reduce, diverge = reduce_fused, diverge_fused
    elif name == "blocked":
        from scoremode.head.blocked import diverge_blocked, reduce_blocked

        reduce, diverge = reduce_blocked, diverge_blocked
    return Kernel(name, _in_float32(reduce), _in_float32(diverge))


F = TypeVar("F", bound=Callable[..., Any])


def _in_float32(function: F) -> F:
    """Wraps a function so that it multiplies float32 in full precision, whatever the process has set for TF32."""

    @wraps(function)
    def exactly(*arguments: Any, **options: Any) -> Any:
        with full_float32():
            return function(*arguments, **options)

    return cast(F, exactly)


# ── the probe ────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class HeadKind:
    """The properties of a head that a kernel is compiled for: heads of the same kind run the same code."""

    device: torch.device
    dtype: torch.dtype
    has_bias: bool
    has_scale: bool
    softcap: float | None
    aligned: bool  # rows start at multiples of 16 bytes
    shallow: bool = True


def _kind(head: Head) -> HeadKind:
    weight = head.weight
    aligned = weight.stride(0) * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
    shaped = (head.bias is not None, head.scale != 1.0, head.softcap)
    return HeadKind(weight.device, weight.dtype, *shaped, aligned, weight.shape[1] <= SHALLOW)


PROBE_ROWS, PROBE_VOCABULARY = 37, 5003
PROBE_NATS = 1e-4


@lru_cache
@torch.inference_mode()
def _problem(name: str, kind: HeadKind, divergence: bool) -> str | None:
    """Says what is wrong with a kernel on this kind of head, in a few words; None if it agrees with the definition."""
    try:
        problems = (problem for fine in (False, True) for problem in _problems(_kernel(name), kind, divergence, fine))
        return next(problems, None)
    except Exception as error:  # no Triton, a Triton that does not support this device, a missing compiler…
        reason = str(error).strip().split("\n")[0][:160]
        return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def can_keep(kernel: Kernel, head: Head) -> bool:
    """Does KL from kept logits of p have the bits of KL that computes them? A probe tells, once for a kind of head."""
    return _keeps_bits(kernel.name, _kind(head))


@lru_cache
@torch.inference_mode()
def _keeps_bits(name: str, kind: HeadKind) -> bool:
    (hidden_p, head_p, targets), (hidden_q, head_q, _) = (probe(kind, seed, fine=True) for seed in (1, 2))
    kept: Kept = {}
    try:
        diverge = partial(_kernel(name).divergence, hidden_p, head_p, hidden_q, head_q, targets, whole=False)
        computed, *read = diverge(), diverge(kept=kept), diverge(kept=kept)
        return all(torch.equal(computed.kl, divergence.kl) for divergence in read)
    except Exception:  # as in ``_problem``: then nothing is kept
        return False


def _problems(kernel: Kernel, kind: HeadKind, divergence: bool, fine: bool) -> Iterator[str]:
    """Yields the ways in which a kernel differs from the definition on one probe, in words."""
    exact = not fine and kind.softcap is None  # are the logits exact in float32, so that equal logits have equal bits?
    hidden, head, targets = probe(kind, 1, fine=fine)
    truth = define_columns(_defined(hidden, head), targets.cpu())
    yield from _differences(kernel.score(hidden, head, targets), truth, exact)
    if not divergence:
        return
    other_hidden, other_head, _ = probe(kind, 2, fine=fine)
    output = kernel.divergence(hidden, head, other_hidden, other_head, targets)
    compared = define_divergence(_defined(hidden, head), _defined(other_hidden, other_head), targets.cpu())
    yield from _differences(output.q, compared.q, exact, _gaps(output, compared, "kl", "kl_reverse", "total_variation"))
    if exact and any(_gaps(output, compared, "same_first")):
        yield "wrong first choices on the probe"
    alone = kernel.score(other_hidden, other_head, targets)
    if not all(torch.equal(getattr(output.q, n), getattr(alone, n)) for n in Columns.__slots__):
        yield "a model's scores differ between scoring and comparing it"


def _gaps(output: Columns | Divergence, true: Columns | Divergence, *names: str) -> list[float]:
    """Returns the largest differences of the columns with these names that the kernel measures."""
    measured = [(column.cpu(), getattr(true, name)) for name in names if (column := getattr(output, name)) is not None]
    return [float((column - defined).abs().max()) for column, defined in measured]


def _differences(output: Columns, true: Columns, exact: bool, more: Sequence[float] = ()) -> Iterator[str]:
    floats = [name for name in Columns.__slots__ if getattr(true, name).is_floating_point()]
    gaps = [*more, *_gaps(output, true, *floats)]
    if not all(gap < PROBE_NATS for gap in gaps):  # NaN is caught too
        yield f"off by {max(gaps, key=lambda gap: (gap != gap, gap)):.2g} nats on the probe"  # noqa: PLR0124
    if exact and any(_gaps(output, true, *(name for name in Columns.__slots__ if name not in floats))):
        yield "wrong ranks on the probe"


def _defined(hidden: Tensor, head: Head) -> Tensor:
    """Returns the logits by definition, computed on the CPU: a batch-invariant mode replaces a GPU's products."""
    bias = None if head.bias is None else head.bias[: head.vocabulary].cpu()
    return define_logits(hidden.cpu(), head.weight[: head.vocabulary].cpu(), bias, head.scale, head.softcap)


def probe(kind: HeadKind, seed: int, *, fine: bool = False) -> tuple[Tensor, Head, Tensor]:
    """Makes hidden states, a head and targets of small whole numbers: products are exact and many logits are equal.

    With ``fine``, numbers use every bit of their dtype instead: they detect TF32 or bfloat16 in place of float32.
    """
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) if fine else torch.randint(-2, 3, shape, generator=random).float()

    weight_size = 0.25 if not fine else 0.5 if kind.shallow else 0.1
    depth = (64 if kind.shallow else SHALLOW + 64) - (0 if kind.aligned else 3)
    bias = numbers(PROBE_VOCABULARY) if kind.has_bias else None
    head = Head(
        (numbers(PROBE_VOCABULARY, depth) * weight_size).to(kind.device, kind.dtype),
        PROBE_VOCABULARY - 3,  # the last rows are padding
        None if bias is None else bias.to(kind.device),
        0.5 if kind.has_scale else 1.0,
        kind.softcap,
    )
    targets = torch.randint(0, PROBE_VOCABULARY - 3, (PROBE_ROWS, 1), generator=random)
    targets[0] = PROBE_VOCABULARY - 4
    return numbers(PROBE_ROWS, depth).to(kind.device, kind.dtype), head, targets.to(kind.device)
