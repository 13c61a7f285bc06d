"""The decode path on a real vLLM: each token from its own step, judged by Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoremode.core.engine.base import Wanted
from scoremode.core.engine.baseline import stored_states
from scoremode.core.plan.path import DecodePath
from scoremode.core.plan.question import Question
from scoremode.core.references.reader import Reference
from scoremode.core.scores.answers import Window, WindowList
from scoremode.core.verbs.model import LazyModel
from scoremode.core.verbs.reference import reference
from scoremode.engines.vllm import VllmPlugin
from scoremode.engines.vllm.decode import VllmDecodeEngine
from scoremode.engines.vllm.support import LaunchArguments
from scoremode.engines.vllm.wire import Request
from scoremode.errors import InputError
from tests.engines.vllm.conftest import Judge, assert_same, own, score

SEQUENCES = 3
BLOCKS = 6  # of 128 tokens: three sequences of more than 256 tokens do not fit


def started(model: Path, **options: Any) -> VllmDecodeEngine:
    taken = LaunchArguments(max_model_len=512, dtype="float32", path=DecodePath(SEQUENCES), prefix_caching=True)
    blocks = (("num_gpu_blocks_override", BLOCKS), ("block_size", 128))
    return VllmDecodeEngine(str(model), replace(taken, max_num_batched_tokens=16, engine_args=blocks, **options))


@pytest.fixture(scope="module")
def engine(small_llama: Path) -> Iterator[VllmDecodeEngine]:
    with started(small_llama) as engine:
        yield engine


@pytest.fixture(autouse=True)
def unchanged(engine: VllmDecodeEngine) -> Iterator[None]:
    before = engine.path
    yield
    engine.path = before


def text(tokens: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(2, 1003, tokens)


def later(ids: Any, first: int) -> Window:
    """A window whose first tokens are context alone."""
    whole = own(ids)
    return replace(whole, rows=whole.rows[first:], targets=whole.targets[first:])


def test_every_token_has_the_score_of_transformers(engine: VllmDecodeEngine, llama_judge: Judge) -> None:
    windows = [own(text(n, seed=n)) for n in (40, 3, 100, 2, 64, 90, 17)]
    windows.append(replace(windows[0], targets=np.stack([windows[0].targets[:, 0], text(39, 9)], 1)))
    windows.append(replace(windows[2], rows=windows[2].rows[5::7], targets=windows[2].targets[5::7]))
    windows.append(replace(windows[2], rows=windows[2].rows[:0], targets=windows[2].targets[:0]))
    found = score(engine, windows)
    for window, answers in zip(windows, found, strict=True):
        llama_judge.check(window, answers)


def test_rows_before_the_end_of_the_prompt_are_prefilled(engine: VllmDecodeEngine, llama_judge: Judge) -> None:
    engine.path = DecodePath(SEQUENCES, 6)
    windows = [own(text(20)), own(text(4, 1)), later(text(30, 2), 4), later(text(30, 3), 9)]
    for window, answers in zip(windows, score(engine, windows), strict=True):
        llama_judge.check(window, answers)


def test_fewer_sequences_need_no_other_start(
    engine: VllmDecodeEngine, llama_judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "facts", engine.facts)
    step, beside = engine._step, list[int]()

    def counted() -> Any:
        beside.append(len(engine._forced))
        return step()

    monkeypatch.setattr(engine, "_step", counted)
    windows = [own(text(n, seed=n)) for n in (9, 17, 5, 12, 7, 11)]
    assert not VllmPlugin().feeds_also(DecodePath(1), DecodePath(2))
    for sequences in (2, 1):
        assert VllmPlugin().feeds_also(DecodePath(SEQUENCES), DecodePath(sequences))
        engine.feed_by(DecodePath(sequences))
        for window, answers in zip(windows, score(engine, windows), strict=True):
            llama_judge.check(window, answers)
        assert max(beside) == sequences
        beside.clear()
        assert (engine.facts.settings["sequences"], engine.facts.settings["max_num_seqs"]) == (sequences, SEQUENCES)


def test_chunks_of_a_prompt_and_cached_prefixes_change_nothing(engine: VllmDecodeEngine, llama_judge: Judge) -> None:
    engine.path = DecodePath(SEQUENCES, 200)
    shared = text(200)  # a prompt of 13 chunks, of which 128 tokens can be cached
    windows = [later(np.concatenate([shared, text(20, seed)]), 199) for seed in range(1, 5)]
    before = engine.cached_tokens
    for window, answers in zip(windows, score(engine, windows, groups=np.zeros(4, np.int64)), strict=True):
        llama_judge.check(window, answers)
    assert engine.cached_tokens > before


def test_preempted_sequences_keep_their_scores_and_a_note_says_so(engine: VllmDecodeEngine, llama_judge: Judge) -> None:
    engine.account()
    windows = [own(text(n, seed=n)) for n in (300, 310, 290, 305)]
    for window, answers in zip(windows, score(engine, windows), strict=True):
        llama_judge.check(window, answers)
    (note,) = engine.account()["notes"]
    assert "preempted" in note
    assert engine.account() == {}


def test_ordinary_requests_in_the_same_batch_are_answered_as_if_alone(
    engine: VllmDecodeEngine, llama_judge: Judge
) -> None:
    alone = generated(engine, beside=0)
    crowded = generated(engine, beside=2)
    assert [token for token, _ in crowded] == [token for token, _ in alone]
    assert np.abs(np.array([p for _, p in crowded]) - np.array([p for _, p in alone])).max() < llama_judge.nats


def generated(engine: VllmDecodeEngine, beside: int) -> list[tuple[int, float]]:
    """What the model writes after a prompt, with its log-probabilities, while other texts are replayed."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=0, detokenize=False)
    core = engine.llm.llm_engine
    windows = [own(text(60, seed)) for seed in range(beside)]
    names = [engine._submit(w.ids, Request(w.rows, w.targets)) for w in windows]
    core.add_request("user", {"type": "token", "prompt_token_ids": text(20, 5).tolist()}, asked)
    done: dict[str, Any] = {}
    while len(done) < 1 + beside:
        done |= {output.request_id: output.outputs[0] for output in core.step() if output.finished}
    for name in names:
        assert list(done[name].token_ids[:-1]) == engine._forced.pop(name).tolist()
    engine._call_workers("scoremode_take", names)
    written = done["user"]
    return [(token, places[token].logprob) for token, places in zip(written.token_ids, written.logprobs, strict=True)]


