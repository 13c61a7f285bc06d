"""The fused head against the definition. Not collected by default: test_fused.py runs it, on a GPU or interpreted.

    TRITON_INTERPRET=1 python -m pytest tests/head/fused_checks.py     # without a GPU
    python -m pytest tests/head/fused_checks.py                        # with one

Inputs come in two kinds. Random ones are compared with the naive float32 computation: the kernel must not be
worse, element by element, except for a few roundings of the largest sum of products and one of the number itself.
Whole numbers give logits that are exact in float32, many of them equal: there ranks and first choices must be exactly
those of the definition.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scoremode.head import fused, fused_divergence
from scoremode.head.budget import FIRST
from scoremode.head.columns import Columns, Partials, combine, define_columns, define_logits, finish
from scoremode.head.divergence import (
    Divergence,
    DivergencePartials,
    Gather,
    combine_divergence,
    define_divergence,
    finish_divergence,
    gather_own,
)
from scoremode.head.fused import reduce_fused, tiles_for
from scoremode.head.fused_divergence import diverge_fused
from scoremode.head.matrix import Head

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FLOATS = [name for name in Columns.__slots__ if name not in ("rank", "top")]
INFINITY = math.inf
ROUNDINGS = 4.0  # tolerance: roundings of the largest Σ |hidden · weight| of a row; naive sums have about one
VARIATION = 1e-6  # error of a total variation allowed beyond that of naive
KL_NATS, KL_SHARE = 2e-6, 1e-6  # error of a divergence allowed beyond that of naive: nats, and a relative part
TILE = 256 if ON_GPU else 32  # ids that the kernel processes at a time (half or a quarter of it in some cases on a GPU)
WIDE = 3000 if ON_GPU else 80  # a vocabulary of several tiles, and more than one span of them
MANY = 9 if ON_GPU else 4  # targets of a row
HUGE = 3e4  # the value in padding: large, but still a float16
DTYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.bfloat16]  # each is a kernel of its own on a GPU alone


def spare_work_of_the_interpreter() -> None:
    """What Triton's interpreter does thousands of times for one launch, and what takes most of its time.

    It replaces the functions of its language again for every call of a function: the first time is enough. It looks
    for overflows of integers, and drops what it finds unless a kernel is debugged. It makes the same table of types.
    """
    from triton.language import core
    from triton.runtime import interpreter

    remember_types_of_the_interpreter()
    patch, seen = interpreter._patch_lang, set[int]()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in seen:
            seen.add(id(function.__globals__))
            patch(function)
        return interpreter._LangPatchScope()  # nothing to restore after a launch: nobody else uses the language here

    interpreter._patch_lang = patch_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    find, types = interpreter._get_np_dtype, dict[str, Any]()

    def remembered(type_: Any) -> Any:
        if (name := type_.scalar.name) not in types:
            types[name] = find(type_)
        return types[name]

    interpreter._get_np_dtype = remembered

    def call_directly(package: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        """Members of the language check for the interpreter's argument, which is there."""
        function = member.__wrapped__ if member.__code__ is core.add.__code__ else member

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **named)

        scope.set_attr(package, name, call)

    interpreter._patch_attr = call_directly
    convert = interpreter._convert_float

    def widen(input: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (core.bfloat16, core.float32):  # its upper half
            return input.astype(np.uint32) << 16
        return convert(input, source, target, mode)

    interpreter._convert_float = widen

    def hold(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, attr or {}

    interpreter.TensorHandle.__init__ = hold


def remember_types_of_the_interpreter() -> None:
    """Every operation makes the type of its result anew, and its shape out of objects. There are few different ones."""
    from triton.language import core, semantic

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    meaning = semantic.TritonSemantic
    compare, broadcast, compute = core.dtype.__eq__, meaning.broadcast_impl_value, meaning.computation_type_impl
    types, shapes, computed = dict[Any, dict[str, Any]](), dict[tuple[int, ...], tuple[Any, Any]](), dict[Any, Any]()

    def remembered_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = id(element_ty), tuple(getattr(size, "value", size) for size in shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))  # keeps the type of the elements, and so its id
        vars(self).update(types[key])

    def remembered_shape(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def compare_others(self: Any, other: Any) -> Any:
        return self is other or compare(self, other)

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = lhs.type, rhs.type
        alike = one.is_block() and other.is_block() and one.shape.values == other.shape.values
        return (lhs, rhs) if alike else broadcast(self, lhs, rhs)

    def remembered_computation(self: Any, *asked: Any) -> Any:
        key = tuple(getattr(part, "name", part) for part in asked)  # two types, and whether they are those of scalars
        if key not in computed:
            computed[key] = compute(self, *asked)
        return computed[key]

    check, constant = meaning.binary_op_type_checking_impl, meaning.scalar_constant
    plain, constants = {core.int32, core.float32}, dict[Any, Any]()  # no promotion: a pair of one of them is as it is

    def check_others(self: Any, lhs: Any, rhs: Any, *more: Any, **named: Any) -> Any:
        if type(lhs) is type(rhs) is core.tensor and lhs.dtype is rhs.dtype and lhs.dtype in plain:
            return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, *more, **named)

    def remembered_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = repr(value), type(value), id(dtype)  # 0.0 and -0.0 are two
        if key not in constants:
            constants[key] = constant(self, value, dtype), dtype  # keeps the type, and so its id
        return constants[key][0]

    core.block_type.__init__, core.tensor.__init__ = remembered_type, remembered_shape
    meaning.binary_op_type_checking_impl, meaning.scalar_constant = check_others, remembered_constant
    core.dtype.__eq__, meaning.broadcast_impl_value = compare_others, broadcast_others
    meaning.computation_type_impl = remembered_computation


def add_in_one_order() -> None:
    """A product of tiles adds in the order of the depth, however many rows it has, as a GPU's does.

    The interpreter leaves it to NumPy's library, whose kernels for some CPUs add in another order for other sizes.
    """
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    def multiply(a: Any, b: Any, d: Any, *_precision: Any) -> Any:
        one, other = (side.data.astype(d.data.dtype) for side in (a, b))
        products = np.multiply(one.T[:, :, None], other[:, None, :], order="C")
        return TensorHandle(np.add.reduce(products, axis=0) + d.data, d.dtype.scalar)

    interpreter_builder.create_dot = multiply


if not ON_GPU:
    spare_work_of_the_interpreter()
    add_in_one_order()


# ── what goes in ─────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Case:
    """One line of the grid."""

    rows: int = 5
    depth: int = 16
    vocabulary: int = 300
    targets: int = 1
    dtype: torch.dtype = torch.float32
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    padding: int = 0
    layout: str = "packed"
    seed: int = 0

    def __str__(self) -> str:
        extras = [name for name in ("bias", "softcap", "padding") if getattr(self, name)]
        extras += ["scale"] if self.scale != 1.0 else []
        dtype = str(self.dtype).removeprefix("torch.")
        shape = f"{self.rows}x{self.depth}x{self.vocabulary}-k{self.targets}"
        return "-".join([shape, dtype, self.layout.replace(" ", "_"), *extras])


LAYOUTS = ("packed", "aligned", "wider rows", "every other row", "transposed")
AXES: dict[str, tuple[object, ...]] = {
    "rows": (1, 5, 33, 129, 300) if ON_GPU else (1, 5, 17),
    "depth": (1, 7, 16, 61, 64, 96, 200) if ON_GPU else (1, 7, 16, 29, 32, 61, 96),
    "vocabulary": (1, 2, 31, 33, 300, 1003, 2049, 50021) if ON_GPU else (1, 2, 31, 33, 97, 160),
    "targets": (1, 3, 9) if ON_GPU else (1, 1, 3),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
    "bias": (False, True),
    "scale": (1.0, 0.37),
    "softcap": (None, None, 5.0),
    "padding": (0, 0, 19),
    "layout": LAYOUTS,
}

GRID = 120 if ON_GPU else 24  # every case may have to be compiled


def grid(count: int) -> list[Case]:
    """Cases in which every value of every axis occurs about equally often, in fixed random combinations."""
    shuffle = random.Random(0)
    columns: dict[str, list[object]] = {}
    for name, values in AXES.items():
        column = [value for _ in range(-(-count // len(values))) for value in values][:count]
        shuffle.shuffle(column)
        columns[name] = column
    return [Case(**{name: column[i] for name, column in columns.items()}, seed=i) for i in range(count)]  # type: ignore[arg-type]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers with another memory layout; between them is NaN, which must not be read."""
    n, d = x.shape
    if layout == "transposed":
        return x.T.contiguous().T
    shape, rows, width = {
        "packed": ((n, d), slice(None), d),
        "aligned": ((n, -(-d // 16) * 16 + 16), slice(None), d),  # rows begin at multiples of 16 bytes in any dtype
        "wider rows": ((n, d + 5), slice(None), d),
        "every other row": ((2 * n, d), slice(0, None, 2), d),
    }[layout]
    storage = torch.full(shape, math.nan, dtype=x.dtype, device=x.device)
    storage[rows, :width] = x
    return storage[rows, :width]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def padded(x: Tensor, rows: int, fill: float) -> Tensor:
    return torch.cat([x, torch.full((rows, *x.shape[1:]), fill, dtype=x.dtype)])


def random_problem(case: Case, spread: float = 4.0) -> tuple[Tensor, Head, Tensor]:
    """Hidden states, a head and targets, logits of about ``spread``."""
    maker = generator(case.seed)
    hidden = torch.randn(case.rows, case.depth, generator=maker).to(case.dtype)
    weight = (torch.randn(case.vocabulary, case.depth, generator=maker) * spread / math.sqrt(case.depth)).to(case.dtype)
    bias = torch.randn(case.vocabulary, generator=maker).to(case.dtype) if case.bias else None
    targets = torch.randint(0, case.vocabulary, (case.rows, case.targets), generator=maker)
    targets[-1, -1] = case.vocabulary - 1
    weight_layout = "aligned" if case.layout == "aligned" else "packed"
    head = Head(
        laid_out(padded(weight, case.padding, HUGE).to(DEVICE), weight_layout),
        case.vocabulary,
        None if bias is None else padded(bias, case.padding, math.nan).to(DEVICE),
        case.scale,
        case.softcap,
    )
    return laid_out(hidden.to(DEVICE), case.layout), head, targets.to(DEVICE)


def whole_problem(
    n: int, d: int, v: int, k: int = 1, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Head, Tensor]:
    """As ``random_problem``, with small whole numbers: logits are exact in float32, and many are equal."""
    maker = generator(seed)
    hidden = torch.randint(-1, 2, (n, d), generator=maker).to(DEVICE, dtype)
    weight = torch.randint(-1, 2, (v, d), generator=maker).to(DEVICE, dtype)
    targets = torch.randint(0, v, (n, k), generator=maker).to(DEVICE)
    return hidden, Head(weight, v), targets


def head_with_logits(logits: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Head]:
    """Hidden states and a head whose product is exactly these logits, if ``dtype`` can represent them."""
    n, v = logits.shape
    hidden = torch.eye(n, dtype=dtype, device=DEVICE)
    return hidden, Head(logits.T.contiguous().to(DEVICE, dtype), v)


# ── what must come out ───────────────────────────────────────────────────────────────────────────────────────────────
def defined_logits(hidden: Tensor, head: Head) -> Tensor:
    bias = None if head.bias is None else head.bias[: head.vocabulary]
    return define_logits(hidden, head.weight[: head.vocabulary], bias, head.scale, head.softcap)


def naive_logits(hidden: Tensor, head: Head) -> Tensor:
    """The naive computation in float32."""
    x = hidden.float() @ head.weight[: head.vocabulary].float().T
    if head.bias is not None:
        x = x + head.bias[: head.vocabulary].float()
    x = x * head.scale
    return x if head.softcap is None else head.softcap * torch.tanh(x / head.softcap)


def naive_columns(hidden: Tensor, head: Head, targets: Tensor) -> Columns:
    return define_columns(naive_logits(hidden, head), targets, torch.float32)


def rounding(hidden: Tensor, head: Head) -> Tensor:
    """The spacing of floats at the largest sum of absolute products of each row, (n, 1): one float32 rounding."""
    sums = hidden.double().abs() @ head.weight[: head.vocabulary].double().abs().T
    if head.bias is not None:
        bias = head.bias[: head.vocabulary].double().abs()
        sums = sums + torch.where(bias.isinf(), 0.0, bias)
    return (sums * abs(head.scale)).amax(1, keepdim=True).clamp_min(1.0) * 2.0**-23


def away(found: Tensor, truth: Tensor) -> Tensor:
    """Absolute differences; equal infinities differ by 0, NaN stays NaN."""
    return torch.where(found.double() == truth.double(), 0.0, (found.double() - truth.double()).abs())


def assert_no_worse(found: Tensor, naive: Tensor, truth: Tensor, slack: Tensor | float, name: str) -> None:
    own_rounding = torch.where(truth.isinf(), 0.0, truth.abs()) * 2.0**-23
    ours, limit = away(found, truth), away(naive, truth) + slack + own_rounding
    assert bool(limit.isfinite().all()), f"{name}: the naive computation is not finite here"
    worse = ~(ours <= limit)  # NaN is worse
    assert not bool(worse.any()), (
        f"{name}: off by {ours[worse].max():.3g} where {limit[worse].min():.3g} is allowed, at {worse.nonzero()[0]}"
    )


def assert_floats(ours: Columns, hidden: Tensor, head: Head, targets: Tensor) -> None:
    """No element is worse than naive."""
    truth, naive = define_columns(defined_logits(hidden, head), targets), naive_columns(hidden, head, targets)
    slack = ROUNDINGS * rounding(hidden, head)
    for name in FLOATS:
        column_slack = slack if name == "logprob" else slack[:, 0]
        assert_no_worse(getattr(ours, name), getattr(naive, name), getattr(truth, name), column_slack, name)


def assert_columns(ours: Columns, hidden: Tensor, head: Head, targets: Tensor) -> None:
    """No element is worse than naive; ranks and first choices are right, except between logits within the tolerance."""
    assert_floats(ours, hidden, head, targets)
    logits, slack = defined_logits(hidden, head), ROUNDINGS * rounding(hidden, head)
    at_target = logits.gather(1, targets)
    surely_before = (logits[:, None] > (at_target + slack)[:, :, None]).sum(-1)
    perhaps_before = (logits[:, None] > (at_target - slack)[:, :, None]).sum(-1) - 1  # without the target itself
    assert bool((ours.rank > surely_before).all())
    assert bool((ours.rank <= perhaps_before + 1).all())
    assert bool(((ours.top >= 0) & (ours.top < head.vocabulary)).all())
    assert bool((logits.gather(1, ours.top[:, None]) >= logits.amax(1, keepdim=True) - slack).all())


def assert_exactly_ranked(ours: Columns, hidden: Tensor, head: Head, targets: Tensor) -> None:
    """For whole numbers: ranks and first choices of the definition, floats no worse than naive."""
    truth = define_columns(defined_logits(hidden, head), targets)
    assert torch.equal(ours.rank, truth.rank)
    assert torch.equal(ours.top, truth.top)
    assert_floats(ours, hidden, head, targets)


def assert_same_bits(found: Partials, expected: Partials) -> None:
    for name in Partials.__slots__:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def rows_of(whole: Partials, rows: Tensor | slice) -> Partials:
    return Partials(*(getattr(whole, name)[rows] for name in Partials.__slots__))


def scored(hidden: Tensor, head: Head, targets: Tensor) -> Columns:
    return finish(*reduce_fused(hidden, head, targets))


def edges_of(head: Head) -> list[int]:
    """Ids next to the boundaries of tiles and of spans of tiles."""
    tiles = tiles_for(head.weight)
    spans = fused.Spans.of(head.vocabulary, tiles)
    cuts = {0, 1, 2, tiles.span, spans.long * tiles.span, spans.tiles - 1}
    near = {cut * tiles.columns + step for cut in cuts for step in (-1, 0, 1)} | {head.vocabulary - 1}
    return sorted(id_ for id_ in near if 0 <= id_ < head.vocabulary)


# ── the grid ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("case", grid(GRID), ids=str)
def test_no_worse_than_naive_float32(case: Case) -> None:
    hidden, head, targets = random_problem(case)
    ours = scored(hidden, head, targets)
    assert ours.logprob.shape == ours.rank.shape == targets.shape
    assert ours.rank.dtype == ours.top.dtype == torch.int64
    assert_columns(ours, hidden, head, targets)


def test_the_grid_reaches_both_ways_of_reading_matrices() -> None:
    """Rows that start at multiples of 16 bytes are read by descriptors, others by pointers."""
    ways = set()
    for case in grid(GRID):
        hidden, head, _ = random_problem(case)
        ways.add((case.dtype, fused.KernelOperands.of(hidden, head, tiles_for(head.weight)).descriptors))
    wanted = {tiles_for(head.weight).descriptors, False}
    assert ways == {(dtype, way) for dtype in (torch.float32, torch.float16, torch.bfloat16) for way in wanted}


@pytest.mark.parametrize("layout", [*LAYOUTS[1:], "one and the same row", "transposed weight"])
def test_the_place_in_memory_does_not_change_a_bit(layout: str) -> None:
    """Also descriptors against pointers: rows of 29 numbers are packed at odd addresses, or aligned."""
    hidden, head, targets = random_problem(Case(rows=19, depth=29, vocabulary=40))
    placed, given = head, laid_out(hidden, layout) if layout in LAYOUTS else hidden
    if layout in ("aligned", "transposed weight"):
        placed = replace(head, weight=laid_out(head.weight, layout.removesuffix(" weight")))
    if layout == "one and the same row":  # ``expand`` makes rows of stride 0
        given, hidden = hidden[:1].expand(19, 29), hidden[:1].repeat(19, 1)
    expected, at_target = reduce_fused(hidden, head, targets)
    found, found_at_target = reduce_fused(given, placed, targets)
    assert_same_bits(found, expected)
    assert torch.equal(found_at_target, at_target)


@pytest.mark.parametrize(
    ("weights", "states"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_hidden_states_of_another_dtype_than_the_weights(weights: torch.dtype, states: torch.dtype) -> None:
    """Wider ones are not rounded."""
    _, head, targets = random_problem(Case(rows=9, depth=64, vocabulary=97, dtype=weights))
    hidden = torch.randn(9, 64, generator=generator(3)).to(DEVICE, states)
    assert_columns(scored(hidden, head, targets), hidden, head, targets)


# ── extreme logits ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_ten_thousand(dtype: torch.dtype) -> None:
    """Their spacing is 2⁻¹⁰ in float32: an error of one step in a logit causes an error of the same size in a score."""
    hidden, head, targets = random_problem(Case(rows=5, depth=61, vocabulary=WIDE, targets=3, dtype=dtype), spread=4e3)
    assert float(defined_logits(hidden, head).abs().max()) > 9e3
    assert_columns(scored(hidden, head, targets), hidden, head, targets)


@pytest.mark.parametrize("level", [1e4, -1e4, 0.0, 3.0e6, -3.0e6])
def test_equal_logits(level: float) -> None:
    """Every rank is an id + 1, and the distribution is uniform to the last bits however large the logits are."""
    v = WIDE - 1
    hidden, head = head_with_logits(torch.full((3, v), level))
    targets = torch.tensor([[0], [v // 2], [v - 1]], device=DEVICE)
    ours = scored(hidden, head, targets)
    assert ours.rank.tolist() == [[1], [v // 2 + 1], [v]]
    assert ours.top.tolist() == [0, 0, 0]
    for name in FLOATS:
        expected = math.log(v) * (1 if name == "entropy" else -1)
        assert float((getattr(ours, name) - expected).abs().max()) < 2e-6, name


def test_one_logit_far_above_all_others() -> None:
    v, height = WIDE, 200.0
    places = [0, TILE - 1, TILE, v - 1]
    logits = torch.zeros(len(places), v)
    logits[range(len(places)), places] = height
    hidden, head = head_with_logits(logits)
    targets = torch.tensor([[place, (place + 1) % v] for place in places], device=DEVICE)
    ours = scored(hidden, head, targets)
    assert torch.equal(ours.rank, define_columns(logits.to(DEVICE), targets).rank)
    assert ours.top.tolist() == places
    assert float(ours.logprob.max()) <= 0.0, "no probability is above 1"
    assert float(ours.top_logprob.max()) <= 0.0
    assert float(ours.logprob[:, 0].min()) > -1e-6
    assert float((ours.logprob[:, 1] + height).abs().max()) < 2e-5
    assert float(ours.entropy.max()) < 1e-6


def tiny_logits(kind: str, size: float) -> tuple[Tensor, Tensor]:
    """Logits and targets whose order hangs on the smallest differences that there are."""
    if kind == "steps":
        steps = torch.randint(-40, 41, (5, 97), generator=generator(1)) * size
        return steps, torch.randint(0, 97, (5, 2), generator=generator(2))
    if kind == "a target of zero":  # no float lies between 0 and the smallest one
        logits = torch.randint(-1, 2, (5, 97), generator=generator(1)) * size
        logits[:, [0, 77, 96]] = 0.0
        return logits, torch.tensor([[0, 77, 96]] * 5)
    logits = torch.full((4, 2 * TILE), -3.0)  # half of the ids share the first choice, the target is far below
    logits[:, 1::2] = size
    logits[2, : TILE + 5] = -3.0
    return logits, torch.tensor([[0], [2 * TILE - 2], [TILE], [2]])


SHARED = [2.0**exponent for exponent in (range(-108, -72, 3) if ON_GPU else [-84, -100])]


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(("steps", size) for size in (1e-30, 1e-25, 1e-20, 1e-38)),
        *(("a target of zero", size) for size in (1e-30, 1e-25, 1e-35)),
        *(("a shared first choice", size) for size in SHARED),
    ],
)
def test_tiny_logits_are_ranked_apart(kind: str, size: float) -> None:
    """Ranks and the first choice are exact however small the differences; the distribution is uniform."""
    logits, targets = tiny_logits(kind, size)
    hidden, head = head_with_logits(logits)
    targets = targets.to(DEVICE)
    ours, truth = scored(hidden, head, targets), define_columns(defined_logits(hidden, head), targets)
    assert torch.equal(ours.rank, truth.rank)
    assert torch.equal(ours.top, truth.top)
    assert kind == "a shared first choice" or float((ours.logprob + math.log(97)).abs().max()) < 2e-6


@pytest.mark.parametrize("layout", ["packed", "wider rows"])
def test_nan_in_a_row_stays_in_that_row_and_in_the_weights_spoils_every_row(layout: str) -> None:
    """Wherever the targets are: a sum that contains NaN is NaN."""
    hidden, head, targets = random_problem(Case(rows=18, depth=16, vocabulary=40, targets=2, layout=layout))
    clean = scored(hidden, head, targets)
    spoilt = laid_out(hidden, layout)
    spoilt[5, 13] = math.nan
    found = scored(spoilt, head, targets)
    others = [row for row in range(18) if row != 5]
    assert bool(found.logprob[5].isnan().all())
    for name in Columns.__slots__:
        assert torch.equal(getattr(found, name)[others], getattr(clean, name)[others]), name
    for bad_id in (0, 31, 39):
        weight = head.weight.clone()
        weight[bad_id, 3] = math.nan
        assert bool(scored(hidden, replace(head, weight=weight), targets).logprob.isnan().all())


# ── forbidden ids ────────────────────────────────────────────────────────────────────────────────────────────────────
def forbid(head: Head, ids: list[int] | slice, bias_dtype: torch.dtype = torch.float32) -> Head:
    bias = (
        torch.zeros(head.weight.shape[0], dtype=bias_dtype, device=DEVICE) if head.bias is None else head.bias.clone()
    )
    bias[ids] = -INFINITY
    return replace(head, bias=bias)


FORBIDDEN: dict[str, list[int] | slice] = {
    "a few": [0, 40, WIDE - 1],
    "a tile": slice(TILE, 2 * TILE),
    "the first tiles": slice(0, 2 * TILE + 4),
    "a span of tiles": slice(0, 2048 if ON_GPU else 64),
    "the last tiles": slice(WIDE - TILE - 5, WIDE),
    "all but one": [*range(70), *range(71, WIDE)],
    "all but the last": slice(0, WIDE - 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", FORBIDDEN)
def test_a_bias_of_minus_infinity_forbids_ids(which: str, dtype: torch.dtype) -> None:
    """Also if the target is forbidden: its logprob is -inf, and it ranks after all allowed ids."""
    hidden, head, targets = whole_problem(5, 16, WIDE, k=2, dtype=dtype)
    head = forbid(head, FORBIDDEN[which], dtype)
    forbidden = head.bias.isinf().nonzero()[:, 0]  # type: ignore[union-attr]
    targets[:, 0] = forbidden[torch.arange(5, device=DEVICE) % len(forbidden)]
    ours = scored(hidden, head, targets)
    assert ours.logprob[:, 0].tolist() == [-INFINITY] * 5
    assert_exactly_ranked(ours, hidden, head, targets)


def test_forbidden_ids_with_scale_and_cap() -> None:
    """A cap turns -inf into -cap, as in the definition."""
    hidden, head, targets = random_problem(Case(rows=5, vocabulary=97, targets=2, bias=True, scale=0.5, softcap=3.0))
    head = forbid(head, [0, 40])
    targets[:, 0] = 40
    assert_columns(scored(hidden, head, targets), hidden, head, targets)


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("d", "k"), [(1, 1), (7, 1), (16, 3), (40, MANY)])
def test_ties_are_ranked_by_id(d: int, k: int, dtype: torch.dtype) -> None:
    hidden, head, targets = whole_problem(
        129 if ON_GPU else 17 if k == 1 else 5, d, 50021 if ON_GPU else WIDE, k, dtype=dtype, seed=d
    )
    logits = defined_logits(hidden, head)
    assert bool(((logits[:, None] == logits.gather(1, targets)[..., None]).sum(-1) > 1).any()), "no ties to rank"
    assert_exactly_ranked(scored(hidden, head, targets), hidden, head, targets)


def test_targets_beside_the_cuts_of_tiles_and_spans() -> None:
    v = 50021 if ON_GPU else 13 * 32 + 5
    _, head, _ = whole_problem(1, 7, v)
    edges = edges_of(head)
    assert len(edges) > 10
    hidden, _, _ = whole_problem(len(edges), 7, 1, seed=5)
    targets = torch.tensor(edges, device=DEVICE)[:, None]
    assert_exactly_ranked(scored(hidden, head, targets), hidden, head, targets)
    several = targets[:: len(edges) // 3].T
    assert_exactly_ranked(scored(hidden[:1], head, several), hidden[:1], head, several)


def test_targets_need_not_lie_together_in_memory() -> None:
    hidden, head, targets = whole_problem(5, 7, 97, k=3)
    expected, _ = reduce_fused(hidden, head, targets)
    found, _ = reduce_fused(hidden, head, targets.to(torch.int32).T.contiguous().T)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("case", [
    Case(rows=129 if ON_GPU else 17, depth=61, vocabulary=WIDE),
    Case(rows=5, depth=96, vocabulary=WIDE, dtype=torch.bfloat16, bias=True),
    Case(rows=5, depth=64, vocabulary=97, dtype=torch.float16, scale=0.37, softcap=4.0),
    Case(rows=5, depth=7, vocabulary=33, padding=19),
], ids=str)  # fmt: skip
def test_the_first_choice_as_target_has_rank_1_and_the_same_bits(case: Case) -> None:
    hidden, head, targets = random_problem(case)
    first = scored(hidden, head, targets).top[:, None]
    for asked in (first, torch.cat([targets, first], dim=1)):
        ours = scored(hidden, head, asked)
        assert ours.rank[:, -1].tolist() == [1] * case.rows
        assert torch.equal(ours.logprob[:, -1], ours.top_logprob)
        assert torch.equal(ours.top, first[:, 0])


# ── shards ───────────────────────────────────────────────────────────────────────────────────────────────────────────
Share = Callable[[Tensor], Tensor]


def shards_of(head: Head, cuts: list[int]) -> list[Head]:
    """Slices as on the ranks of a tensor-parallel engine: padded to the width of the widest slice."""
    edges = [0, *cuts, head.vocabulary]
    widest = max(b - a for a, b in pairwise(edges))

    def part(x: Tensor, a: int, b: int, fill: float) -> Tensor:
        return torch.cat([x[a:b], torch.full((widest - (b - a), *x.shape[1:]), fill, dtype=x.dtype, device=x.device)])

    return [
        replace(
            head,
            weight=part(head.weight, a, b, HUGE),
            bias=None if head.bias is None else part(head.bias, a, b, math.nan),
            vocabulary=b - a,
            first_id=a,
        )
        for a, b in pairwise(edges)
    ]


def exchanged(run: Callable[[int, Share], object], shards: int) -> list[Share]:
    """For every shard, the ``share`` of all ranks together: the maximum of their target logits.

    Each shard runs once to record its own. All must call ``share`` equally often, or real ranks would wait forever.
    """
    said: list[list[Tensor]] = []
    for index in range(shards):
        own: list[Tensor] = []

        def note(x: Tensor, own: list[Tensor] = own) -> Tensor:
            own.append(x.clone())
            return x

        run(index, note)
        said.append(own)
    assert len({tuple(tuple(x.shape) for x in own) for own in said}) == 1
    whole = [torch.stack(same).amax(0) for same in zip(*said, strict=True)]

    def teller() -> Share:
        answers: Iterator[Tensor] = iter(whole)
        return lambda _: next(answers)

    return [teller() for _ in range(shards)]


def reduce_sharded(hidden: Tensor, head: Head, targets: Tensor, cuts: list[int]) -> tuple[Partials, Tensor]:
    heads = shards_of(head, cuts)
    shares = exchanged(lambda i, share: reduce_fused(hidden, heads[i], targets, share), len(heads))
    parts, logits = zip(*(reduce_fused(hidden, h, targets, s) for h, s in zip(heads, shares, strict=True)), strict=True)
    assert all(torch.equal(at_target, logits[0]) for at_target in logits)
    return combine(list(parts)), logits[0]


CUTS = {
    "uneven": [1, WIDE // 9, 2 * WIDE // 3],
    "an empty one": [WIDE // 3, WIDE // 3, 3 * WIDE // 5],
    "empty at both ends": [0, 2 * TILE, WIDE],
    "on tiles": [TILE, 2 * TILE],
    "beside tiles": [TILE - 1, 2 * TILE + 1],
}


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("k", [1, 3])
def test_shards_add_up_with_ties_and_targets_beside_the_cuts(cuts: str, k: int) -> None:
    at = CUTS[cuts]
    near = {cut + step for cut in (0, *at, WIDE) for step in (-1, 0, 1, 9, TILE - 1)}
    beside = torch.tensor(sorted(id_ for id_ in near if 0 <= id_ < WIDE), device=DEVICE)
    hidden, head, _ = whole_problem(len(beside) if k == 1 else 5, 2, WIDE)
    targets = beside[:, None]
    if k > 1:
        targets = torch.stack([beside[(3 * row + torch.arange(k)) % len(beside)] for row in range(5)])
    assert_exactly_ranked(finish(*reduce_sharded(hidden, head, targets, at)), hidden, head, targets)


@pytest.mark.parametrize("case", [
    Case(rows=5, depth=61, vocabulary=WIDE, bias=True, scale=0.37),
    Case(rows=5, depth=64, vocabulary=WIDE, dtype=torch.bfloat16, softcap=5.0),
], ids=str)  # fmt: skip
def test_shards_of_random_logits(case: Case) -> None:
    hidden, head, targets = random_problem(case)
    ours = finish(*reduce_sharded(hidden, head, targets, [1, 50, 50, 70]))
    assert_columns(ours, hidden, head, targets)


@pytest.mark.parametrize("k", [1, 2])
def test_shards_with_forbidden_ids_and_targets(k: int) -> None:
    """A shard in which no id is allowed, and targets at -inf, which tie with forbidden ids of other shards."""
    hidden, head, targets = whole_problem(7, 7, 130, k)
    head = forbid(head, [*range(3, 17), *range(50, 90), 129])
    targets[:, 0] = torch.tensor([5, 50, 63, 89, 129, 0, 90], device=DEVICE)
    ours = finish(*reduce_sharded(hidden, head, targets, [50, 90]))
    assert ours.logprob[:5, 0].tolist() == [-INFINITY] * 5
    assert_exactly_ranked(ours, hidden, head, targets)


@pytest.mark.parametrize("k", [1, 3])
def test_several_launches_give_the_same_bits_and_ask_shards_equally_often(
    monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    n, calls = rows_of_launches(3), list[int]()
    hidden, head, targets = random_problem(Case(rows=n, depth=7, vocabulary=40, targets=k, bias=True))
    expected, expected_logits = reduce_fused(hidden, head, targets)
    shrink_launches(monkeypatch)

    def share(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x

    found, logits = reduce_fused(hidden, head, targets, share)
    assert (len(calls), sum(calls)) == (3, n)
    assert_same_bits(found, expected)
    assert torch.equal(logits, expected_logits)
    hidden, head, targets = whole_problem(n, 7, 70)
    ours = finish(*reduce_sharded(hidden, head, targets, [20, 20]))
    assert_exactly_ranked(ours, hidden, head, targets)


# ── the same bits ────────────────────────────────────────────────────────────────────────────────────────────────────
def shrink_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "WORKSPACE", 1)
    monkeypatch.setattr(fused_divergence, "KEPT", 1)
    if not ON_GPU:  # a launch has at least one group of row blocks: 256 rows would take the interpreter too long
        one_block = lambda *given, **named: replace(tiles_for(*given, **named), group=1)  # noqa: E731
        for module in (fused, fused_divergence):
            monkeypatch.setattr(module, "tiles_for", one_block)


def rows_of_launches(count: int) -> int:
    """Rows that need this many launches after ``shrink_launches``."""
    return (1024 if ON_GPU else 16) * (count - 1) + 3  # float32: 16 blocks of 64 rows


ROWS = 300 if ON_GPU else 20
BITWISE = [
    Case(rows=ROWS, depth=61, vocabulary=20011 if ON_GPU else WIDE),
    Case(rows=ROWS, depth=64, vocabulary=20011 if ON_GPU else 40, targets=3, dtype=torch.bfloat16, bias=True),
    Case(rows=ROWS, depth=96, vocabulary=2049 if ON_GPU else 40, dtype=torch.float16, scale=0.5, softcap=9.0),
]


@pytest.mark.parametrize("case", BITWISE, ids=str)
def test_every_run_and_every_batching_gives_the_same_bits(case: Case) -> None:
    hidden, head, targets = random_problem(case)
    expected, expected_logits = reduce_fused(hidden, head, targets)

    def assert_same_rows(rows: Tensor | slice) -> None:
        found, logits = reduce_fused(hidden[rows], head, targets[rows])
        assert_same_bits(found, rows_of(expected, rows))
        assert torch.equal(logits, expected_logits[rows])

    assert_same_rows(slice(None))
    assert_same_rows(torch.randperm(case.rows, generator=generator(9)).to(DEVICE))
    for begin, end in pairwise([0, 1, 8, 11, case.rows]):
        assert_same_rows(slice(begin, end))
    for row in range(0, case.rows, 6):
        assert_same_rows(slice(row, row + 1))


# ── nothing to do ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_no_rows_and_a_slice_of_no_ids() -> None:
    hidden, head, targets = random_problem(Case(rows=5, depth=7, vocabulary=33, targets=2))
    none = finish(*reduce_fused(hidden[:0], head, targets[:0]))
    assert (none.logprob.shape, none.entropy.shape, none.top.shape, none.top.dtype) == ((0, 2), (0,), (0,), torch.int64)
    nothing, at_target = reduce_fused(hidden, replace(head, vocabulary=0, first_id=33), targets)
    assert nothing.largest.tolist() == [-INFINITY] * 5
    assert nothing.total.tolist() == nothing.weighted.tolist() == [0.0] * 5
    assert nothing.before.tolist() == [[0, 0]] * 5
    assert at_target.tolist() == [[-INFINITY, -INFINITY]] * 5
    alone, logits = reduce_fused(hidden, head, targets)
    both = finish(combine([alone, nothing]), logits)
    assert torch.equal(both.logprob, finish(alone, logits).logprob)
    assert torch.equal(both.top, alone.where)


# ── divergence ───────────────────────────────────────────────────────────────────────────────────────────────────────
def naive_kl(hidden_p: Tensor, head_p: Head, hidden_q: Tensor, head_q: Head) -> Tensor:
    log_p, log_q = (
        torch.log_softmax(naive_logits(h, head), -1) for h, head in ((hidden_p, head_p), (hidden_q, head_q))
    )
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def assert_divergence(found: Divergence, p: tuple[Tensor, Head], q: tuple[Tensor, Head], targets: Tensor) -> None:
    truth = define_divergence(defined_logits(*p), defined_logits(*q), targets)
    assert_no_worse(found.kl, naive_kl(*p, *q), truth.kl, KL_NATS + KL_SHARE * truth.kl, "kl")
    assert found.kl_reverse is not None
    assert truth.kl_reverse is not None
    backwards = KL_NATS + KL_SHARE * truth.kl_reverse
    assert_no_worse(found.kl_reverse, naive_kl(*q, *p), truth.kl_reverse, backwards, "kl_reverse")
    assert_variation_and_choices(found, p, q, targets)
    assert_columns(found.q, *q, targets)


def assert_variation_and_choices(
    found: Divergence, p: tuple[Tensor, Head], q: tuple[Tensor, Head], targets: Tensor
) -> None:
    """Total variation is no worse than naive. First choices are those of the kernel's float32 logits, so whole numbers
    are needed to know them: here the naive logits decide, where no two of the first six are close."""
    truth = define_divergence(defined_logits(*p), defined_logits(*q), targets)
    naive_p, naive_q = (torch.softmax(naive_logits(*side), -1) for side in (p, q))
    assert found.total_variation is not None
    assert truth.total_variation is not None
    naive = (naive_p - naive_q).abs().sum(-1) / 2
    assert_no_worse(found.total_variation, naive, truth.total_variation, VARIATION, "total_variation")
    assert found.same_first is not None
    assert truth.same_first is not None
    clear = torch.ones(len(targets), dtype=torch.bool, device=DEVICE)
    for side in (p, q):
        first = defined_logits(*side).topk(min(FIRST + 1, side[1].vocabulary)).values
        near = first[:, :-1] - first[:, 1:] < 2 * ROUNDINGS * rounding(*side)
        clear &= ~near.any(1)
    assert torch.equal(found.same_first[clear], truth.same_first[clear])


def diverged(hidden_p: Tensor, head_p: Head, hidden_q: Tensor, head_q: Head, targets: Tensor) -> Divergence:
    return finish_divergence(*diverge_fused(hidden_p, head_p, hidden_q, head_q, targets, gather=gather_own))


def nearby(hidden: Tensor, head: Head, noise: float = 0.02) -> tuple[Tensor, Head]:
    """The same head with small errors, as after quantization."""
    weight = head.weight.float() * (1 + noise * torch.randn(head.weight.shape, generator=generator(4)).to(DEVICE))
    return hidden, replace(head, weight=weight.to(head.weight.dtype))


PAIRS = [
    (Case(rows=5, depth=61, vocabulary=WIDE), Case(rows=5, depth=61, vocabulary=WIDE)),
    (Case(rows=5, depth=64, vocabulary=97, targets=3, bias=True), Case(rows=5, depth=16, vocabulary=97)),
    (
        Case(rows=5, depth=96, vocabulary=WIDE, dtype=torch.bfloat16, layout="wider rows"),
        Case(rows=5, depth=61, vocabulary=WIDE, dtype=torch.bfloat16, bias=True, padding=19),
    ),
    (
        Case(rows=5, depth=7, vocabulary=31, targets=MANY, scale=0.37, softcap=5.0),
        Case(rows=5, depth=64, vocabulary=31, softcap=5.0),
    ),
    (
        Case(rows=1, depth=16, vocabulary=WIDE, dtype=torch.float16),
        Case(rows=1, depth=16, vocabulary=WIDE, dtype=torch.bfloat16),
    ),
    (Case(rows=5, depth=61, vocabulary=33), Case(rows=5, depth=64, vocabulary=33, dtype=torch.bfloat16)),
    (Case(rows=5, depth=16, vocabulary=1, padding=19), Case(rows=5, depth=7, vocabulary=1)),
    (Case(rows=3, depth=1, vocabulary=2), Case(rows=3, depth=1, vocabulary=2, layout="transposed")),
]
if ON_GPU:
    PAIRS += [(replace(p, rows=129, vocabulary=50021), replace(q, rows=129, vocabulary=50021)) for p, q in PAIRS[:6]]


@pytest.mark.parametrize(("case_p", "case_q"), PAIRS, ids=str)
def test_divergence_of_unlike_heads(case_p: Case, case_q: Case) -> None:
    """Different depths, dtypes, biases, caps and layouts on both sides."""
    hidden_p, head_p, targets = random_problem(case_p)
    hidden_q, head_q, _ = random_problem(replace(case_q, seed=1))
    found = diverged(hidden_p, head_p, hidden_q, head_q, targets)
    assert_divergence(found, (hidden_p, head_p), (hidden_q, head_q), targets)


@pytest.mark.parametrize("noise", [1e-4, 1e-2, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divergence_of_heads_that_are_nearly_alike(noise: float, dtype: torch.dtype) -> None:
    case = Case(rows=129, depth=200, vocabulary=20011) if ON_GPU else Case(rows=5, depth=61, vocabulary=97)
    hidden, head, targets = random_problem(replace(case, dtype=dtype))
    other, head_q = nearby(hidden, head, noise)
    found = diverged(hidden, head, other, head_q, targets)
    assert_divergence(found, (hidden, head), (other, head_q), targets)


PLAIN = [Case(rows=5, depth=7, vocabulary=WIDE, dtype=dtype) for dtype in DTYPES]
SHAPED = [(case, None) for case in (PAIRS[1][0], PAIRS[2][1], PAIRS[3][0])]


@pytest.mark.parametrize(
    ("case", "which"), [*((case, which) for case in PLAIN for which in (None, *FORBIDDEN)), *SHAPED], ids=str
)
def test_a_head_does_not_diverge_from_itself(case: Case, which: str | None) -> None:
    """Exactly 0.0, also if both forbid the same ids."""
    hidden, head, targets = random_problem(case)
    head = head if which is None else forbid(head, FORBIDDEN[which], case.dtype)
    assert diverged(hidden, head, hidden, head, targets).kl.tolist() == [0.0] * case.rows


@pytest.mark.parametrize("cuts", [[], [1, 50]])
def test_columns_of_a_divergence_are_exactly_ranked(cuts: list[int]) -> None:
    hidden_p, head_p, targets = whole_problem(9, 2, 130, k=2)
    hidden_q, head_q, _ = whole_problem(9, 3, 130, seed=1)
    found = diverge_sharded((hidden_p, head_p), (hidden_q, head_q), targets, cuts)
    assert_exactly_ranked(found.q, hidden_q, head_q, targets)


@pytest.mark.parametrize("vocabulary", [1, 2, 4, 5, 33, WIDE])
def test_first_choices_in_order_with_ties(vocabulary: int) -> None:
    """q is p without one of its first choices, so that they share from none to all of them."""
    rows = 40 if ON_GPU else 21  # every first choice is missing three times, and there are two blocks of rows
    logits = torch.randint(-3, 4, (rows, vocabulary), generator=generator(vocabulary)).float()
    order, other = logits.sort(dim=1, descending=True, stable=True).indices, logits.clone()
    for row in range(rows):
        other[row, order[row, row % min(7, vocabulary)]] = -9.0
    (hidden_p, head_p), (hidden_q, head_q) = head_with_logits(logits), head_with_logits(other)
    targets = torch.zeros(rows, 1, dtype=torch.int64, device=DEVICE)
    found = diverged(hidden_p, head_p, hidden_q, head_q, targets).same_first
    truth = define_divergence(logits, other, targets.cpu()).same_first
    assert found is not None
    assert truth is not None
    assert found.tolist() == truth.tolist()
    assert vocabulary < 5 or len(set(truth.tolist())) > 2, "the rows are too much alike"


@pytest.mark.parametrize("which", FORBIDDEN)
def test_what_p_allows_and_q_forbids_is_infinitely_far(which: str) -> None:
    hidden, head, targets = random_problem(Case(rows=5, depth=7, vocabulary=WIDE))
    found = diverged(hidden, head, hidden, forbid(head, FORBIDDEN[which]), targets)
    assert found.kl.tolist() == [INFINITY] * 5


@pytest.mark.parametrize("which", FORBIDDEN)
@pytest.mark.parametrize("q_too", [False, True])
def test_what_p_forbids_counts_nothing(which: str, q_too: bool) -> None:
    """Whether or not q forbids it too, and also if targets of either side are -inf."""
    hidden, head, targets = whole_problem(5, 7, WIDE, k=2)
    targets[:, 0] = torch.tensor(range(WIDE), device=DEVICE)[FORBIDDEN[which]][0]
    head_p = forbid(head, FORBIDDEN[which])
    other, head_q = nearby(hidden, head, 0.3)
    head_q = forbid(head_q, FORBIDDEN[which]) if q_too else head_q
    found = diverged(hidden, head_p, other, head_q, targets)
    truth = define_divergence(defined_logits(hidden, head_p), defined_logits(other, head_q), targets)
    assert bool(truth.kl.isfinite().all())
    assert_no_worse(found.kl, naive_kl(hidden, head_p, other, head_q), truth.kl, KL_NATS + KL_SHARE * truth.kl, "kl")


@pytest.mark.parametrize("drop", [20.0, 80.0, 500.0])
@pytest.mark.parametrize("peak", [0, 40, 96])
def test_an_id_far_below_that_q_forbids(drop: float, peak: int) -> None:
    """Infinite if float32 can represent its probability. If not, 0 is allowed too, and NaN is not."""
    logits = torch.full((2, 97), -drop)
    logits[:, peak] = 0.0
    hidden, head = head_with_logits(logits)
    targets = torch.tensor([[peak], [7]], device=DEVICE)
    for forbidden in (slice(0, 32) if peak else slice(32, 64), [95]):
        found = diverged(hidden, head, hidden, forbid(head, forbidden), targets)
        allowed = (INFINITY,) if drop < 500 else (0.0, INFINITY)
        assert all(kl in allowed for kl in found.kl.tolist()), (forbidden, found.kl)


def diverge_sharded(p: tuple[Tensor, Head], q: tuple[Tensor, Head], targets: Tensor, cuts: list[int]) -> Divergence:
    heads = list(zip(shards_of(p[1], cuts), shards_of(q[1], cuts), strict=True))
    sent: list[Tensor] = []

    def record(x: Tensor) -> list[Tensor]:
        sent.append(x)
        return [x]

    def run(index: int, share: Share, gather: Gather = record) -> tuple[DivergencePartials, Tensor]:
        shard_p, shard_q = heads[index]
        return diverge_fused(p[0], shard_p, q[0], shard_q, targets, share, gather)

    shares = exchanged(run, len(heads))
    assert len(sent) == len(heads), "each rank gathers once"
    done = [run(i, share, lambda _: sent) for i, share in enumerate(shares)]
    assert all(torch.equal(at_q, done[0][1]) for _, at_q in done)
    return finish_divergence(combine_divergence([part for part, _ in done]), done[0][1])


@pytest.mark.parametrize("cuts", CUTS)
def test_divergence_from_shards(cuts: str) -> None:
    hidden_p, head_p, targets = random_problem(Case(rows=5, depth=7, vocabulary=WIDE))
    hidden_q, head_q, _ = random_problem(Case(rows=5, depth=16, vocabulary=WIDE, bias=True, seed=1))
    found = diverge_sharded((hidden_p, head_p), (hidden_q, head_q), targets, CUTS[cuts])
    assert_divergence(found, (hidden_p, head_p), (hidden_q, head_q), targets)


def test_divergence_from_shards_with_forbidden_ids() -> None:
    """0.0 from itself, infinite if only q forbids an id, finite if only p does; also for a whole shard of ids."""
    hidden, head, targets = random_problem(Case(rows=5, depth=7, vocabulary=130))
    fewer = forbid(head, [3, *range(50, 90)])
    cuts = [50, 90, 90]
    assert diverge_sharded((hidden, fewer), (hidden, fewer), targets, cuts).kl.tolist() == [0.0] * 5
    assert diverge_sharded((hidden, head), (hidden, fewer), targets, cuts).kl.tolist() == [INFINITY] * 5
    found = diverge_sharded((hidden, fewer), (hidden, head), targets, cuts)
    truth = define_divergence(defined_logits(hidden, fewer), defined_logits(hidden, head), targets)
    assert_no_worse(found.kl, naive_kl(hidden, fewer, hidden, head), truth.kl, KL_NATS + KL_SHARE * truth.kl, "kl")


def assert_same_divergence(
    found: tuple[DivergencePartials, Tensor], expected: tuple[DivergencePartials, Tensor], rows: Tensor | slice
) -> None:
    assert_same_bits(found[0].q, rows_of(expected[0].q, rows))
    for name in DivergencePartials.__slots__[1:]:
        own, whole = getattr(found[0], name), getattr(expected[0], name)
        assert (own is None) == (whole is None)
        assert own is None or torch.equal(own, whole[rows]), name
    assert torch.equal(found[1], expected[1][rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_batching_of_a_divergence_gives_the_same_bits(dtype: torch.dtype) -> None:
    n, v = (300, 20011) if ON_GPU else (20, 40)
    hidden_p, head_p, targets = random_problem(Case(rows=n, depth=61, vocabulary=v, targets=2, dtype=dtype))
    hidden_q, head_q, _ = random_problem(Case(rows=n, depth=64, vocabulary=v, seed=1, dtype=dtype))
    expected = diverge_fused(hidden_p, head_p, hidden_q, head_q, targets, gather=gather_own)
    shuffled = torch.randperm(n, generator=generator(9)).to(DEVICE)
    pieces = [slice(a, b) for a, b in pairwise([0, 1, 8, n])]
    batchings: list[Tensor | slice] = [slice(None), shuffled, *pieces]
    for rows in batchings:
        found = diverge_fused(hidden_p[rows], head_p, hidden_q[rows], head_q, targets[rows], gather=gather_own)
        assert_same_divergence(found, expected, rows)


def test_several_launches_of_a_divergence_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    n = rows_of_launches(3)
    hidden_p, head_p, targets = random_problem(Case(rows=n, depth=7, vocabulary=40, targets=2, bias=True))
    hidden_q, head_q, _ = random_problem(Case(rows=n, depth=16, vocabulary=40, seed=1))
    expected = diverge_fused(hidden_p, head_p, hidden_q, head_q, targets)
    shrink_launches(monkeypatch)
    calls = []

    def share(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x

    assert_same_divergence(diverge_fused(hidden_p, head_p, hidden_q, head_q, targets, share), expected, slice(None))
    assert (len(calls), sum(calls)) == (3, n)  # of the candidate alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shaped", [False, True])
def test_kept_logits_change_no_bit_of_a_divergence(
    dtype: torch.dtype, shaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launches; p's logits are computed for the first candidate and read for the second."""
    shrink_launches(monkeypatch)
    size = Case(rows=rows_of_launches(2), depth=17, vocabulary=40, dtype=dtype, bias=shaped)
    hidden_p, head_p, targets = random_problem(replace(size, targets=2, softcap=3.0 if shaped else None))
    kept = dict[tuple[int, ...], Tensor]()
    for seed in (1, 2):
        hidden_q, head_q, _ = random_problem(replace(size, depth=16, seed=seed))
        expected = diverge_fused(hidden_p, head_p, hidden_q, head_q, targets)
        found = diverge_fused(hidden_p, head_p, hidden_q, head_q, targets, kept=kept)
        assert_same_divergence(found, expected, slice(None))
        assert kept


def test_divergence_of_no_rows_and_of_no_ids() -> None:
    hidden, head, targets = random_problem(Case(rows=5, depth=7, vocabulary=33))
    assert diverged(hidden[:0], head, hidden[:0], head, targets[:0]).kl.shape == (0,)
    empty = replace(head, vocabulary=0, first_id=33)
    nothing, at_q = diverge_fused(hidden, empty, hidden, empty, targets)
    assert nothing.cross.tolist() == nothing.total_p.tolist() == nothing.total_q.tolist() == [0.0] * 5
    assert nothing.q.total.tolist() == [0.0] * 5
    assert at_q.tolist() == [[-INFINITY]] * 5


DEEP = Case(rows=300, depth=2000, vocabulary=50021, dtype=torch.bfloat16)  # tiles of two units on a GPU
DEEP_CASES = [DEEP, replace(DEEP, depth=1601, targets=3, bias=True)] if ON_GPU else []


@pytest.mark.parametrize("case", [*(pair[1] for pair in PAIRS), *DEEP_CASES], ids=str)
def test_scores_beside_a_divergence_are_the_bits_of_scores_alone(case: Case) -> None:
    hidden_q, head_q, targets = random_problem(case)
    hidden_p, head_p = nearby(hidden_q, head_q)
    beside, alone = diverge_fused(hidden_p, head_p, hidden_q, head_q, targets), reduce_fused(hidden_q, head_q, targets)
    assert_same_bits(beside[0].q, alone[0])
    assert torch.equal(beside[1], alone[1])
