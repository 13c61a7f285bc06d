"""Figures of the group ``exactness`` of gpu_checks.py: name -> (measured, allowed), for the head and for this engine.

bits        scores with and without a divergence, for every kernel: bits that differ; KL of a head to itself
tf32        float32 with the switches that allow TF32: error of the head in nats, scores that change in the whole engine
memory      bytes that a divergence needs in addition to its inputs
noise       the noise floor can be measured for any length of windows, and leaves the engine unchanged
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import own_windows, score_all

from scoremode.core.engine.baseline import held_states
from scoremode.core.models.facts import inspect
from scoremode.core.scores.answers import Answers, WindowList
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.head.budget import most_bytes
from scoremode.head.columns import Columns, define_columns, define_logits
from scoremode.head.kernels import _candidates, choose
from scoremode.head.matrix import Head
from scoremode.head.precision import ALLOWED, product_error

Figures = dict[str, tuple[float, float]]
HEAD_NATS = 2e-4
LENGTHS = (1000, 640, 640, 257, 33)  # of windows
KERNELS = ("fused", "rows", "plain", "blocked")


@dataclass(frozen=True)
class Place:
    """Where and on what it is measured."""

    device: str
    model: str
    rows: int = 700
    depth: int = 512
    ids: int = 32_003
    longest: int = 1000  # tokens of a window


def figures(device: str, model: str, **sizes: int) -> Figures:
    place = Place(device, model, **sizes)
    return {**bits(place), **tf32(place), **memory(device), **noise(place)}


def drawn(place: Place, dtype: torch.dtype) -> tuple[torch.Tensor, Head, torch.Tensor, Head, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(place.rows, place.depth, generator=random)
    weight = torch.randn(place.ids, place.depth, generator=random) * 4 / place.depth**0.5
    moved = [x * (1 + 0.01 * torch.randn(x.shape, generator=random)) for x in (hidden, weight)]
    targets = torch.randint(0, place.ids, (place.rows, 1), generator=random).to(place.device)
    pairs = ((hidden, weight), moved)
    (hidden, weight), (other, its_weight) = ([x.to(place.device, dtype) for x in pair] for pair in pairs)
    return hidden, Head(weight, place.ids), other, Head(its_weight, place.ids), targets


def usable(head: Head) -> Iterator[Any]:
    """The kernels that support this head; ``choose`` raises an error if one of them fails its self-test."""
    for name in KERNELS:
        try:
            _candidates(head, name)
        except Exception:  # not for this device or dtype
            continue
        yield choose(head, name).kernel


# ── bits ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def bits(place: Place) -> Figures:
    found: Figures = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32) if place.device == "cuda" else (torch.float32,):
        hidden_p, head_p, hidden_q, head_q, targets = drawn(place, dtype)
        for kernel in usable(head_q):
            label = f"{kernel.name}, {str(dtype).removeprefix('torch.')}"
            beside = kernel.divergence(hidden_p, head_p, hidden_q, head_q, targets).q
            found[f"scores that differ with a divergence, {label}"] = (
                float(different(beside, kernel.score(hidden_q, head_q, targets))),
                0.0,
            )
            itself = kernel.divergence(hidden_q, head_q, hidden_q, head_q, targets)
            found[f"KL of a head and itself, {label}"] = (float(itself.kl.abs().max()), 0.0)
    return found


def different(a: Columns, b: Columns) -> int:
    return sum(int((getattr(a, name) != getattr(b, name)).sum()) for name in Columns.__slots__)


# ── TF32 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def allowed_to_round() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def tf32(place: Place) -> Figures:
    hidden, head, _, _, targets = drawn(place, torch.float32)
    truth = define_columns(define_logits(hidden, head.weight), targets).logprob
    found: Figures = {}
    with allowed_to_round():
        found["error of a float32 product, as a share of its size"] = (
            product_error(torch.device(place.device)),
            ALLOWED,
        )
        for kernel in usable(head):
            off = float((kernel.score(hidden, head, targets).logprob.double() - truth).abs().max())
            found[f"nats off although TF32 is allowed, {kernel.name}"] = (off, HEAD_NATS)
        plain = (hidden @ head.weight.T).double().log_softmax(-1).gather(1, targets)
        # without this control, the check above would prove nothing; a CPU may have no faster product of fewer bits
        rounding = float((plain - truth).abs().max())
        found["(control) a bare product is rounded: 1 less its nats over ten times what is allowed"] = (
            1 - rounding / (10 * HEAD_NATS),
            0.0 if place.device == "cuda" else float("inf"),
        )
        rounded = scores(place, opened(place, "float32"))
    exact = scores(place, opened(place, "float32"))
    moved = sum(int((a.logprob != b.logprob).sum()) for a, b in zip(rounded, exact, strict=True))
    found["scores of a float32 model that TF32 moves"] = (float(moved), 0.0)
    return found


def opened(place: Place, dtype: str, batch_tokens: int | None = None) -> TransformersEngine:
    options = TransformersOptions(device=place.device, dtype=dtype, batch_tokens=batch_tokens)
    return TransformersEngine.load(inspect(place.model), options)


def windows(place: Place, vocabulary: int) -> WindowList:
    random = np.random.default_rng(0)
    return own_windows(random.integers(3, vocabulary, min(length, place.longest)) for length in LENGTHS)


def scores(place: Place, engine: TransformersEngine) -> list[Answers]:
    return score_all(engine, windows(place, engine.vocabulary))


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def memory(device: str) -> Figures:
    if device != "cuda":
        return {}
    found: Figures = {}
    random = torch.Generator(device=device).manual_seed(0)
    hidden = torch.randn(2048, 256, generator=random, device=device)
    head = Head(torch.randn(128_256, 256, generator=random, device=device), 128_256)
    targets = torch.zeros(2048, 1, dtype=torch.int64, device=device)
    for name, models in (("rows", 1), ("plain", 1), ("rows", 2), ("plain", 2)):
        kernel = choose(head, name).kernel
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if models == 2:
            kernel.divergence(hidden, head, hidden, head, targets)
        else:
            kernel.score(hidden, head, targets)
        taken = (torch.cuda.max_memory_allocated() - before) / 2**20
        # workspaces of the library, and the answers, are not part of the documented figure
        found[f"MiB of {'a divergence' if models == 2 else 'scores'}, {name}"] = (
            taken,
            most_bytes(device, models) / 2**20 + 64,
        )
    return found


# ── noise ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def noise(place: Place) -> Figures:
    found: Figures = {}
    for dtype in ("float32", "bfloat16"):
        for batch_tokens in (1, None):
            engine = opened(place, dtype, batch_tokens)
            source = windows(place, engine.vocabulary)
            none = np.zeros(len(source), np.bool_)
            before = scores(place, engine)
            floor = engine.noise_floor(held_states(engine, source, none), source, none)
            moved = sum(int((a.logprob != b.logprob).sum()) for a, b in zip(before, scores(place, engine), strict=True))
            label = f"{dtype}, {'windows alone' if batch_tokens else 'windows together'}"
            measured = float("inf") if floor.kl is None else float(floor.kl.mean())
            found[f"noise floor, KL mean, {label} ({floor.words})"] = (measured, 0.1)
            found[f"scores that its measurement changed, {label}"] = (float(moved), 0.0)
    return found
