"""Which kernel is chosen, what its note says, and that every kernel is tested before use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scoremode.core.models.facts import inspect
from scoremode.core.scores.answers import Answers, Window, WindowList, measured
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.errors import EngineError, OptionError
from scoremode.head import kernels
from scoremode.head.chunked import Share, keep_own
from scoremode.head.columns import Partials, define_columns, define_logits
from scoremode.head.kernels import HeadKind, Kernel, choose, describe_kernel, probe
from scoremode.head.matrix import Head
from tests.makers import VOCABULARY, make_family

PLAIN = Head(torch.zeros(7, 4), vocabulary=7)


class Elsewhere:
    """Has those attributes of a weight on another device that the order of preference depends on."""

    def __init__(self, device: str, dtype: torch.dtype, rows: int) -> None:
        self.device, self.dtype, self.shape = torch.device(device), dtype, (rows, 8)

    def stride(self, dimension: int) -> int:
        return (8, 1)[dimension]


def candidates(device: str, dtype: torch.dtype, rows: int = 50000, forced: str | None = None) -> tuple[str, ...]:
    weight: Any = Elsewhere(device, dtype, rows)
    return kernels._candidates(Head(weight, rows), forced)


@pytest.fixture
def unprobed() -> Iterator[None]:
    """Clear the cached results of probes before and after the test."""
    kernels._problem.cache_clear()
    yield
    kernels._problem.cache_clear()


# ── the order of preference ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("device", "dtype", "rows", "order"),
    [
        ("cpu", torch.float32, 50_000, ("blocked", "plain")),
        ("cpu", torch.float64, 50_000, ("blocked", "plain")),
        ("cpu", torch.bfloat16, 50_000, ("blocked", "plain")),
        ("cuda", torch.bfloat16, 50_000, ("fused", "rows", "plain")),
        ("cuda", torch.float16, 50_000, ("fused", "rows", "plain")),
        ("cuda", torch.bfloat16, kernels.SMALL_VOCABULARY, ("fused", "rows", "plain")),
        ("cuda", torch.bfloat16, kernels.SMALL_VOCABULARY - 1, ("rows", "plain")),  # too few tiles
        ("cuda", torch.float32, 50_000, ("rows", "plain")),  # its products do not run on the matrix units
        ("cuda", torch.float64, 50_000, ("plain",)),
        ("mps", torch.bfloat16, 50_000, ("plain",)),
        ("xpu", torch.float32, 50_000, ("plain",)),
    ],
)
def test_order_of_preference(device: str, dtype: torch.dtype, rows: int, order: tuple[str, ...]) -> None:
    assert candidates(device, dtype, rows) == order


# ── names that are forced ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_forced_kernel_is_used_also_where_it_is_not_preferred() -> None:
    for forced in (None, "blocked", "plain"):
        choice = choose(PLAIN, forced)
        assert (choice.kernel.name, choice.note) == (forced or "blocked", "")
    assert candidates("cuda", torch.float32, forced="fused") == ("fused",)
    assert candidates("cuda", torch.bfloat16, rows=5, forced="fused") == ("fused",)
    assert candidates("cuda", torch.bfloat16, forced="plain") == ("plain",)


@pytest.mark.parametrize(
    ("device", "dtype", "name", "words"),
    [
        *(
            ("cpu", torch.float32, name, "known; give one of fused, rows, blocked, plain")
            for name in ("fastest", "", "Blocked")
        ),
        *(
            ("cpu", torch.float32, name, "for cpu with float32 weights; give one of blocked, plain")
            for name in ("fused", "rows")
        ),
        ("cuda", torch.bfloat16, "blocked", "for cuda with bfloat16 weights; give one of fused, rows, plain"),
        ("cuda", torch.float64, "fused", "for cuda with float64 weights; give one of plain"),
    ],
)
def test_a_name_that_cannot_be_forced_is_refused(device: str, dtype: torch.dtype, name: str, words: str) -> None:
    with pytest.raises(OptionError) as refusal:
        candidates(device, dtype, forced=name)
    assert str(refusal.value) == f"--head-kernel {name} is not {words}"


# ── kernels that do not agree ────────────────────────────────────────────────────────────────────────────────────────
def replace_blocked(monkeypatch: pytest.MonkeyPatch, spoilt: Kernel) -> None:
    honest = kernels._kernel
    monkeypatch.setattr(kernels, "_kernel", lambda name: spoilt if name == "blocked" else honest(name))


def off_by(nats: float, compared: bool = True) -> Kernel:
    """The plain kernel with wrong targets' logits; without ``compared``, only if a model is scored alone."""
    plain = kernels._kernel("plain")

    def reduce(hidden: Tensor, head: Head, targets: Tensor, share: Share = keep_own) -> tuple[Partials, Tensor]:
        part, at_target = plain.reduce(hidden, head, targets, share)
        return part, at_target + nats

    def diverge(*sides: Any, **options: Any) -> Any:
        part, at_q = plain.diverge(*sides, **options)
        return part, at_q + nats

    return Kernel("blocked", reduce, diverge if compared else plain.diverge)


