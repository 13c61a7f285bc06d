"""Swaps of weights: the bits of a whole model with these weights, whatever is skipped and kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch

from scoremode.core.engine.base import FinalStates, Wanted
from scoremode.core.engine.baseline import held_states
from scoremode.core.scores.answers import Answers, Window, WindowList
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.errors import EngineError
from scoremode.studies.attribution.engines import transformers_swaps
from scoremode.studies.attribution.engines.transformers_swaps import ALL_LAYERS, NO_ROOM, SwappableModel
from tests.makers import VOCABULARY, make_family


def family(kind: str) -> Any:
    """Seeded models of several architectures, with and without a tied head."""
    import transformers as t

    torch.manual_seed(3)
    common = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 44, "initializer_range": 0.3}
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**common, **heads, tie_word_embeddings=False))
    if kind == "qwen2":
        return t.Qwen2ForCausalLM(t.Qwen2Config(**common, **heads, tie_word_embeddings=True))
    if kind == "mixtral":
        return t.MixtralForCausalLM(t.MixtralConfig(**common, **heads, num_local_experts=4))
    return make_family(kind)


def windows() -> WindowList:
    """Windows of odd lengths, one of a single token; some ask for their last rows only."""
    rng = np.random.default_rng(5)
    found = []
    for length, first in ((37, 0), (36, 0), (20, 11), (1, 0), (7, 3), (37, 30)):
        ids = rng.integers(0, VOCABULARY, length + 1).astype(np.int32)
        rows = np.arange(first, length, dtype=np.int32)
        found.append(Window(ids[:-1], rows, ids[1:][rows][:, None]))
    return WindowList(tuple(found))


def opened(model: Any) -> TransformersEngine:
    return TransformersEngine(model, options=TransformersOptions.of({"batch_tokens": 80}))


@contextmanager
def recorded(model: Any, source: WindowList) -> Iterator[SwappableModel]:
    with SwappableModel(opened(model)) as swaps:
        list(swaps.record(source, range(len(swaps.layers) + 1)))
        yield swaps


def held(baseline: Any, source: WindowList) -> FinalStates:
    return held_states(opened(baseline), source, np.zeros(len(source), np.bool_))


def compared(baseline: FinalStates, candidate: Any, source: WindowList) -> dict[int, Answers]:
    """What ``compare`` gets: a whole candidate against the states and the head of the baseline."""
    return dict(opened(candidate).score(source, np.zeros(len(source), np.bool_), Wanted(against=baseline)))


def noisy(model: Any, name: str) -> torch.Tensor:
    own: torch.Tensor = dict(model.named_parameters())[name].data
    return own + 0.1 * torch.randn(own.shape, generator=torch.Generator().manual_seed(1))


def require_same(found: dict[int, Answers], expected: dict[int, Answers]) -> None:
    assert found.keys() == expected.keys()
    for index, answers in expected.items():
        for name in ("kl", "logprob", "top", "rank", "entropy"):
            assert np.array_equal(getattr(found[index], name), getattr(answers, name)), name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "gpt2", "phi", "mixtral"])
def test_a_swap_has_the_bits_of_a_model_with_that_weight(kind: str) -> None:
    """Some weights, swapped one by one, against whole models; afterwards all is as it was."""
    model, source = family(kind), windows()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with recorded(copy.deepcopy(model), source) as swaps:
        assert not swaps.notes
        baseline, names = held(model, source), list(swaps.parameters)
        for name in [*names[:3], *names[5 : -3 : len(names) // 4], *names[-2:]]:
            new = noisy(model, name)
            candidate = copy.deepcopy(model)
            dict(candidate.named_parameters())[name].data.copy_(new)
            with swaps.swapped([name], {name: new}.__getitem__) as changed:
                assert changed == [name]
                found = dict(swaps.diverge(source, swaps.start_of([name])))
            require_same(found, compared(baseline, candidate, source))
        for name, value in swaps.model.state_dict().items():
            assert torch.equal(value, before[name]), name
    again = dict(opened(swaps.model).score(source, np.zeros(len(source), np.bool_)))
    expected = dict(opened(model).score(source, np.zeros(len(source), np.bool_)))
    assert all(np.array_equal(again[i].logprob, expected[i].logprob) for i in expected)  # no hook is left


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_swaps_start_as_late_as_they_can(kind: str) -> None:
    with recorded(family(kind), windows()) as swaps:
        names = [name for name in swaps.parameters if ".1." in name]
        assert swaps.start_of(names) == 1
        assert swaps.start_of(["model.embed_tokens.weight"]) == 0
        if kind == "llama":
            assert swaps.start_of(["lm_head.weight"]) == 3
        calls: list[int] = []
        for index, layer in enumerate(swaps.layers):
            layer.self_attn.register_forward_hook(lambda *_, index=index: calls.append(index))
        with swaps.swapped(names[:1], lambda name: noisy(swaps.model, name)):
            list(swaps.diverge(windows(), 1))
        assert calls
        assert 0 not in calls


@pytest.mark.parametrize("keeps_logits", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_models_own_weights_diverge_by_exactly_nothing(
    keeps_logits: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = windows()
    monkeypatch.setattr(transformers_swaps, "SHARE_OF_LOGITS", float(keeps_logits))
    with recorded(family("llama").to(dtype), source) as swaps:
        for start in range(4):
            found = dict(swaps.diverge(source, start))
            assert sorted(found) == list(range(len(source)))
            assert all(answers.kl is not None and not answers.kl.any() for answers in found.values())


def test_states_that_do_not_fit_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source, model = windows(), family("llama")
    name = "model.layers.2.mlp.down_proj.weight"
    answers = []
    for free in (1 << 30, 100_000):
        monkeypatch.setattr(transformers_swaps, "available", lambda free=free: free)
        with recorded(model, source) as swaps, swaps.swapped([name], lambda name: noisy(model, name)):
            assert swaps.notes == ([] if free > 100_000 else [NO_ROOM])
            assert swaps.start_of([name]) == (2 if free > 100_000 else 0)
            tokens = 37 * 2 + 36 + 20 + 7 + 1  # batches of 80 tokens; windows are cut after their last row
            assert swaps._size(source, 3) == 3 * tokens * 32 * 4 > 50_000
            answers.append(dict(swaps.diverge(source, swaps.start_of([name]))))
    require_same(*answers)


def test_weights_come_back_after_an_error() -> None:
    model = family("qwen2")
    with recorded(model, windows()) as swaps:
        name = "model.embed_tokens.weight"
        before, head = model.state_dict()[name].clone(), swaps.engine.head
        with suppress(ZeroDivisionError), swaps.swapped([name], lambda _: torch.zeros_like(before)):
            assert swaps.engine.head is not head  # the head is tied
            raise ZeroDivisionError
        assert torch.equal(model.state_dict()[name], before)
        assert swaps.engine.head is head
        with pytest.raises(EngineError, match="has the shape"), swaps.swapped([name], lambda _: torch.zeros(2, 2)):
            pass
        assert torch.equal(model.state_dict()[name], before)


def test_equal_weights_are_told_from_changed_ones() -> None:
    with recorded(family("llama").to(torch.bfloat16), windows()) as swaps:
        names = ["lm_head.weight", "model.norm.weight"]
        own = {name: swaps.parameters[name].data.float() for name in names}
        with swaps.swapped(names, lambda name: own[name]) as changed:
            assert changed == []
        with swaps.swapped(names, lambda name: own[name] * (2 if "norm" in name else 1)) as changed:
            assert changed == ["model.norm.weight"]
            assert swaps.parameters["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(("giver", "reader"), [(0, 1), (0, 2), (1, 2)])
def test_a_model_whose_layers_share_more_is_computed_whole(giver: int, reader: int) -> None:
    """A layer that reads what an earlier one left behind: skipping the earlier one would be silently wrong."""
    model, source = family("llama"), windows()

    first, last, seen = model.model.layers[giver], model.model.layers[reader], []
    own_first, own_last = first.forward, last.forward

    def remembering(hidden_states: Any, **kwargs: Any) -> Any:
        seen.append(hidden_states[:, :1])
        return own_first(hidden_states, **kwargs)

    first.forward = remembering
    last.forward = lambda hidden_states, **kwargs: own_last(hidden_states * seen[-1], **kwargs)
    with recorded(model, source) as swaps:
        assert swaps.notes == [ALL_LAYERS]
        assert swaps.start_of(["model.layers.2.mlp.down_proj.weight"]) == 0
