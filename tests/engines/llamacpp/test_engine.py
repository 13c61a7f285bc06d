"""The llama.cpp engine against the float64 reading of the same weights in Transformers."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scoremode.core.engine.base import StoredDistributions
from scoremode.core.engine.baseline import held_states
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.core.scores.answers import Answers, Window, WindowList, measured, own_tokens
from scoremode.engines.llamacpp.engine import LlamaCppEngine
from scoremode.errors import EngineError, ModelError
from scoremode.head.columns import define_columns
from scoremode.head.divergence import define_divergence
from scoremode.head.sixteen_bits import encode_records, kl_from_records
from scoremode.values import Ids, Raw
from tests.engines.judging import assert_defined, random_ids, scored
from tests.gguf_files import gguf_of
from tests.makers import VOCABULARY

FLOAT32 = {"cache_type_k": "f32", "cache_type_v": "f32"}


def engine_for(file: Path, longest: int = 128, **options: Any) -> LlamaCppEngine:
    engine = open_engine(choose(str(file), None, {"threads": 1, **FLOAT32, **options}), Work(longest=longest))
    assert isinstance(engine, LlamaCppEngine)
    return engine


@pytest.fixture(scope="module")
def judge(tiny: Path) -> Any:
    """The weights of ``tiny``, computed in float64."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64, attn_implementation="eager")


@pytest.fixture(scope="module")
def engine(tiny_gguf: Path) -> LlamaCppEngine:
    return engine_for(tiny_gguf)


@torch.inference_mode()
def true_logits(judge: Any, window: Window, vocabulary: int = VOCABULARY) -> torch.Tensor:
    logits: torch.Tensor = judge(torch.from_numpy(window.ids.astype(np.int64))[None]).logits[0]
    return logits[window.rows.tolist(), :vocabulary]


def assert_true(answers: Answers, judge: Any, window: Window, vocabulary: int = VOCABULARY) -> None:
    assert_defined(answers, true_logits(judge, window, vocabulary), window, 1e-4)


def assert_same_bits(one: Answers, other: Answers) -> None:
    for name in ("logprob", "rank", "entropy", "top", "top_logprob"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


# ── the numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("n_batch", [1, 4, 7, 50, 127])
def test_several_decodes_of_one_window_equal_one(
    tiny_gguf: Path, engine: LlamaCppEngine, judge: Any, n_batch: int
) -> None:
    window = own_tokens(random_ids(128))
    some = Window(window.ids, np.array([0, 3, 49, 50, 120], np.int32), window.targets[[0, 3, 49, 50, 120]])
    parts = engine_for(tiny_gguf, n_batch=n_batch)
    for asked in (window, some):
        assert_true(scored(parts, WindowList((asked,)))[0], judge, asked)
    assert parts.facts.settings["n_batch"] == n_batch
    assert parts.facts.settings["n_ubatch"] <= n_batch


@pytest.mark.parametrize("stored", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
def test_tokens_before_the_first_row_are_decoded_apart_and_no_bit_moves(
    wider: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str
) -> None:
    engine, fed = engine_for(gguf_of(wider, tmp_path / "small.gguf", stored), 1024, cache_type_k="f16"), []
    decode = engine._decode

    def counting(ids: Ids, at: int, rows: Ids) -> torch.Tensor:
        fed.append(len(ids))
        return decode(ids, at, rows)

    monkeypatch.setattr(engine, "_decode", counting)
    for length, row, parts in [
        (512, 256, [256, 256]),
        (512, 301, [256, 256]),
        (600, 511, [600]),  # from 256 on, 512 tokens would be other rows together than from 512 on
        (1024, 517, [256, 256, 512]),
        (1024, 1023, [256, 256, 512]),
        (512, 255, [512]),
        (511, 256, [511]),
        (510, 509, [510]),
    ]:
        ids = random_ids(length)
        windows = WindowList((Window(ids, np.arange(row, length, dtype=np.int32), ids[row:, None]),))
        fed.clear()
        cut = scored(engine, windows)[0]
        assert fed == parts
        with monkeypatch.context() as whole:
            whole.setattr(engine, "_cuts", False)
            assert_same_bits(cut, scored(engine, windows)[0])


@pytest.mark.parametrize("stored", ["F16", "Q8_0", "Q4_0"])
def test_quantized_types_equal_the_float64_reading_of_what_they_stand_for(
    wider: Path, tmp_path: Path, stored: str
) -> None:
    """The judge has the dequantized weights; llama.cpp also rounds activations, to 8 bits for types of blocks."""
    import gguf
    from transformers import AutoModelForCausalLM

    judge = AutoModelForCausalLM.from_pretrained(wider, dtype=torch.float64, attn_implementation="eager")
    kind = gguf.GGMLQuantizationType[stored]
    with torch.no_grad():
        for parameter in judge.parameters():
            if parameter.ndim == 2:
                packed = gguf.quants.quantize(parameter.float().numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind)))
    engine = engine_for(gguf_of(wider, tmp_path / "small.gguf", stored))
    window = own_tokens(random_ids(60))
    truth = define_columns(true_logits(judge, window), torch.from_numpy(window.targets.astype(np.int64)))
    found = scored(engine, WindowList((window,)))[0]
    gap = np.abs(found.logprob - truth.logprob.numpy())
    assert gap.mean() < (0.02 if stored == "F16" else 1.0)
    assert engine.facts.settings["types"][stored] > engine.facts.settings["types"]["F32"]
    before = AutoModelForCausalLM.from_pretrained(wider, dtype=torch.float64, attn_implementation="eager")
    unrounded = define_columns(true_logits(before, window), torch.from_numpy(window.targets.astype(np.int64)))
    if stored == "Q4_0":
        assert gap.mean() < np.abs(found.logprob - unrounded.logprob.numpy()).mean() / 3


