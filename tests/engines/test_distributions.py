"""Logits against both kinds of baseline: hidden states, and distributions in 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from scoremode.core.engine.base import StoredDistributions, StoredHead
from scoremode.core.engine.distributions import IndexedWindow, load_baseline
from scoremode.core.scores.answers import Window
from scoremode.head.columns import define_columns
from scoremode.head.divergence import Divergence, define_divergence
from scoremode.values import Raw
from tests.studies.kld.kld_files import kl_longhand, random_logits, record

VOCABULARY, WIDTH, ROWS = 311, 16, 9
CPU = torch.device("cpu")
STATES = random_logits(2 * ROWS, WIDTH, seed=1, size=1.0)
WEIGHT = random_logits(VOCABULARY, WIDTH, seed=2, size=1.0)
LOGITS_P = torch.from_numpy(STATES @ WEIGHT.T)
LOGITS_Q = LOGITS_P + torch.from_numpy(random_logits(2 * ROWS, VOCABULARY, seed=3, size=0.2))


def window(seed: int) -> Window:
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, ROWS + 1).astype(np.int32)
    return Window(ids[:-1], np.arange(ROWS, dtype=np.int32), ids[1:, None])


WINDOWS: list[IndexedWindow] = [(0, window(0)), (1, window(1))]
TARGETS = torch.from_numpy(np.concatenate([w.targets for _, w in WINDOWS]).astype(np.int64))


class States:
    """Hidden states in memory."""

    place = None
    dtype = "float32"
    head = StoredHead(WEIGHT, None, "float32", "float32", VOCABULARY)

    def states(self, index: int, window: Window) -> Raw:
        return STATES[index * ROWS : (index + 1) * ROWS]


class Records(StoredDistributions):
    """Distributions in memory, written longhand."""

    vocabulary = VOCABULARY

    def records(self, index: int, window: Window) -> Raw:
        rows = LOGITS_P[index * ROWS : (index + 1) * ROWS].numpy()
        return np.stack([np.frombuffer(record(row), "<u2") for row in rows])


def diverged(against: Any) -> Divergence:
    kept = torch.cat([against.window(*indexed)(slice(0, ROWS)) for indexed in WINDOWS])
    found: Divergence = against.diverge(kept, LOGITS_Q.clone(), TARGETS, VOCABULARY)
    return found


def test_logits_against_hidden_states() -> None:
    against = load_baseline(States(), CPU, VOCABULARY)
    found = diverged(against)
    truth = define_divergence(LOGITS_P, LOGITS_Q, TARGETS)
    assert found.kl.numpy() == pytest.approx(truth.kl.numpy(), abs=1e-7)
    assert found.q.logprob.numpy() == pytest.approx(truth.q.logprob.numpy(), abs=1e-5)


def test_logits_against_stored_distributions() -> None:
    against = load_baseline(Records(), CPU, VOCABULARY)
    found = diverged(against)
    for row, kl in enumerate(found.kl.tolist()):
        words = np.frombuffer(record(LOGITS_P[row].numpy()), "<u2")
        scale, lowest = words[:4].view("<f4").astype(float)
        stored = [scale * code + lowest for code in words[4 : 4 + VOCABULARY].tolist()]
        assert kl == pytest.approx(kl_longhand(stored, LOGITS_Q[row].numpy()), rel=1e-9, abs=1e-12)
    truth = define_columns(LOGITS_Q, TARGETS)
    assert found.q.logprob.numpy() == pytest.approx(truth.logprob.numpy(), abs=1e-5)
    assert torch.equal(found.q.rank, truth.rank)
