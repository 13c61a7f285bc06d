"""float32 products are computed in float32, whatever the process has set, and its switches are restored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from scoremode.errors import EngineError
from scoremode.head import precision
from scoremode.head.kernels import choose
from scoremode.head.matrix import Head
from scoremode.head.precision import full_float32, product_error, product_precision, require_float32

CPU = torch.device("cpu")


@pytest.fixture(params=["high", "medium"])
def asked(request: pytest.FixtureRequest) -> Iterator[str]:
    """A process that allows float32 products to be rounded."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def test_switches_are_off_inside_and_as_before_outside(asked: str) -> None:
    outside = {device: product_precision(device) for device in ("cpu", "cuda")}
    assert outside["cuda"] == "tf32"
    with full_float32():
        assert {product_precision(device) for device in outside} == {"ieee"}
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"  # type: ignore[attr-defined]
    assert {device: product_precision(device) for device in outside} == outside
    assert torch.get_float32_matmul_precision() == asked
    assert torch.backends.cuda.matmul.allow_tf32


def test_switches_are_as_before_after_an_error(asked: str) -> None:
    with pytest.raises(ZeroDivisionError), full_float32():
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == asked


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("name", ["blocked", "plain"])
@pytest.mark.parametrize("n", [100, 400])
def test_kernels_multiply_in_float32(name: str, n: int) -> None:
    """On a CPU with AMX, ``medium`` rounds to bfloat16: 0.1 nats and more."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(n, 64, generator=random), torch.randn(5003, 64, generator=random)
    targets = torch.randint(0, 5003, (n, 1), generator=random)
    head = Head(weight, 5003)
    kernel = choose(head, name).kernel
    truth = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(1, targets)
    assert (kernel.score(hidden, head, targets).logprob - truth).abs().max() < 1e-4
    assert (kernel.divergence(hidden, head, hidden, head, targets).q.logprob - truth).abs().max() < 1e-4


@pytest.mark.usefixtures("asked")
def test_products_of_this_machine_are_float32_ones() -> None:
    assert product_error(CPU) < precision.ALLOWED
    require_float32(CPU)


@pytest.mark.parametrize(
    ("value", "fix"), [("1", "unset NVIDIA_TF32_OVERRIDE"), ("0", "report this"), (None, "report this")]
)
def test_products_that_no_switch_makes_exact_are_refused(
    monkeypatch: pytest.MonkeyPatch, value: str | None, fix: str
) -> None:
    """As with a library that always rounds: here factors are rounded to TF32 before they are multiplied."""
    honest = torch.mm

    def rounding(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = ((x.view(torch.int32) & ~((1 << 13) - 1)).view(torch.float32) for x in (a, b))
        return honest(a, b)

    monkeypatch.setattr(torch, "mm", rounding)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    if value is not None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
    with pytest.raises(EngineError, match="float32 products on cpu are off by") as refusal:
        require_float32(CPU)
    assert fix in str(refusal.value)
