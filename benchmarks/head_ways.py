"""The implementations that ``head.py`` compares, from hidden states and a head to scores, and the float64 result.

Each one is built for one problem and is then called without arguments. The calls to the libraries:

liger                       LigerFusedLinearCrossEntropyLoss(reduction="none")(weight, hidden, targets)
cut-cross-entropy           linear_cross_entropy(hidden, weight, targets, reduction="none")
torch linear_cross_entropy  F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=…)

All three are training kernels. Under ``no_grad``, with inputs that need no gradient, they compute losses only.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from scoremode.head.budget import KERNELS
from scoremode.head.columns import define_columns, define_logits
from scoremode.head.divergence import define_divergence
from scoremode.head.kernels import choose
from scoremode.head.matrix import Head

VLLM_ROWS = 1024  # vLLM computes prompt log-probabilities for this many rows at a time
COMPILED_ROWS = 2048
SAMPLED_ROWS = 256  # rows that are compared with float64
DRIFT = 0.01  # how far the second model of a divergence is from the first


class CannotRunError(Exception):
    """Why an implementation is not measured here, in one line."""


# ── the problem ──────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Size:
    """A problem in numbers: enough to make the same tensors in any process."""

    rows: int
    width: int
    vocabulary: int
    dtype: str
    device: str

    @property
    def label(self) -> str:
        return f"D{self.width} V{self.vocabulary}"


class Problem:
    """Hidden states, a head and one target per row; for divergences a second, slightly different model. Seeded."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.random = torch.Generator(size.device).manual_seed(20)
        self.hidden = self._normal(size.rows, size.width)
        # logits with a spread of 3 nats: a few hundred ids share the probability, as in a language model
        self.weight = self._normal(size.vocabulary, size.width).mul_(3 / math.sqrt(size.width))
        self.targets = torch.randint(
            size.vocabulary, (size.rows, 1), generator=self.random, device=size.device, dtype=torch.int64
        )

    def _normal(self, *shape: int) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.size.dtype)
        return torch.randn(*shape, generator=self.random, device=self.size.device, dtype=dtype)

    @cached_property
    def second(self) -> tuple[Tensor, Tensor]:
        """Hidden states and weight of the second model."""
        hidden, weight = self._normal(*self.hidden.shape), self._normal(*self.weight.shape)
        hidden.mul_(DRIFT).add_(self.hidden)
        weight.mul_(DRIFT * 3 / math.sqrt(self.size.width)).add_(self.weight)
        return hidden, weight

    @cached_property
    def sample(self) -> Tensor:
        """Rows spread over the batch, including the first and the last."""
        count = min(SAMPLED_ROWS, self.size.rows)
        return torch.linspace(0, self.size.rows - 1, count, device=self.size.device).long()

    @cached_property
    def true_logprob(self) -> Tensor:
        """Of the sampled rows, in float64."""
        parts = torch.split(self.sample, 64)
        found = [define_columns(_exact_logits(self.hidden[i], self.weight), self.targets[i]).logprob for i in parts]
        return torch.cat(found)[:, 0]

    @cached_property
    def true_divergence(self) -> Tensor:
        hidden, weight = self.second
        return torch.cat(
            [
                define_divergence(
                    _exact_logits(self.hidden[i], self.weight), _exact_logits(hidden[i], weight), self.targets[i]
                ).kl
                for i in torch.split(self.sample, 64)
            ]
        )


def _exact_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """In blocks of the vocabulary: the whole weight in float64 would need more memory than any measured call."""
    return torch.cat([define_logits(hidden, block) for block in torch.split(weight, 16384)], dim=1)


