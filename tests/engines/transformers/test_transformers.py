"""The Transformers engine against the model's own logits, read in float64."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.models.facts import inspect
from scoremode.core.scores.answers import Answers, Window, WindowList, measured, own_tokens
from scoremode.engines.transformers.choices import TransformersOptions
from scoremode.engines.transformers.engine import TransformersEngine
from scoremode.errors import ModelError
from tests import rounding
from tests.engines.judging import all_scored, assert_defined, random_ids
from tests.makers import VOCABULARY, make_family, make_tiny_model


def engine_for(folder: Path, **options: Any) -> TransformersEngine:
    return TransformersEngine.load(inspect(str(folder)), TransformersOptions(**options))


def logits_of(engine: TransformersEngine, window: Window) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = engine.model(torch.from_numpy(window.ids.astype(np.int64))[None]).logits[0]
    return logits[window.rows.tolist()]


def assert_true(answers: Answers, engine: TransformersEngine, window: Window) -> None:
    assert_defined(answers, logits_of(engine, window), window, rounding.of_model(engine.model))


@pytest.mark.parametrize("head", ["exact", "as-served"])
def test_a_config_whose_answers_have_no_names(tiny: Path, tmp_path: Path, head: str) -> None:
    """``return_dict: false`` makes Transformers answer with bare tuples; the scores are the same."""
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"return_dict": False}))
    source = WindowList((own_tokens(random_ids(30)),))
    ((found,), (wanted,)) = (all_scored(engine_for(place, head=head), source) for place in (folder, tiny))
    np.testing.assert_array_equal(found.logprob, wanted.logprob)


def test_the_batch_size_changes_nothing_beyond_float_noise(tiny: Path) -> None:
    """One window per pass against all windows in one pass."""
    windows = WindowList(tuple(own_tokens(random_ids(n, n)) for n in (40, 41, 42, 43, 44, 45)))
    alone = all_scored(engine_for(tiny, batch_tokens=1), windows)
    together = all_scored(engine_for(tiny, batch_tokens=10_000), windows)
    difference = max(np.abs(a.logprob - b.logprob).max() for a, b in zip(alone, together, strict=True))
    assert difference < rounding.of_checkpoint(tiny)
    assert all(np.array_equal(measured(a.rank), measured(b.rank)) for a, b in zip(alone, together, strict=True))


def test_a_shared_prompt_is_fed_once_and_gives_the_same_numbers(tiny: Path) -> None:
    engine = engine_for(tiny)
    prompt = random_ids(60)
    windows = []
    for length in (1, 1, 3, 6, 2):
        ids = np.concatenate([prompt, random_ids(length, 100 + length)])
        windows.append(Window(ids[:-1], np.arange(59, len(ids) - 1, dtype=np.int32), ids[60:, None]))
    fed: list[int] = []
    hook = engine.body.register_forward_pre_hook(
        lambda _, __, inputs: fed.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    answers = all_scored(engine, WindowList(tuple(windows), np.zeros(5, np.int64)))
    hook.remove()
    assert sum(fed) < 100, "the prompt of 60 tokens was fed more than once"
    for answer, window in zip(answers, windows, strict=True):
        assert_true(answer, engine, window)


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere", "gpt2", "phi"])
@pytest.mark.parametrize("head", ["exact", "as-served"])
def test_caps_scales_biases_and_other_families(kind: str, head: str) -> None:
    engine = TransformersEngine(make_family(kind), options=TransformersOptions(head=head))
    assert engine.facts.head == {"exact": "exact-fp32", "as-served": "as-served"}[head]
    window = own_tokens(random_ids(40))
    assert_true(all_scored(engine, WindowList((window,)))[0], engine, window)


def test_capped_attention_is_eager_because_sdpa_leaves_the_cap_out(tmp_path: Path) -> None:
    model, window = make_family("gemma2"), own_tokens(random_ids(40))
    model.config.attn_logit_softcapping = 5.0
    model.save_pretrained(tmp_path)
    engine = engine_for(tmp_path)
    assert engine.facts.settings["attention"] == "eager"
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert_true(all_scored(engine, WindowList((window,)))[0], TransformersEngine(eager), window)
    assert engine_for(tmp_path, attn_implementation="sdpa").facts.settings["attention"] == "sdpa"


def test_a_head_that_is_more_than_a_matrix_is_asked_for_its_logits_and_said_to_be_as_served() -> None:
    model = make_family("gpt2")

    class Twice(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    strange = Twice(32, VOCABULARY, bias=False)
    strange.weight = model.lm_head.weight
    model.lm_head = strange
    engine = TransformersEngine(model)
    assert engine.facts.head == "as-served"
    window = own_tokens(random_ids(10))
    assert_true(all_scored(engine, WindowList((window,)))[0], engine, window)


def test_bfloat16_on_the_exact_head_keeps_what_bfloat16_logits_round_away(tiny: Path) -> None:
    engine = engine_for(tiny, dtype="bfloat16")
    assert engine.facts.dtype == "bfloat16"
    ids = random_ids(30)
    with torch.inference_mode():
        hidden = engine.model.model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0, :-1]
        exact = hidden.double() @ engine.model.lm_head.weight.double().T
    window = own_tokens(ids)
    assert_defined(all_scored(engine, WindowList((window,)))[0], exact, window, rounding.of_model(engine.model))


def test_the_embedded_models_perplexity_of_a_known_text() -> None:
    """One real model, end to end: the float64 reading of its own logits."""
    chosen = choose("smollm2-135m")
    subject, engine = chosen.subject, open_engine(chosen, Work())
    assert isinstance(engine, TransformersEngine)
    ids = subject.tokenizer.encode("The quick brown fox jumps over the lazy dog. It was 1999.", special=True).ids
    window = own_tokens(ids)
    (answers,) = all_scored(engine, WindowList((window,)))
    assert_defined(answers, logits_of(engine, window), window, rounding.of_sums(576, 40.0))  # one body, two heads
    assert 1 < math.exp(-answers.logprob.mean()) < 60


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    make_tiny_model(tmp_path, adds_bos=False)
    (tmp_path / "model.safetensors").unlink()
    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError):
        engine_for(tmp_path)


@pytest.mark.parametrize("asked", ["high", "medium"])
def test_float32_is_float32_whatever_the_process_asks_for(tiny: Path, asked: str) -> None:
    """On a CPU with AMX, ``medium`` multiplies in bfloat16; on a GPU, both do in TF32. Neither body nor head may."""
    windows = WindowList(tuple(own_tokens(random_ids(n, n)) for n in (128, 100, 90)))
    expected = all_scored(engine_for(tiny), windows)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(asked)
    try:
        engine = engine_for(tiny)
        found = all_scored(engine, windows)
        assert torch.get_float32_matmul_precision() == asked
    finally:
        torch.set_float32_matmul_precision(before)
    assert engine.facts.settings["float32_products"] == "ieee"
    assert all(np.array_equal(a.logprob, b.logprob) for a, b in zip(found, expected, strict=True))


def test_a_forward_that_a_user_patched_stays(tiny: Path) -> None:
    """Served logits replace the body's forward for a moment; afterwards the user's own must be restored."""
    model = engine_for(tiny).model
    usual, calls = model.model.forward, []

    def patched(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return usual(*arguments, **options)

    model.model.forward = patched
    engine = TransformersEngine(model, options=TransformersOptions(head="as-served"))
    all_scored(engine, WindowList((own_tokens(random_ids(17)),)))
    assert model.model.forward is patched
    seen = len(calls)
    all_scored(engine, WindowList((own_tokens(random_ids(17)),)))
    assert len(calls) > seen