def misranking() -> Kernel:
    """The plain kernel, but ties go to the higher id."""
    plain = kernels._kernel("plain")

    def reduce(hidden: Tensor, head: Head, targets: Tensor, share: Share = keep_own) -> tuple[Partials, Tensor]:
        part, at_target = plain.reduce(hidden, head, targets, share)
        above = (head.logits(hidden)[:, None] > at_target[:, :, None]).sum(-1)
        return replace(part, before=above), at_target

    return Kernel("blocked", reduce, plain.diverge)


def rounded_to_tf32(x: Tensor) -> Tensor:
    """Round to 10 bits after the point, as the matrix units of GPUs do if TF32 is allowed."""
    bits = x.float().view(torch.int32)
    return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def multiplying(rounded: Callable[[Tensor], Tensor]) -> Kernel:
    """The plain kernel, but factors are rounded before they are multiplied."""
    plain = kernels._kernel("plain")

    def less(hidden: Tensor, head: Head) -> tuple[Tensor, Head]:
        return rounded(hidden), replace(head, weight=rounded(head.weight))

    def reduce(hidden: Tensor, head: Head, targets: Tensor, share: Share = keep_own) -> tuple[Partials, Tensor]:
        return plain.reduce(*less(hidden, head), targets, share)

    def diverge(*sides: Any, **options: Any) -> Any:
        hidden_p, head_p, hidden_q, head_q, *rest = sides
        return plain.diverge(*less(hidden_p, head_p), *less(hidden_q, head_q), *rest, **options)

    return Kernel("blocked", reduce, diverge)


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("rounded", [rounded_to_tf32, lambda x: x.bfloat16().float()], ids=["tf32", "bfloat16"])
def test_a_kernel_that_multiplies_with_fewer_bits_is_skipped(
    monkeypatch: pytest.MonkeyPatch, rounded: Callable[[Tensor], Tensor]
) -> None:
    replace_blocked(monkeypatch, multiplying(rounded))
    choice = choose(PLAIN)
    assert choice.kernel.name == "plain"
    assert "blocked skipped: off by 0.0" in choice.note


@pytest.mark.usefixtures("unprobed")
def test_no_kernel_at_all_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt = multiplying(rounded_to_tf32)
    monkeypatch.setattr(kernels, "_kernel", lambda name: spoilt)
    with pytest.raises(EngineError, match="no kernel gives the scores of the definition on cpu"):
        choose(PLAIN)


def diverging_by(nats: float) -> Kernel:
    plain = kernels._kernel("plain")

    def diverge(*sides: Any, **options: Any) -> Any:
        part, at_q = plain.diverge(*sides, **options)
        return replace(part, cross=part.cross + nats * part.total_p), at_q

    return Kernel("blocked", plain.reduce, diverge)


def raising(message: str) -> Kernel:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(message)

    return Kernel("blocked", fail, fail)


