"""P(target | prompt): the boundary, the sums, and what is asked only once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.core.engine import registry
from scoremode.core.engine.base import SCORES, Engine, Wanted
from scoremode.core.scores.answers import Answers, WindowSource, measured
from scoremode.core.verbs.prob import sequence
from scoremode.core.verbs.prob.sequence import SequenceProbability
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import BoundaryError, InputError, ModelError
from scoremode.values import Bools
from tests import rounding
from tests.house import needs_wing
from tests.makers import VOCABULARY


@pytest.fixture(scope="module")
def lm(tiny: Path) -> SequenceProbability:
    return SequenceProbability(str(tiny))


@pytest.fixture(scope="module")
def smol() -> SequenceProbability:
    return SequenceProbability("smollm2-135m")


def logprobs(lm: SequenceProbability, ids: list[int]) -> torch.Tensor:
    """log P(next token) after each of the ids, in float64, straight from the model."""
    engine: Any = lm.engine
    with torch.inference_mode():
        logits: torch.Tensor = engine.model(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits.double(), -1)


def test_a_target_is_the_sum_over_its_tokens_in_the_joint_encoding(lm: SequenceProbability, tiny: Path) -> None:
    prompt, target = "The quick brown fox", " jumps over the dog"
    (score,) = lm.get_log_prob(prompt, target)
    ids = lm.subject.tokenizer.encode(prompt + target, special=True).ids.tolist()
    n = len(score.tokens)
    rows = logprobs(lm, ids)[len(ids) - n - 1 : -1]
    expected = [float(rows[i, t]) for i, t in enumerate(ids[-n:])]
    assert [t.logprob for t in score.tokens] == pytest.approx(expected, abs=rounding.of_checkpoint(tiny))
    assert score.log_prob == pytest.approx(sum(expected), abs=n * rounding.of_checkpoint(tiny))
    assert score.prob == math.exp(score.log_prob)
    assert score.perplexity == pytest.approx(math.exp(-score.log_prob / n))
    assert "".join(t.text for t in score.tokens) == target
    assert score.boundary == "clean"
    assert [t.rank for t in score.tokens] == [
        int((row > row[t]).sum()) + 1 for row, t in zip(rows, ids[-n:], strict=True)
    ]


def test_paris_is_not_space_paris(smol: SequenceProbability) -> None:
    spaced, bare = smol.get_log_prob("The capital of France is", [" Paris", "Paris"])
    assert spaced.tokens[0].id != bare.tokens[0].id
    assert spaced.log_prob > bare.log_prob + 5
    assert spaced.prob > 0.5
    assert spaced.log_prob == pytest.approx(-0.258, abs=0.01)
    (added,) = SequenceProbability("smollm2-135m", leading_space="add").get_log_prob(
        "The capital of France is", "Paris"
    )
    assert (added.target, added.leading_space) == (" Paris", "add")
    assert added.log_prob == pytest.approx(spaced.log_prob, abs=1e-4)


def test_a_token_that_spans_the_boundary_is_scored_on_condition_of_the_prompts_part(smol: SequenceProbability) -> None:
    """P(' Paris' | … is, next token begins with ' ') by summing over the whole vocabulary longhand."""
    (score,) = smol.get_log_prob("The capital of France is ", "Paris")
    assert (score.boundary, score.condition) == ("spanning", " ")
    tokenizer = smol.subject.tokenizer
    row = logprobs(smol, tokenizer.encode("The capital of France is", special=True).ids.tolist())[-1]
    begins = [i for i, piece in enumerate(tokenizer.pieces()) if piece.startswith(b" ")]
    paris = int(tokenizer.encode(" Paris", special=False).ids[0])
    expected = float(row[paris] - torch.logsumexp(row[begins], 0))
    assert score.log_prob == pytest.approx(expected, abs=1e-4)
    assert score.tokens[0].text == " Paris"


def test_probabilities_given_a_spanning_condition_sum_to_one(lm: SequenceProbability) -> None:
    """Over all single tokens that begin with the prompt's part, P(rest | prompt) is a distribution."""
    tokenizer = lm.subject.tokenizer
    pieces = tokenizer.pieces()
    whole = [p.decode() for p in pieces if p.startswith(b" ") and len(p) > 1]
    total = 0.0
    seen = 0
    for piece in whole:
        if (
            len(tokenizer.encode("fox" + piece, special=False).ids)
            != len(tokenizer.encode("fox", special=False).ids) + 1
        ):
            continue
        (score,) = lm.get_log_prob("fox ", piece[1:])
        assert score.boundary == "spanning"
        total += score.prob
        seen += 1
    row = logprobs(lm, tokenizer.encode("fox", special=True).ids.tolist())[-1]
    space = next(i for i, p in enumerate(pieces) if p == b" ")
    begins = [i for i, p in enumerate(pieces) if p.startswith(b" ")]
    alone = float((row[space] - torch.logsumexp(row[begins], 0)).exp())
    assert seen > 5
    assert total + alone == pytest.approx(1.0, abs=1e-3)