def test_a_stopped_question_leaves_nothing_in_the_workers(engine: VllmDecodeEngine, llama_judge: Judge) -> None:
    windows = [own(text(30 + 9 * n, seed=n)) for n in range(5)]
    asked = engine.score(WindowList(tuple(windows)), np.zeros(5, np.bool_))
    next(asked)
    asked.close()  # type: ignore[attr-defined]
    assert not engine._forced
    (again,) = score(engine, windows[3:4])
    llama_judge.check(windows[3], again)


def test_divergence_and_states_are_those_of_the_step(
    engine: VllmDecodeEngine, small_llama: Path, tmp_path: Path, llama_judge: Judge
) -> None:
    """A model is compared with its own reference, which Transformers keeps by prefill: no divergence but rounding."""
    asked: dict[str, Any] = {"text": "Nobody minds the lazy dog at all. " * 9, "context_length": 65, "stride": 24}
    reference(str(small_llama), tmp_path / "reference", dtype="float32", **asked)
    plan = LazyModel.named(str(small_llama), "transformers", {}, None).ask(Question(**asked)).plan
    stored = stored_states(Reference.open(tmp_path / "reference"), plan.target_offsets)
    done = np.zeros(len(plan), np.bool_)
    found = dict(engine.score(plan, done, Wanted(against=stored)))
    kl = np.concatenate([answers.kl for _, answers in sorted(found.items()) if answers.kl is not None])
    assert len(kl) > 100
    assert np.abs(kl).max() < 1e-6
    for index, answers in engine.score(plan, done, Wanted(states=True)):
        assert answers.states is not None
        theirs = stored.states(index, plan.window(index))
        assert np.abs(answers.states - theirs).max() < 1e-3 * np.abs(theirs).max()
        assert np.abs(answers.logprob - found[index].logprob).max() < llama_judge.nats
    ours, kept = engine.stored_head(), stored.head
    assert np.array_equal(ours.weight[: ours.vocabulary], kept.weight[: kept.vocabulary])


def test_a_window_without_room_for_its_last_step_is_refused(engine: VllmDecodeEngine) -> None:
    window = Window(np.ones(512, np.int32), np.array([511], np.int32), np.ones((1, 1), np.int32))
    with pytest.raises(InputError, match="give --context-length 511"):
        score(engine, [window])


def test_as_served_is_what_the_sampler_sees(
    engine: VllmDecodeEngine, small_llama: Path, llama_judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own log-probabilities of the tokens that it sampled, from the same step."""
    import vllm

    windows = [own(text(n, seed=n)) for n in (40, 25, 60, 33)]
    with started(small_llama, head="as-served") as served:
        assert served.facts.head == "as-served"
        core, seen = served.llm.llm_engine, {}
        step = core.step

        def watched() -> Any:
            outputs = step()
            seen.update({output.request_id: output.outputs[0].logprobs for output in outputs if output.finished})
            return outputs

        monkeypatch.setattr(core, "step", watched)
        monkeypatch.setattr(vllm, "SamplingParams", partial(vllm.SamplingParams, logprobs=0))
        found = score(served, windows)
    for (_, places), window, answers in zip(sorted(seen.items()), windows, found, strict=True):
        theirs = [place[token].logprob for place, token in zip(places[:-1], window.ids[1:-1].tolist(), strict=True)]
        assert np.abs(answers.logprob[:-1, 0] - np.array(theirs)).max() < 4e-6  # vLLM's softmax is in float32
    assert_same(found, score(engine, windows), llama_judge.nats)