BROKEN: dict[str, tuple[Callable[[], Kernel], str]] = {
    "off by 0.01 nats": (lambda: off_by(1e-2), "off by 0.01 nats on the probe"),
    "not a number": (lambda: off_by(float("nan")), "off by nan nats on the probe"),
    "a divergence that is off": (lambda: diverging_by(1e-2), "off by 0.01 nats on the probe"),
    "other bits when compared": (
        lambda: off_by(1e-5, compared=False),
        "a model's scores differ between scoring and comparing it",
    ),
    "ties the wrong way": (misranking, "wrong ranks on the probe"),
    "raises": (lambda: raising("no compiler here\nand a second line"), "RuntimeError: no compiler here"),
    "raises without a word": (lambda: raising(""), "RuntimeError"),
}


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("how", BROKEN)
def test_a_kernel_that_disagrees_is_passed_over_with_a_note_or_refused(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    make, problem = BROKEN[how]
    replace_blocked(monkeypatch, make())
    assert describe_kernel(choose(PLAIN)) == {"head_kernel": "plain", "head_kernel_note": f"blocked skipped: {problem}"}
    with pytest.raises(OptionError) as refusal:
        choose(PLAIN, "blocked")
    assert str(refusal.value) == f"--head-kernel blocked cannot be used here: {problem}; leave --head-kernel out"


@pytest.mark.usefixtures("unprobed")
def test_a_small_disagreement_is_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_blocked(monkeypatch, off_by(1e-5))
    assert choose(PLAIN).kernel.name == "blocked"


@pytest.mark.usefixtures("unprobed")
def test_every_kind_of_head_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[HeadKind] = []
    honest = kernels.probe

    def note(kind: HeadKind, seed: int, **more: bool) -> Any:
        asked.append(kind)
        return honest(kind, seed, **more)

    monkeypatch.setattr(kernels, "probe", note)
    choose(PLAIN)
    choose(replace(PLAIN, weight=torch.ones(9, 4), vocabulary=9))
    assert len(asked) == 4  # two sides of a divergence, in whole and in fine numbers
    choose(replace(PLAIN, softcap=3.0))
    assert len(asked) == 8
    assert asked[4] == replace(asked[0], softcap=3.0)


@pytest.mark.usefixtures("unprobed")
def test_a_divergence_is_probed_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most questions never ask for one, and its kernels take as long to compile as those of the scores."""
    usual = Kernel.divergence

    def wrong(kernel: Kernel, *sides: Any) -> Any:
        found = usual(kernel, *sides)
        return replace(found, kl=found.kl + 1) if kernel.name == "blocked" else found

    monkeypatch.setattr(Kernel, "divergence", wrong)
    assert choose(PLAIN, divergence=False).kernel.name == "blocked"
    assert choose(PLAIN).kernel.name == "plain"


# ── the probe ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("shaped", [False, True])
def test_the_probe_is_exact_and_has_ties(dtype: torch.dtype, aligned: bool, shaped: bool) -> None:
    """Logits are the same in float32, in any order of addition, as in float64: a different rank is an error."""
    kind = HeadKind(torch.device("cpu"), dtype, shaped, shaped, None, aligned)
    hidden, head, targets = probe(kind, seed=1)
    assert kernels._kind(head) == kind
    bias = None if head.bias is None else head.bias[: head.vocabulary]
    logits = define_logits(hidden, head.weight[: head.vocabulary], bias, head.scale, head.softcap)
    assert torch.equal(logits.float().double(), logits)
    assert torch.equal(logits * 8, (logits * 8).round())
    assert float(logits.abs().max()) < 2**15  # eighths of that are whole multiples within float32's 24 bits
    assert head.vocabulary < head.weight.shape[0]
    assert int(targets.max()) == head.vocabulary - 1
    equal = (logits == logits.gather(1, targets)).sum(1)
    assert bool((equal > 1).all()), "every target is tied with another id"
    by_id = define_columns(logits, targets).rank[:, 0]
    assert bool((by_id > 1 + (logits > logits.gather(1, targets)).sum(1)).any()), "ties decide some rank"


# ── what a run records ───────────────────────────────────────────────────────────────────────────────────────────────
def engine_for(folder: Path, **options: Any) -> TransformersEngine:
    return TransformersEngine.load(inspect(str(folder)), TransformersOptions(device="cpu", **options))


def answers_of(engine: TransformersEngine) -> Answers:
    ids = np.random.default_rng(0).integers(2, VOCABULARY, 60).astype(np.int32)
    window = Window(ids, np.arange(59, dtype=np.int32), ids[1:, None])
    ((_, answers),) = engine.score(WindowList((window,)), np.zeros(1, np.bool_))
    return answers


def test_an_engine_records_its_kernel_and_the_plain_one_gives_the_same_scores(tiny: Path) -> None:
    engine, plain = engine_for(tiny), engine_for(tiny, head_kernel="plain")
    assert engine.facts.settings["head_kernel"] == "blocked"
    assert plain.facts.settings["head_kernel"] == "plain"
    assert "head_kernel_note" not in engine.facts.settings
    ours, theirs = answers_of(engine), answers_of(plain)
    assert np.ptp(ours.logprob) > 1  # a model whose distribution is not flat
    for name in ("logprob", "entropy", "top_logprob"):
        assert np.abs(getattr(ours, name) - getattr(theirs, name)).max() < 1e-5, name
    assert np.array_equal(measured(ours.rank), measured(measured(theirs.rank)))
    assert np.array_equal(measured(ours.top), measured(measured(theirs.top)))


@pytest.mark.usefixtures("unprobed")
def test_an_engine_records_why_a_kernel_was_skipped(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_blocked(monkeypatch, off_by(1e-2))
    settings = engine_for(tiny).facts.settings
    assert settings["head_kernel"] == "plain"
    assert settings["head_kernel_note"] == "blocked skipped: off by 0.01 nats on the probe"


@pytest.mark.parametrize("family", ["gemma2", "granite", "phi"])
def test_capped_scaled_and_biased_heads_take_the_same_kernel(family: str) -> None:
    assert TransformersEngine(make_family(family)).facts.settings["head_kernel"] == "blocked"


def test_as_served_uses_the_models_logits_and_no_kernel(tiny: Path) -> None:
    engine = engine_for(tiny, head="as-served")
    assert engine.facts.settings["head_kernel"] == "logits"
    with pytest.raises(OptionError) as refusal:
        engine_for(tiny, head="as-served", head_kernel="plain")
    assert str(refusal.value) == "--head-kernel plain: the model's own logits are used; leave --head-kernel out"
