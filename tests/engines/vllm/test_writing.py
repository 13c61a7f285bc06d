"""Texts that stock vLLM writes: both log-probabilities of every token, against the decode path and longhand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_for
from scoremode.errors import OptionError
from scoremode.studies.rollouts.engines.writers import filtered
from scoremode.studies.rollouts.texts import Rollouts
from scoremode.studies.rollouts.writing import DrawingRules, WritingRequest
from scoremode.values import Ids
from tests import rounding

PROMPTS = ["a b c d", "The quick brown fox", "b", "in 1999 there were cats", "a model is", "x y"]


@pytest.fixture(scope="module")
def own(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Rollouts]:
    def write(name: str, **how: Any) -> Rollouts:
        out = tmp_path_factory.getbasetemp() / f"written-{name}"
        given = {"samples": 2, "max_tokens": 9, "engine": "vllm", "dtype": "float32", "out": out, **how}
        return sm.rollouts(str(small_llama), PROMPTS, **given)

    return write


def longhand(model: Path, prompts: list[Ids], texts: list[Ids], rules: DrawingRules) -> tuple[list[Any], list[Any]]:
    """Both log-probabilities of every written token, from Transformers' logits and our definition of the filters."""
    from transformers import AutoModelForCausalLM

    judge: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    raw, drawn = [], []
    for prompt, ids in zip(prompts, texts, strict=True):
        whole = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))
        with torch.no_grad():
            x = judge(whole[None]).logits[0, len(prompt) - 1 : -1].double()
        at = torch.from_numpy(ids.astype(np.int64))[:, None]
        raw.append(x.log_softmax(1).gather(1, at)[:, 0].numpy())
        kept = filtered(x / (rules.temperature or 1), rules)
        drawn.append(kept.log_softmax(1).gather(1, at)[:, 0].numpy())
    return raw, drawn


def far(found: list[Any], wanted: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))


def test_greedy_texts_are_those_of_transformers_and_the_decode_path_gives_their_log_probabilities(
    own: Callable[..., Rollouts], small_llama: Path
) -> None:
    written = own("greedy", samples=1, max_num_batched_tokens=8, sequences=4)  # some prompts are fed in chunks
    assert max(map(len, written.prompt_ids)) > 8
    other = sm.rollouts(str(small_llama), PROMPTS, max_tokens=9, dtype="float32")
    assert [ids.tolist() for ids in written.written] == [ids.tolist() for ids in other.written]
    assert written.finish == other.finish
    assert far(written.raw_logprob, other.raw_logprob) < rounding.of_checkpoint(small_llama)
    assert all((one == 0).all() for one in written.logprob)
    run = sm.ppl(str(small_llama), corpus=written, engine="vllm", dtype="float32", path="decode")
    assert np.abs(run.scores.logprob - np.concatenate(written.raw_logprob)).max() < rounding.of_checkpoint(small_llama)
    assert run.manifest["stderr_groups"] == "prompts"


def test_draws_from_filtered_distributions_have_both_log_probabilities_and_repeat(small_llama: Path) -> None:
    rules = DrawingRules(temperature=0.8, top_p=0.9, top_k=50, min_p=0.001)
    chosen = choose(str(small_llama), "vllm", {"dtype": "float32"})
    prompts = [chosen.subject.tokenizer.encode(text, special=True).ids for text in PROMPTS for _ in range(2)]
    asked = [WritingRequest(ids, 7 + i, 9) for i, ids in enumerate(prompts)]
    done = np.zeros(len(asked), np.bool_)
    with closing(open_for(chosen, "writes", Work(64), rules)) as writer:
        found, again = (dict(writer.write(asked, done, lambda _: None)) for _ in range(2))
        done[3:] = True
        (first, *_rest) = [written for _, written in sorted(dict(writer.write(asked, done, lambda _: None)).items())]
    texts = [found[i] for i in range(len(asked))]
    raw, drawn = longhand(small_llama, prompts, [one.ids for one in texts], rules)
    assert far([one.raw_logprob for one in texts], raw) < rounding.of_checkpoint(small_llama)
    assert far([one.logprob for one in texts], drawn) < rounding.of_checkpoint(small_llama)
    assert far(raw, drawn) > 0.01
    assert all(texts[i].ids.tolist() == again[i].ids.tolist() for i in again)
    assert texts[0].ids.tolist() == first.ids.tolist(), "a text does not depend on the texts beside it"
    assert len({one.ids.tobytes() for one in texts}) > len(PROMPTS), "texts of one prompt differ"


def test_draws_of_two_pipeline_stages_from_the_models_own_distribution_have_one_log_probability(
    own: Callable[..., Rollouts], small_llama: Path
) -> None:
    """The stage that does not sample is passed over."""
    written = own("stages", samples=1, max_tokens=3, temperature=1, pipeline_parallel_size=2)
    assert sum(map(len, written.written)) > len(PROMPTS)
    assert all((a == b).all() for a, b in zip(written.logprob, written.raw_logprob, strict=True))
    raw, _ = longhand(small_llama, written.prompt_ids, written.written, DrawingRules(1.0))
    assert far(written.raw_logprob, raw) < rounding.of_checkpoint(small_llama)