# ── a way ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Way:
    """``call`` returns its answer first, log-probabilities or divergences (n,) or (n, 1), then other results."""

    name: str
    columns: str
    call: Callable[[], tuple[Tensor, ...]]
    truth: Callable[[], Tensor] | None  # what the answer should be on the sampled rows; None: it has no answer
    kernel: str = ""  # name of scoremode's kernel, if it is one

    def result_bytes(self, result: tuple[Tensor, ...]) -> int:
        """Bytes of the columns that a caller keeps. The product of a bare matmul is not one of them."""
        return 0 if self.truth is None else sum(x.numel() * x.element_size() for x in result)

    def largest_error(self, problem: Problem, result: tuple[Tensor, ...]) -> float | None:
        if self.truth is None:
            return None
        answer = result[0].reshape(len(problem.hidden))[problem.sample].double()
        return float((answer - self.truth()).abs().max())


def _scores(problem: Problem, name: str, columns: str, call: Callable[[], tuple[Tensor, ...]]) -> Way:
    return Way(name, columns, call, lambda: problem.true_logprob)


def _losses(problem: Problem, name: str, columns: str, call: Callable[[], Tensor]) -> Way:
    return _scores(problem, name, columns, lambda: (call().neg_(),))


# ── plain PyTorch ────────────────────────────────────────────────────────────────────────────────────────────────────
def matmul(problem: Problem) -> Way:
    return Way("matmul", "none: the product alone", lambda: (problem.hidden @ problem.weight.T,), None)


