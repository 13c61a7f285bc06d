"""A real model, real text: against Transformers, against vLLM's own prompt_logprobs, with requests of every shape."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoremode.core.scores.answers import Answers, Window, WindowList, measured
from scoremode.engines.vllm.engine import VllmEngine
from scoremode.errors import InputError
from scoremode.values import Ids
from tests.engines.vllm.conftest import Judge, assert_same, engine_of, ordinary, own, score

NATS = 2e-4  # float32 on both sides; a shift by one token is off by whole nats


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[VllmEngine]:
    with engine_of(smollm2, prefix_caching=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def windows(real_ids: Ids) -> list[Window]:
    return [own(real_ids[a : a + n]) for a, n in ((0, 256), (300, 100), (700, 2), (800, 33), (1000, 512))]


@pytest.fixture(scope="module")
def scored(engine: VllmEngine, windows: list[Window]) -> list[Answers]:
    return score(engine, windows)


def test_every_target_against_transformers(scored: list[Answers], windows: list[Window], smollm2_judge: Judge) -> None:
    for window, answers in zip(windows, scored, strict=True):
        smollm2_judge.check(window, answers, NATS)


def test_windows_that_cannot_be_scored_are_refused_before_they_kill_a_worker(engine: VllmEngine, real_ids: Ids) -> None:
    facts = engine.facts
    assert (facts.head, facts.vocabulary, facts.dtype) == ("exact-fp32", 49152, "float32")
    assert facts.context_length == 8192, "the model's own, not what vLLM was started for"
    with pytest.raises(InputError) as refused:
        score(engine, [own(real_ids[:513])])
    assert str(refused.value) == (
        "window 0 has 513 tokens, vLLM was started for 512; "
        "give --context-length 512, or a --max-model-len of up to 8192"
    )
    with pytest.raises(InputError, match="49152"):
        score(engine, [own(np.array([1, 49152], np.int32))])
    assert score(engine, [own(real_ids[:5])])[0].logprob.shape == (4, 1)


def test_chosen_ids_at_chosen_rows_and_the_last_row(engine: VllmEngine, real_ids: Ids, smollm2_judge: Judge) -> None:
    rng = np.random.default_rng(3)
    windows = []
    for length, rows, k in ((50, [0, 7, 49], 4), (50, [49], 1), (20, list(range(20)), 9), (1, [0], 2)):
        targets = rng.integers(0, 49152, (len(rows), k)).astype(np.int32)
        windows.append(Window(real_ids[:length], np.array(rows, np.int32), targets))
    for window, answers in zip(windows, score(engine, windows), strict=True):
        assert answers.logprob.shape == window.targets.shape
        smollm2_judge.check(window, answers, NATS)


def test_padding_behind_the_tokenizers_vocabulary_is_left_out_when_the_plan_says_so(
    engine: VllmEngine, real_ids: Ids, smollm2_judge: Judge
) -> None:
    window = own(real_ids[:30] % 4000)
    (answers,) = score(engine, [window], vocabulary=4001)
    smollm2_judge.check(window, answers, NATS, vocabulary=4001)


def test_windows_that_ask_nothing_done_ones_and_leaving_early(
    engine: VllmEngine, windows: list[Window], real_ids: Ids
) -> None:
    nothing = Window(real_ids[:10], np.zeros(0, np.int32), np.zeros((0, 1), np.int32))
    assert len(score(engine, [nothing])[0].logprob) == 0
    shorter = WindowList(tuple(windows[:4]))
    assert sorted(i for i, _ in engine.score(shorter, np.array([True, False, True, False]))) == [1, 3]
    stream = engine.score(shorter, np.zeros(4, bool))
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]
    assert score(engine, windows[:1])[0].logprob.shape == (255, 1)
    assert not engine.llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("context", [60, 128, 129])  # a block of the cache has 128 tokens on a CPU
def test_a_shared_beginning_is_read_from_the_cache(engine: VllmEngine, real_ids: Ids, context: int) -> None:
    """Continuations of one context: the same numbers as without the cache, and fewer tokens computed."""
    rng = np.random.default_rng(context)
    start = real_ids[context : 2 * context]
    windows = []
    for _ in range(3):
        ids = np.concatenate([start, rng.integers(0, 49152, 7)]).astype(np.int32)
        rows = np.arange(context - 1, len(ids) - 1, dtype=np.int32)
        windows.append(Window(ids, rows, ids[rows + 1][:, None]))
    before = engine.cached_tokens
    together = score(engine, windows, groups=np.zeros(3, np.int64))
    saved = engine.cached_tokens - before
    assert_same(together, score(engine, windows), 5e-5)
    block = engine._block
    assert saved >= 2 * (context // block) * block


def test_a_request_without_a_question_has_its_own_tokens_scored(engine: VllmEngine, real_ids: Ids) -> None:
    """The request that an HTTP client of ``/pooling`` sends."""
    from vllm import PoolingParams

    from scoremode.engines.vllm.wire import read_lines

    ids = real_ids[:40].tolist()
    (out,) = engine.llm.encode(
        [{"prompt_token_ids": ids}], PoolingParams(), pooling_task="token_classify", use_tqdm=False
    )
    answers = read_lines(np.asarray(out.outputs.data), 1)
    assert_same([answers], score(engine, [own(real_ids[:40])]), 5e-5)


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Iterator[Any]:
    with ordinary(smollm2, dtype="float32", max_model_len=513) as llm:
        yield llm


def test_prompt_logprobs_of_serving(oracle: Any, scored: list[Answers], windows: list[Window]) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outs = oracle.generate([{"prompt_token_ids": w.ids.tolist()} for w in windows], params, use_tqdm=False)
    for window, answers, out in zip(windows, scored, outs, strict=True):
        at = [out.prompt_logprobs[i + 1][int(t)] for i, t in enumerate(window.targets[:, 0])]
        assert np.abs(answers.logprob[:, 0] - [e.logprob for e in at]).max() <= NATS
        # vLLM counts ties against the target, we order them by id: only equal logits differ
        assert np.mean(measured(answers.rank)[:, 0] == [e.rank for e in at]) > 0.98


def test_the_plugin_leaves_generation_alone(oracle: Any, real_ids: Ids, smollm2_judge: Judge) -> None:
    import torch
    from vllm import SamplingParams

    prompt, params = {"prompt_token_ids": real_ids[:50].tolist()}, SamplingParams(max_tokens=8, temperature=0.0)
    (out,) = oracle.generate([prompt], params, use_tqdm=False)
    ids = torch.from_numpy(real_ids[:50].astype(np.int64))[None]
    judge = smollm2_judge.model
    greedy = judge.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0, 50:]
    assert out.outputs[0].token_ids == greedy.tolist()


def test_the_plugin_leaves_embedding_alone(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that scores: the switch is off again, and the stock adapter is used."""
    from vllm.model_executor.models import adapters

    class AnyModel: ...

    monkeypatch.setattr(adapters.as_embedding_model, "stock", lambda model_class: ("stock", model_class))
    assert adapters.as_embedding_model(AnyModel) == ("stock", AnyModel)