# ── windows that share a prompt, and resumed runs ────────────────────────────────────────────────────────────────────
def prompted(lengths: tuple[int, ...] = (1, 1, 3, 6, 2), prompt: int = 60) -> WindowList:
    windows = []
    for length in lengths:
        ids = np.concatenate([random_ids(prompt), random_ids(length, 100 + length)])
        rows = np.arange(prompt - 1, len(ids) - 1, dtype=np.int32)
        windows.append(Window(ids[:-1], rows, ids[prompt:, None]))
    return WindowList(tuple(windows), np.zeros(len(windows), np.int64))


def test_a_shared_prompt_is_fed_once_and_gives_the_scores_of_windows_that_are_fed_alone(
    engine: LlamaCppEngine, judge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, fed = prompted(), []
    decode = engine._decode

    def counting(ids: Ids, at: int, rows: Ids) -> torch.Tensor:
        fed.append(len(ids))
        return decode(ids, at, rows)

    alone = scored(engine, WindowList(source.items))
    monkeypatch.setattr(engine, "_decode", counting)
    together = scored(engine, source)
    assert sum(fed) < 80, "the prompt of 60 tokens was fed more than once"
    for index, answers in together.items():
        if platform.machine() in ("x86_64", "AMD64"):
            assert_same_bits(answers, alone[index])
        else:  # ggml's kernels for ARM depend on the length of the batch: docs/gguf.md
            for name in ("logprob", "entropy", "top_logprob"):
                assert np.abs(getattr(answers, name) - getattr(alone[index], name)).max() < 1e-5, name
        assert_true(answers, judge, source.window(index))


# ── divergences and records ──────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("vocabulary", [None, 200])
def test_the_divergence_from_hidden_states_equals_its_float64_definition(
    tiny: Path, wider: Path, tmp_path: Path, vocabulary: int | None
) -> None:
    from transformers import AutoModelForCausalLM

    other = gguf_of(tiny, tmp_path / "other.gguf", weights=lambda name, x: x * 1.1 if name == "output.weight" else x)
    source: Any = WindowList(tuple(own_tokens(random_ids(n, n) % 200) for n in (2, 40)), vocabulary=vocabulary)
    baseline = open_engine(choose(str(tiny), None, {"dtype": "float32"}), Work(longest=40))
    held = held_states(baseline, source, np.zeros(len(source), np.bool_))
    found = scored(engine_for(other), source, against=held)
    judge = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64)
    for index, answers in found.items():
        window = source.window(index)
        p = true_logits(judge, window, vocabulary or VOCABULARY)
        assert np.abs(measured(answers.kl) - kl_of(p, p * 1.1)).max() < 1e-5
        assert measured(answers.kl).min() > 1e-4
        true = define_divergence(p, p * 1.1, torch.zeros(len(p), 1, dtype=torch.int64))
        assert np.abs(measured(answers.kl_reverse) - measured(true.kl_reverse).numpy()).max() < 1e-5
        assert np.abs(measured(answers.total_variation) - measured(true.total_variation).numpy()).max() < 1e-5
        assert measured(answers.same_first).tolist() == [5] * len(p)  # a factor keeps the order