def _in_chunks(call: Callable[..., tuple[Tensor, ...]], rows: int, *by_row: Tensor) -> tuple[Tensor, ...]:
    """``call`` on a few rows of all tensors at a time; what it returns is joined."""
    parts = [call(*(x[i : i + rows] for x in by_row)) for i in range(0, len(by_row[0]), rows)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _logprob_and_rank(weight: Tensor, hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    logp = torch.log_softmax(hidden @ weight.T, dim=-1, dtype=torch.float32)
    at_target = logp.gather(1, targets)
    return at_target, (logp > at_target).sum(1) + 1


def naive(problem: Problem) -> Way:
    call = partial(_logprob_and_rank, problem.weight, problem.hidden, problem.targets)
    return _scores(problem, "naive", "logprob, rank", call)


def vllm(problem: Problem) -> Way:
    reduce = partial(_logprob_and_rank, problem.weight)
    call = partial(_in_chunks, reduce, VLLM_ROWS, problem.hidden, problem.targets)
    return _scores(problem, "vllm", "logprob, rank", call)


def _all_columns(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    x = logits.float()
    at_target = x.gather(1, targets)
    top_logit, top = x.max(1)
    total = x.logsumexp(1)
    entropy = total - ((x - total[:, None]).exp() * x).sum(1)
    return at_target - total[:, None], (x > at_target).sum(1) + 1, entropy, top, top_logit - total


def compiled(problem: Problem) -> Way:
    torch.compiler.reset()  # otherwise earlier shapes count towards dynamo's limit, and it silently stops compiling
    reduce = torch.compile(_all_columns, dynamic=False, fullgraph=True)

    def one_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = reduce(hidden @ problem.weight.T, targets)
        return found

    call = partial(_in_chunks, one_chunk, COMPILED_ROWS, problem.hidden, problem.targets)
    return _scores(problem, "compiled", "all five", call)


# ── training kernels ─────────────────────────────────────────────────────────────────────────────────────────────────
def _library(module: str, package: str, device: str) -> Any:
    if device != "cuda":
        raise CannotRunError("its kernels need a GPU")
    try:
        return import_module(module)
    except ImportError as error:
        raise CannotRunError(f"no {package} here: {error}") from None


def liger(problem: Problem) -> Way:
    library = _library("liger_kernel.transformers", "liger-kernel", problem.size.device)
    loss = library.LigerFusedLinearCrossEntropyLoss(reduction="none")
    targets = problem.targets[:, 0]
    return _losses(problem, "liger", "logprob", lambda: loss(problem.weight, problem.hidden, targets))


def cut_cross_entropy(problem: Problem) -> Way:
    library = _library("cut_cross_entropy", "cut-cross-entropy", problem.size.device)
    targets = problem.targets[:, 0]
    return _losses(
        problem,
        "cut-cross-entropy",
        "logprob",
        lambda: library.linear_cross_entropy(problem.hidden, problem.weight, targets, reduction="none"),
    )


def torch_linear_cross_entropy(problem: Problem) -> Way:
    loss: Any = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if loss is None:
        raise CannotRunError(f"torch {torch.__version__} has no linear_cross_entropy")
    named: dict[str, Any] = {"reduction": "none"}
    # without options it computes all logits at once
    options: Any = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is not None and "options" in inspect.signature(loss).parameters:
        named["options"] = options()
    call = partial(loss, problem.hidden, problem.weight, problem.targets[:, 0], **named)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    chunked = "options" in named and not any("ignored" in str(w.message) for w in caught)
    columns = "logprob; in chunks" if chunked else "logprob; logits whole"
    return _losses(problem, "torch linear_cross_entropy", columns, call)


# ── scoremode ────────────────────────────────────────────────────────────────────────────────────────────────────────
def scoremode(problem: Problem, kernel: str | None = None) -> Way:
    """Every column, by the kernel chosen on this device, or by the named one."""
    head = Head(problem.weight, problem.size.vocabulary)
    choice = choose(head) if kernel is None else choose(head, kernel)

    def call() -> tuple[Tensor, ...]:
        found = choice.kernel.score(problem.hidden, head, problem.targets)
        return found.logprob, found.rank, found.entropy, found.top, found.top_logprob

    name = "scoremode" if kernel is None else f"scoremode ({kernel})"
    columns = _noted(f"all five; {choice.kernel.name}", choice.note)
    return Way(name, columns, call, lambda: problem.true_logprob, choice.kernel.name)


def scoremode_kl(problem: Problem, whole: bool = False) -> Way:
    hidden, weight = problem.second
    head_p, head_q = (Head(w, problem.size.vocabulary) for w in (problem.weight, weight))
    choice = choose(head_p)

    def call() -> tuple[Tensor, ...]:
        found = choice.kernel.divergence(problem.hidden, head_p, hidden, head_q, problem.targets, whole)
        return found.kl, *(getattr(found.q, name) for name in type(found.q).__slots__)

    what, name = ("all four", "scoremode divergence") if whole else ("KL", "scoremode KL")
    columns = _noted(f"{what}, all five of q; {choice.kernel.name}", choice.note)
    return Way(name, columns, call, lambda: problem.true_divergence, choice.kernel.name)


def _noted(columns: str, note: str) -> str:
    return f"{columns} ({note})" if note else columns


def naive_kl(problem: Problem) -> Way:
    hidden, weight = problem.second

    def one_chunk(hidden_p: Tensor, hidden_q: Tensor) -> tuple[Tensor, ...]:
        log_p = torch.log_softmax(hidden_p @ problem.weight.T, dim=-1, dtype=torch.float32)
        log_q = torch.log_softmax(hidden_q @ weight.T, dim=-1, dtype=torch.float32)
        return ((log_p.exp() * (log_p - log_q)).sum(1),)

    call = partial(_in_chunks, one_chunk, VLLM_ROWS, problem.hidden, hidden)
    return Way("naive KL", "KL", call, lambda: problem.true_divergence)


BUILDERS: dict[str, Callable[[Problem], Way]] = {
    "matmul": matmul,
    "naive": naive,
    "vllm": vllm,
    "compiled": compiled,
    "liger": liger,
    "cut-cross-entropy": cut_cross_entropy,
    "torch linear_cross_entropy": torch_linear_cross_entropy,
    "scoremode": scoremode,
    "naive KL": naive_kl,
    "scoremode KL": scoremode_kl,
    "scoremode divergence": partial(scoremode_kl, whole=True),
}
OTHER_KERNELS: dict[str, Callable[[Problem], Way]] = {
    f"scoremode ({name})": partial(scoremode, kernel=name) for name in KERNELS
}


def build(name: str, problem: Problem) -> Way:
    return (BUILDERS | OTHER_KERNELS)[name](problem)