def test_characters_of_several_tokens_keep_all_their_tokens(smol: SequenceProbability) -> None:
    (score,) = smol.get_log_prob("日本の首都は東", "京です")
    ids = smol.subject.tokenizer.encode("日本の首都は東京です", special=True).ids.tolist()
    assert [t.id for t in score.tokens] == ids[-len(score.tokens) :]
    assert "".join(t.text for t in score.tokens) == "京です"


def test_many_targets_of_one_prompt_equal_each_asked_alone(lm: SequenceProbability, tiny: Path) -> None:
    prompt = "A model is a function from tokens"
    targets = [" to", " to distributions", " of cats", ".", " to distributions over tokens"]
    together = lm.get_log_prob(prompt, targets)
    for score, target in zip(together, targets, strict=True):
        (alone,) = lm.get_log_prob(prompt, target)
        assert score.log_prob == pytest.approx(alone.log_prob, abs=len(score.tokens) * rounding.of_checkpoint(tiny))
        assert [t.rank for t in score.tokens] == [t.rank for t in alone.tokens]


def test_a_bos_of_the_tokenizer_gives_an_empty_prompt_its_context(tiny_bos: Path, lm: SequenceProbability) -> None:
    with_bos = SequenceProbability(str(tiny_bos))
    (score,) = with_bos.get_log_prob("", "The dog")
    assert "".join(t.text for t in score.tokens) == "The dog"
    with pytest.raises(InputError, match="no BOS"):
        lm.get_log_prob("", "The dog")
    asked = SequenceProbability(str(measured(lm.subject.checkpoint).path), add_bos=True)
    wanted = pytest.approx(score.log_prob, abs=len(score.tokens) * rounding.of_checkpoint(tiny_bos))
    assert asked.get_log_prob("", "The dog")[0].log_prob == wanted


def test_an_eos_that_the_tokenizer_adds_is_not_part_of_the_target(tiny: Path, tmp_path: Path) -> None:
    import shutil

    from tokenizers import processors
    from transformers import AutoTokenizer

    shutil.copytree(tiny, tmp_path / "eos")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "eos")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.save_pretrained(tmp_path / "eos")
    with_eos, plain = SequenceProbability(str(tmp_path / "eos")), SequenceProbability(str(tiny))
    assert len(with_eos.subject.tokenizer.encode("The dog", special=True).ids) == 1 + len(
        plain.subject.tokenizer.encode("The dog", special=True).ids
    )
    assert with_eos.get_log_prob("The dog", " jumps")[0].log_prob == pytest.approx(
        plain.get_log_prob("The dog", " jumps")[0].log_prob, abs=1e-5
    )


# ── engines that fail ────────────────────────────────────────────────────────────────────────────────────────────────
class Faulty(TableEngine):
    """A uniform table by which every condition is impossible: the second question of a pair."""

    def __init__(self) -> None:
        super().__init__(np.zeros((1, VOCABULARY)))
        self.asked = 0

    def score(self, source: WindowSource, done: Bools, want: Wanted = SCORES) -> Iterator[tuple[int, Answers]]:
        self.asked += 1
        for index, answers in super().score(source, done):
            impossible = np.full_like(answers.logprob, -np.inf)
            yield index, answers if self.asked == 1 else dataclasses.replace(answers, logprob=impossible)


