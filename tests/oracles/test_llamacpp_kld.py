"""A real model and its 4-bit version: our divergence against float64, and against llama.cpp's formulas, longhand.

llama.cpp keeps the baseline's log-probabilities in 16 bits, floored 16 nats below the largest logit, and leaves out of
the sum what is not above -16. Without these two its formula must give our numbers on the same logits; with them it must
be off by what they do, and they alone make a model diverge from itself.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file

from scoremode.core.engine.base import Want
from scoremode.core.engine.baseline import states_in
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.models.facts import resolve
from scoremode.core.statistics.comparison import Comparison
from scoremode.core.verbs.compare import compare
from scoremode.head.divergence import define_divergence
from scoremode.studies.kld.statistics import llamacpp_statistics, llamacpp_text
from tests.core.statistics.test_comparison import longhand
from tests.makers import ask

EXAMPLE = Path(__file__).parents[2] / "examples" / "emulate_quantization.py"
MODEL = "smollm2-135m"
TEXT = (
    "A compiler that rounds is a compiler that lies a little. Whoever measures must say how much, and in which "
    "direction, and must not call the error of the ruler the error of the thing. "
) * 7
QUESTION: dict[str, Any] = {"text": TEXT, "method": "llamacpp", "context_length": 128}

Array = npt.NDArray[np.float64]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = runpy.run_path(str(EXAMPLE))["emulate"](MODEL, tmp_path_factory.mktemp("four"), 4)
    return made


@pytest.fixture(scope="module")
def found(four_bits: Path, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    (comparison,) = compare(MODEL, str(four_bits), out=tmp_path_factory.mktemp("out"), dtype="float32", **QUESTION)
    return comparison


@pytest.fixture(scope="module")
def logits(four_bits: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(baseline's, candidate's, targets): the engine's own final states times the heads in the files, in float32."""
    both = []
    for folder in (resolve(MODEL), four_bits):
        asked = ask(str(folder), **QUESTION)
        plan = asked.plan
        engine = open_engine(choose(str(folder), None, {"dtype": "float32"}), Work())
        kept = {i: states_in(a) for i, a in engine.score(plan, np.zeros(len(plan), np.bool_), Want(states=True))}
        engine.close()
        weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]  # the head is tied to it
        states = torch.from_numpy(np.concatenate([kept[i] for i in range(len(plan))]))
        both.append(states.float() @ weight.float().T)
    targets = [torch.from_numpy(plan.window(i).targets.astype(np.int64)) for i in range(len(plan))]
    return both[0], both[1], torch.cat(targets)


def kl_of(comparison: Comparison) -> Array:
    assert comparison.kl is not None
    return comparison.kl


def test_kl_is_that_of_the_logits_in_float64(found: Comparison, logits: tuple[torch.Tensor, ...]) -> None:
    truth = define_divergence(*logits).kl.numpy()
    assert len(truth) > 100
    assert kl_of(found).mean() == pytest.approx(truth.mean(), rel=1e-6)
    assert kl_of(found) == pytest.approx(truth, rel=1e-6, abs=1e-9)


# ── llama.cpp ────────────────────────────────────────────────────────────────────────────────────────────────────────
def stored_in_16_bits(x: Array) -> Array:
    """Log-probabilities of a row as llama.cpp reads them back from its file."""
    low, high = max(x.min(), x.max() - 16.0), x.max()
    log_sum = np.log(np.exp(x - high).sum())
    scale = np.float32((high - low) / 65535.0)
    codes = np.rint((np.maximum(x, low) - low) / scale)
    least = np.float32(low - high - log_sum)
    return np.asarray(scale * codes + least, dtype=np.float64)


def log_probabilities(x: Array) -> Array:
    return np.asarray(x - x.max() - np.log(np.exp(x - x.max()).sum()))


def llamacpp_kld(base: Array, x: Array, *, leaves_out: bool) -> float:
    """Σ exp(base) · (base - log softmax(x)) over a row; ``leaves_out`` what the baseline has at -16 or below."""
    counted = base > -16.0 if leaves_out else np.full(base.shape, True)
    terms = np.exp(base) * (base - log_probabilities(x))
    return float(terms[counted].sum())


def test_its_formula_on_the_same_logits_prints_our_statistics(
    found: Comparison, logits: tuple[torch.Tensor, ...]
) -> None:
    """Every number that it prints, to one unit of its last digit."""
    base, x = logits[0].double().numpy(), logits[1].double().numpy()
    targets = logits[2][:, 0].numpy()
    kld = [llamacpp_kld(log_probabilities(p), q, leaves_out=False) for p, q in zip(base, x, strict=True)]
    every = range(len(base))
    nll, nll_base = ([-log_probabilities(rows[i])[targets[i]] for i in every] for rows in (x, base))
    same = (base.argmax(1) == x.argmax(1)).tolist()
    theirs = numbers_in(longhand(nll, nll_base, kld, same))
    ours = numbers_in(llamacpp_text(llamacpp_statistics(found)))
    assert len(ours) == len(theirs) > 40
    for (name, digits, mine), (their_name, _, their) in zip(ours, theirs, strict=True):
        assert name == their_name
        assert abs(mine - their) <= 1.01 * 10.0**-digits, name


def numbers_in(text: str) -> list[tuple[str, int, float]]:
    """(line, digits behind the point, number) of everything that is printed."""
    found = []
    for line in text.splitlines():
        name, _, values = line.partition(":")
        for word in values.replace("±", " ").replace("%", " ").split():
            found.append((name, len(word.partition(".")[2]), float(word)))
    return found


def test_what_its_16_bits_do(found: Comparison, logits: tuple[torch.Tensor, ...]) -> None:
    base, x = logits[0].double().numpy(), logits[1].double().numpy()
    kept = [stored_in_16_bits(row) for row in base]
    stored = np.array([llamacpp_kld(p, q, leaves_out=True) for p, q in zip(kept, x, strict=True)])
    itself = np.array([llamacpp_kld(p, q, leaves_out=True) for p, q in zip(kept, base, strict=True)])
    gap = abs(stored - kl_of(found))
    assert gap.mean() < 0.02 * kl_of(found).mean(), "much the same"
    assert gap.max() > 1e-5, "but not the same"
    assert abs(itself).max() > 1e-5, "a model diverges from its own 16 bits"
