"""Transformers on the decode path: token by token with its cache, judged by its own prefill in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.plan.path import DecodePath
from scoremode.core.scores.answers import Answers, WindowList, measured
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.errors import ModelError
from tests import rounding
from tests.engines.judging import random_windows, scored
from tests.makers import VOCABULARY, make_family, with_changed_tensors


def windows_of(*lengths: int) -> WindowList:
    """Windows that ask for every row, the first of them for its last three rows alone."""
    first, *others = random_windows(*lengths).items
    return WindowList((replace(first, rows=first.rows[-3:], targets=first.targets[-3:]), *others))


SOURCE = windows_of(40, 7, 33, 2, 40, 21, 12)


def engine_of(model: Path, path: DecodePath | None) -> TransformersEngine:
    engine = open_engine(choose(str(model), None, {"dtype": "float32"}), Work(longest=40, path=path))
    assert isinstance(engine, TransformersEngine)
    return engine


@pytest.fixture(scope="module")
def prefilled(tiny: Path) -> dict[int, Answers]:
    return scored(engine_of(tiny, None), SOURCE, states=True)


PATHS = [DecodePath(1), DecodePath(3), DecodePath(16), DecodePath(3, 5), DecodePath(4, 1000)]


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_decode_equals_prefill_on_every_target(tiny: Path, prefilled: dict[int, Answers], path: DecodePath) -> None:
    engine = engine_of(tiny, path)
    shapes: list[tuple[int, int]] = []
    engine.body.register_forward_pre_hook(
        lambda _, __, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    found = scored(engine, SOURCE, states=True)
    assert sorted(found) == list(range(len(SOURCE)))
    for index, answers in found.items():
        for name in ("logprob", "entropy", "top_logprob"):
            assert np.abs(getattr(answers, name) - getattr(prefilled[index], name)).max() < rounding.of_checkpoint(
                tiny
            ), name
        assert np.array_equal(measured(answers.top), measured(prefilled[index].top))
        assert np.abs(measured(answers.states) - measured(prefilled[index].states)).max() < 1e-3
    # it was really fed so: as many windows at a time as there are sequences, and one token of each after the prefill
    order = sorted((len(window.ids) - 1 for window in SOURCE.items), reverse=True)
    expected = []
    for begin in range(0, len(order), path.sequences):
        batch = order[begin : begin + path.sequences]
        first = min(path.prefill_tokens, batch[0])
        expected += [(len(batch), first)] + [(len(batch), 1)] * (batch[0] - first)
    assert shapes == expected


def test_progress_moves_while_a_batch_is_decoded(tiny: Path) -> None:
    told: list[tuple[int, int]] = []
    text = "the quick brown fox jumps over the lazy dog"
    sm.ppl(str(tiny), text=text, path="decode", fresh=True, progress=lambda done, total: told.append((done, total)))
    done, totals = zip(*told, strict=True)
    assert len(set(totals)) == 1
    assert done[0] == 0
    assert done[-1] == totals[0]
    assert list(done) == sorted(done)
    assert len(set(done)) > 5  # there is one window


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "cohere"])
def test_caches_of_other_families(kind: str) -> None:
    model = make_family(kind).float()
    source = windows_of(40, 7, 33, 21)
    prefill = scored(TransformersEngine(model), source)
    decode = scored(TransformersEngine(model, path=DecodePath(3, 2)), source)
    for index, answers in decode.items():
        assert np.abs(answers.logprob - prefill[index].logprob).max() < rounding.of_model(model)


def test_sliding_windows_of_a_batch_of_different_lengths() -> None:
    """Every layer sees 8 tokens: none of the shorter windows may see what is fed after their end, or too few tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(3)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        sliding_window=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        **sizes,
    )
    model = MistralForCausalLM(config).float()
    wide = MistralForCausalLM(MistralConfig(**{**config.to_dict(), "sliding_window": None})).float()
    wide.load_state_dict(model.state_dict())
    source = windows_of(40, 7, 8, 9, 33, 21)
    prefill = scored(TransformersEngine(model), source)
    for path in (DecodePath(6), DecodePath(4, 12)):
        decode = scored(TransformersEngine(model, path=path), source)
        assert max(np.abs(decode[i].logprob - prefill[i].logprob).max() for i in decode) < rounding.of_model(model)
    seen = scored(TransformersEngine(wide, path=DecodePath(6)), source)
    assert np.abs(seen[4].logprob - prefill[4].logprob).max() > 0.01, "the sliding window matters here"


def test_bfloat16_decodes_near_its_prefill(tiny: Path) -> None:
    """In 16 bits the paths differ, by the rounding of the states and not more."""
    chosen = choose(str(tiny), None, {"dtype": "bfloat16"})
    prefill, decode = (
        scored(open_engine(chosen, Work(longest=40, path=path)), SOURCE) for path in (None, DecodePath(3))
    )
    gap = np.concatenate([(decode[i].logprob - prefill[i].logprob).ravel() for i in range(len(SOURCE))])
    assert np.sqrt((gap**2).mean()) < 0.02
    assert np.abs(gap).max() < 0.2


def test_a_model_without_such_a_cache_is_refused(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model._is_stateful = True
    with pytest.raises(ModelError, match="has no cache of keys and values; use prefill"):
        TransformersEngine(model, path=DecodePath())


# ── divergence ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def changed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of ``tiny``, slightly changed."""
    return with_changed_tensors(tiny, tmp_path_factory.mktemp("changed"), lambda _, weight: weight * 1.05)


def test_compare_decodes_both_models_beside_each_other_or_against_a_reference(
    tiny: Path, changed: Path, tmp_path: Path
) -> None:
    question: dict[str, Any] = {"text": "the cat sat on the mat and the dog ran away " * 4, "context_length": 24}
    decode: dict[str, Any] = {"path": "decode", "sequences": 3, "dtype": "float32", **question}
    prefill = sm.compare(str(tiny), str(changed), dtype="float32", **question)[0]
    beside = sm.compare(str(tiny), str(changed), **decode)[0]
    kept = sm.reference(str(tiny), tmp_path / "ref", **decode)
    stored = sm.compare(str(kept.path), str(changed), dtype="float32")[0]
    assert np.array_equal(measured(beside.kl), measured(stored.kl))
    assert np.abs(measured(beside.kl) - measured(prefill.kl)).max() < rounding.of_checkpoint(tiny)
    assert beside.noise_kl is not None
    assert 0 <= np.abs(beside.noise_kl).max() < rounding.of_checkpoint(tiny)
    assert beside.noise_perturbed is not None
    assert "one window per batch instead of several" in beside.noise_perturbed
    assert "padding" not in beside.noise_perturbed
    before = [np.array(found.baseline.scores.logprob) for found in (prefill, beside)]
    with sm.open(str(tiny), dtype="float32") as model:  # one model, asked by both paths
        asked = model.ppl(fresh=True, **question), model.ppl(fresh=True, path="decode", sequences=3, **question)
    for run, logprob in zip(asked, before, strict=True):
        assert np.array_equal(run.scores.logprob, logprob)