def test_a_condition_of_probability_zero_is_refused_not_certain(tiny: Path) -> None:
    engine = Faulty()
    with pytest.raises(BoundaryError, match="probability zero"):
        SequenceProbability(str(tiny), engine=engine).get_log_prob("The ", "dog")
    assert engine.asked == 2


# ── when the engine starts and stops ─────────────────────────────────────────────────────────────────────────────────
@dataclasses.dataclass
class Started:
    """Engines that were started: with room for how many tokens, and which of them were stopped."""

    room: list[int | None]
    stopped: list[int]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    seen = Started([], [])
    original = registry.open_engine

    def opening(chosen: Any, work: Any) -> Engine:
        number = len(seen.room)
        seen.room.append(work.longest)
        engine = original(chosen, work)
        monkeypatch.setattr(engine, "close", lambda: seen.stopped.append(number))
        return engine

    monkeypatch.setattr(registry, "open_engine", opening)
    return seen


@pytest.mark.parametrize(
    ("prompt", "target"),
    [("The", ""), ("", "The"), ("The ", "dog"), ("The dog " * 200, " jumps"), ("\ud800", "a")],
    ids=["empty target", "no context", "spanning", "too long", "not UTF-8"],
)
def test_what_cannot_be_scored_is_refused_before_an_engine_starts(
    tiny: Path, started: Started, prompt: str, target: str
) -> None:
    lm = SequenceProbability(str(tiny), spanning="refuse")
    with pytest.raises((InputError, BoundaryError)):
        lm.get_log_prob(["The", prompt], [" dog", target])
    assert started.room == []


def test_a_tokenizer_that_does_not_fit_is_refused_before_an_engine_starts(
    tiny: Path, stories: Path, started: Started
) -> None:
    with pytest.raises(ModelError, match="--tokenizer"):
        SequenceProbability(str(tiny), tokenizer=str(stories)).get_log_prob("Once upon a", " time")
    assert started.room == []


def test_the_function_starts_its_engine_for_the_longest_pair_and_stops_it(tiny: Path, started: Started) -> None:
    lm = SequenceProbability(str(tiny))
    longest = max(len(lm.subject.tokenizer.encode(t, special=True).ids) for t in ("The dog", "The dog jumps over"))
    sm.prob(str(tiny), prompt="The dog", targets=["!", " jumps over"])
    assert (started.room, started.stopped) == ([longest - 1], [0])


def test_the_engine_is_stopped_when_scoring_fails(
    tiny: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sequence, "likelihoods", failing)
    with pytest.raises(KeyboardInterrupt):
        sm.prob(str(tiny), prompt="The dog", targets=[" jumps"])
    assert started.stopped == [0]


def test_a_closed_model_answers_again(tiny: Path, started: Started) -> None:
    with SequenceProbability(str(tiny)) as lm:
        (first,) = lm.get_log_prob("The dog", " jumps")
        lm.get_log_prob("The dog", " jumps")
    lm.close()
    assert (len(started.room), started.stopped) == (1, [0])
    assert lm.get_log_prob("The dog", " jumps") == [first]
    assert len(started.room) == 2


def test_a_prompt_that_is_too_long_names_the_context_of_the_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the length that engines are started for, which is ours and may be shorter."""
    monkeypatch.setattr("scoremode.core.verbs.model.USUAL_LENGTH", 16)
    lm = SequenceProbability(str(tiny))
    assert lm.get_log_prob("The quick brown fox " * 3, "jumps")[0].log_prob < 0
    with pytest.raises(ModelError, match="more than the model's context of 128; shorten the prompt"):
        lm.get_log_prob("The quick brown fox " * 100, "jumps")


@needs_wing("engines/vllm")
def test_a_length_that_the_user_chose_is_named(tiny: Path) -> None:
    pytest.importorskip("vllm")
    lm = SequenceProbability(str(tiny), engine="vllm", max_model_len=20)
    with pytest.raises(ModelError, match="more than --max-model-len 20; shorten the prompt, or give a larger"):
        lm.get_log_prob("The quick brown fox " * 10, "jumps")