def kl_of(p: torch.Tensor, q: torch.Tensor) -> Any:
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).numpy()


class Kept(StoredDistributions):
    """Records in memory."""

    vocabulary = VOCABULARY

    def __init__(self, records: dict[int, Raw]) -> None:
        self.kept = records

    def records(self, index: int, window: Window) -> Raw:
        return self.kept[index]


def test_records_are_those_of_the_logits_and_diverge_from_themselves_by_their_rounding(
    engine: LlamaCppEngine, judge: Any
) -> None:
    source = WindowList((own_tokens(random_ids(40)), own_tokens(random_ids(2))))
    plain, found = scored(engine, source), scored(engine, source, records=True)
    for index, answers in found.items():
        window = source.window(index)
        logits = engine._decode(window.ids, 0, window.rows).clone()
        expected = encode_records(logits.clone()).numpy().view(np.uint16)
        assert np.array_equal(measured(answers.records), expected)
        assert_same_bits(answers, plain[index])
    kept = Kept({index: measured(answers.records) for index, answers in found.items()})
    for index, answers in scored(engine, source, against=kept).items():
        window = source.window(index)
        logits = engine._decode(window.ids, 0, window.rows).clone()
        records = torch.from_numpy(kept.kept[index].view(np.int16).copy())
        assert np.array_equal(measured(answers.kl), kl_from_records(records, logits).numpy())
        assert_same_bits(answers, plain[index])


# ── what it refuses ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_windows_that_cannot_be_scored_are_errors_and_the_engine_lives_on(tiny_gguf: Path, judge: Any) -> None:
    engine, window = engine_for(tiny_gguf, longest=20), own_tokens(random_ids(20))
    for ids, words in (
        (random_ids(600), "too small"),
        (np.array([5, VOCABULARY, 7], np.int32), "could not decode 3 tokens"),
        (np.array([5, -1, 7], np.int32), "could not decode 3 tokens"),
    ):
        with pytest.raises(EngineError, match=words):
            scored(engine, WindowList((own_tokens(ids),)))
    assert_true(scored(engine, WindowList((window,)))[0], judge, window)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        scored(engine, WindowList((window,)))


def test_weights_that_give_nan_and_equal_logits_are_named_so(tiny: Path, tmp_path: Path) -> None:
    huge = gguf_of(tiny, tmp_path / "huge.gguf", weights=lambda n, x: x * np.float32(1e38) if "ffn" in n else x)
    with pytest.raises(EngineError, match="gives NaN"):
        engine_for(huge)
    damaged = gguf_of(tiny, tmp_path / "nan.gguf", weights=lambda n, x: x * np.nan if "attn_q" in n else x)
    with pytest.raises(ModelError, match="invalid data"):
        engine_for(damaged)
    flat = gguf_of(tiny, tmp_path / "flat.gguf", weights=lambda n, x: x * 0 if n == "output.weight" else x)
    assert "all logits are equal" in engine_for(flat).facts.notes[0]


def test_a_prompt_longer_than_a_batch_is_shared_too(tiny_gguf: Path, judge: Any) -> None:
    source = prompted()
    for index, answers in scored(engine_for(tiny_gguf, n_batch=16), source).items():
        assert_true(answers, judge, source.window(index))