class StockSampler:
    """Stands for the V2 runner's sampler, which runs on GPUs only: an object that is called with logits and a batch."""

    states, use_flashinfer = "kept", True

    def __init__(self, chosen: torch.Tensor) -> None:
        self.chosen = chosen

    def __call__(self, logits: torch.Tensor, batch: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        chosen, _ = self.sample(logits)
        return SamplerOutput(chosen[:, None], None)

    def sample(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Temperature 0.5 and only ids below 20, in place."""
        assert not self.use_flashinfer, "it would not show its filters"
        logits /= 0.5
        logits[:, 20:] = -torch.inf
        return self.chosen, logits


def test_the_second_runner_knows_its_tokens_by_the_length_of_the_sequence() -> None:
    """A preempted text is prefilled again, in chunks: their rows sample tokens that vLLM discards."""
    from scoremode.studies.rollouts.engines.vllm_written_tokens import KeptSteps, WrappedSampler

    logits, chosen = torch.randn(2, 311), torch.tensor([5, 7])
    kept = KeptSteps(draws_own=False, first_wins=True)
    sampler = WrappedSampler(StockSampler(chosen), kept)
    assert sampler.states == "kept"
    for lengths in ([3, 2], [4, 9], [3, 10], [5, 11]):  # of "scoremode-0", the third is a chunk of what it had before
        batch = SimpleNamespace(
            req_ids=["scoremode-0-1a", "scoremode-1-2b"], num_reqs=2, seq_lens_cpu_upper_bound=torch.tensor(lengths)
        )
        sampler(logits + sum(lengths), batch)
        sampler._stock.chosen = sampler._stock.chosen + 1
    first, second = (np.frombuffer(b, np.float32).reshape(-1, 3) for b in kept.take([0, 1], [3, 9], [3, 3]))
    assert np.ascontiguousarray(first[:, 2]).view(np.int32).tolist() == [5, 6, 8]
    assert np.ascontiguousarray(second[:, 2]).view(np.int32).tolist() == [8, 9, 10]
    wanted = logits.double().log_softmax(1)[0, [5, 6, 8]].numpy()
    assert np.abs(first[:, 1] - wanted).max() < 1e-5
    wanted = (logits[:, :20].double() / 0.5).log_softmax(1)[0, [5, 6, 8]].numpy()
    assert np.abs(first[:, 0] - wanted).max() < 1e-5
    assert kept.take([0, 1], [3, 9], [3, 3]) == [b"", b""], "they are fetched once"


@pytest.mark.parametrize("first_wins", [False, True])
def test_rows_of_many_texts_are_found_again(first_wins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts begin and end at any step, some tokens have two rows, lines fill their memory, two portions are fetched."""
    from scoremode.studies.rollouts.engines import vllm_written_tokens as written_tokens

    monkeypatch.setattr(written_tokens, "ROOM", 50)
    kept, random = written_tokens.KeptSteps(draws_own=True, first_wins=first_wins), np.random.default_rng(1)
    begins, lengths, prompt = random.integers(0, 9, 30), random.integers(1, 12, 30), 5 if first_wins else 0
    wanted: dict[int, dict[int, int]] = {text: {} for text in range(30)}
    for step in range(22):
        rows = [(text, step - begins[text]) for text in range(30) if 0 <= step - begins[text] < lengths[text]]
        rows += [(text, place - first_wins) for text, place in rows[:2] if place]  # the same token again
        ids = random.integers(0, 40, len(rows))
        for (text, place), token in zip(rows, ids.tolist(), strict=True):
            if not (first_wins and place in wanted[text]):
                wanted[text][place] = token
        places = [f"scoremode-{text}-ab" for text, _ in rows], [prompt + int(place) for _, place in rows]
        kept.keep(places, torch.zeros(len(rows), 40), torch.from_numpy(ids)[:, None])
        if step == 14:
            some = [text for text in range(30) if begins[text] + lengths[text] <= step]
            found = dict(zip(some, kept.take(some, [prompt] * len(some), lengths[some].tolist()), strict=True))
    rest = [text for text in range(29, -1, -1) if text not in found]
    found |= zip(rest, kept.take(rest, [prompt] * len(rest), lengths[rest].tolist()), strict=True)
    for text, lines in found.items():
        written = np.frombuffer(lines, np.int32).reshape(-1, 3)[:, 2]
        assert written.tolist() == [wanted[text][place] for place in range(lengths[text])], text


def test_what_would_change_the_draws_is_refused(small_llama: Path) -> None:
    chosen = choose(str(small_llama), "vllm", {"engine_args": {"speculative_config": {"method": "ngram"}}})
    with pytest.raises(OptionError, match="guessed ahead"):
        open_for(chosen, "writes", Work(32), DrawingRules())
