"""Many targets after one prompt stay within the batch budget, whether or not the model can share a prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scoremode.core.models.facts import inspect
from scoremode.core.scores.answers import Window, WindowList
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from tests.makers import VOCABULARY

BUDGET = 64  # tokens in one forward pass
TARGETS = 40


def mamba() -> Any:
    """A seeded model that keeps a state instead of keys and values, so no prefix can be shared."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4))


def group(prompt: int) -> WindowList:
    """One prompt of the given length, and continuations of 3 to 6 tokens that differ from their first token."""
    numbers = np.random.default_rng(0)
    beginning = numbers.integers(2, VOCABULARY, prompt)
    windows = []
    for i in range(TARGETS):
        rest = np.concatenate([[2 + i], numbers.integers(2, VOCABULARY, 2 + i % 4)])
        ids = np.concatenate([beginning, rest]).astype(np.int32)
        rows = np.arange(prompt - 1, len(ids) - 1, dtype=np.int32)
        windows.append(Window(ids, rows, ids[prompt:, None]))
    return WindowList(tuple(windows), np.zeros(TARGETS, np.int64))


def logprobs(engine: TransformersEngine, source: WindowList) -> list[list[float]]:
    found = dict(engine.score(source, np.zeros(len(source), np.bool_)))
    return [found[i].logprob[:, 0].tolist() for i in range(len(source))]


@pytest.mark.parametrize(("model", "prompt"), [("mamba", 12), ("llama", 1)], ids=["stateful", "nothing in common"])
def test_a_group_that_shares_nothing_is_fed_within_the_budget(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, model: str, prompt: int
) -> None:
    options = TransformersOptions(batch_tokens=BUDGET)
    if model == "mamba":
        engine = TransformersEngine(mamba(), options=options)
        assert not engine.shares_prefixes
    else:
        engine = TransformersEngine.load(inspect(str(tiny)), options)
    source = group(prompt)
    alone = [logprobs(engine, WindowList((window,)))[0] for window in source.items]
    fed: list[int] = []
    hidden = engine._hidden

    def watched(ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
        fed.append(ids.numel())
        return hidden(ids, cache)

    monkeypatch.setattr(engine, "_hidden", watched)
    together = logprobs(engine, source)
    assert max(fed) <= BUDGET
    assert len(fed) > 1
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, abs=2e-5)
