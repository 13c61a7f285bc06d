"""Batches, and windows that share a forward pass: each once, little padding, little computed twice, the same scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoremode.core.engine.batching import PADDING_SHARE, batches_by_length, common_prefix
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.models.facts import inspect
from scoremode.core.scores.answers import Window, WindowList, measured
from scoremode.engines.transformers.batches import fed, pack, passes
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.values import Ints
from tests import rounding
from tests.engines.judging import all_scored, scored
from tests.makers import VOCABULARY


def groups_of(prompts: list[int], choices: list[int], rest: int = 3) -> WindowList:
    """Questions with prompts of these lengths; all choices of one begin alike and then differ."""
    windows, numbers = [], []
    for question, (prompt, count) in enumerate(zip(prompts, choices, strict=True)):
        for choice in range(count):
            ids = np.concatenate([np.full(prompt, 5 + question % 200), np.full(rest, 10 + choice)]).astype(np.int32)
            rows = np.arange(prompt - 1, len(ids), dtype=np.int32)
            windows.append(Window(ids, rows, np.full((len(rows), 1), 7, np.int32)))
            numbers.append(question)
    return WindowList(tuple(windows), np.array(numbers, dtype=np.int64))


def packed(source: WindowList, budget: int, cost: int) -> list[Ints]:
    return pack(source, batches_by_length(source, budget), budget, cost)


@given(
    st.lists(st.tuples(st.integers(2, 90), st.integers(1, 5)), max_size=25), st.integers(16, 600), st.integers(0, 64)
)
def test_every_window_once_and_little_is_fed_again(questions: list[tuple[int, int]], budget: int, cost: int) -> None:
    source = groups_of([p for p, _ in questions], [c for _, c in questions])
    batches = packed(source, budget, cost)
    assert sorted(i for b in batches for i in b.tolist()) == list(range(len(source)))
    assert source.prefix_group is not None
    for batch in batches:
        numbers = source.prefix_group[batch]
        inside = list(dict.fromkeys(numbers.tolist()))
        if len(inside) == len(batch) or len(inside) == 1:
            continue  # single windows by length, or one group, which stays whole however large it is
        prompts = {
            n: common_prefix([fed(source.window(int(i))) for i in batch if source.prefix_group[i] == n]) for n in inside
        }
        shortest, longest = min(prompts.values()), max(prompts.values())
        assert len(inside) * longest <= budget
        again = sum((prompts[n] - shortest) * int((numbers == n).sum()) for n in inside)
        assert again <= cost + PADDING_SHARE * longest * len(inside)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 12), st.integers(0, 64))
def test_passes_hold_every_window_once_with_little_padding(rest: list[int], most: int, cost: int) -> None:
    found = passes(rest, most, cost)
    assert sorted(i for part in found for i in part.tolist()) == list(range(len(rest)))
    for part in found:
        inside = [rest[i] for i in part.tolist()]
        assert len(inside) <= most
        assert len(inside) * max(inside) - sum(inside) <= cost + PADDING_SHARE * max(inside) * len(inside)


@pytest.mark.parametrize("given_tokens", [None, 40])
def test_scores_do_not_depend_on_the_groups_beside_them(tiny: Path, given_tokens: int | None) -> None:
    options = {"dtype": "float32"} | ({"batch_tokens": given_tokens} if given_tokens else {})
    engine = open_engine(choose(str(tiny), None, options), Work())
    source = groups_of([30, 31, 29, 12, 30, 2, 3], [3, 2, 4, 3, 1, 2, 2])
    together = scored(engine, source)
    assert sorted(together) == list(range(len(source)))
    for index, window in enumerate(source.items):
        (alone,) = all_scored(engine, WindowList((window,)))
        assert together[index].logprob == pytest.approx(alone.logprob, abs=rounding.of_checkpoint(tiny))
        assert np.array_equal(measured(together[index].rank), measured(alone.rank))


def source(lengths: list[int], groups: Ints | None = None) -> WindowList:
    nothing = np.zeros((0, 1), np.int32)
    windows = tuple(Window(np.zeros(n, np.int32), np.zeros(0, np.int32), nothing) for n in lengths)
    return WindowList(windows, groups)


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 2000))
def test_every_window_once_within_the_budget_and_the_padding(lengths: list[int], budget: int) -> None:
    batches = batches_by_length(source(lengths), budget)
    assert sorted(i for b in batches for i in b.tolist()) == list(range(len(lengths)))
    for batch in batches:
        inside = [lengths[i] for i in batch.tolist()]
        assert len(batch) == 1 or len(batch) * max(inside) <= budget
        assert sum(inside) >= (1 - PADDING_SHARE) * len(inside) * max(inside) - 1e-9


def test_equal_windows_keep_their_order_and_those_that_share_a_prompt_stay_together() -> None:
    assert [b.tolist() for b in batches_by_length(source([8] * 5), 16)] == [[0, 1], [2, 3], [4]]
    batches = batches_by_length(source([5, 9, 6, 9, 7], np.array([0, 1, 0, 2, 0])), 100)
    assert [b.tolist() for b in batches] == [[0, 2, 4], [1, 3]]


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
    return [answers.logprob[:, 0].tolist() for answers in all_scored(engine, source)]


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
    hidden = engine.parts.hidden

    def watched(ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
        fed.append(ids.numel())
        return hidden(ids, cache)

    monkeypatch.setattr(engine.parts, "hidden", watched)
    together = logprobs(engine, source)
    assert max(fed) <= BUDGET
    assert 1 < len(fed) < TARGETS / 2, "several at a time"
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, abs=rounding.of_model(engine.model))
