"""P(target | prompt): the boundary, the sums, and what is asked only once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.errors import BoundaryError, InputError, OptionError
from scoremode.sequence import SequenceProbability, SequenceScore, score_to_file


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


def test_a_target_is_the_sum_over_its_tokens_in_the_joint_encoding(lm: SequenceProbability) -> None:
    prompt, target = "The quick brown fox", " jumps over the dog"
    (score,) = lm.get_log_prob(prompt, target)
    ids = lm.subject.tokenizer.encode(prompt + target, special=True).ids.tolist()
    n = len(score.tokens)
    rows = logprobs(lm, ids)[len(ids) - n - 1 : -1]
    expected = [float(rows[i, t]) for i, t in enumerate(ids[-n:])]
    assert [t.logprob for t in score.tokens] == pytest.approx(expected, abs=2e-5)
    assert score.log_prob == pytest.approx(sum(expected), abs=1e-4)
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


def test_the_leading_space_variant_is_a_named_choice() -> None:
    with_space = SequenceProbability("smollm2-135m", leading_space="add")
    (added,) = with_space.get_log_prob("The capital of France is", "Paris")
    assert added.target == " Paris"
    assert added.leading_space == "add"
    assert added.log_prob == pytest.approx(-0.258, abs=0.01)


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


def test_spanning_can_be_refused() -> None:
    strict = SequenceProbability("smollm2-135m", spanning="refuse")
    with pytest.raises(BoundaryError, match="spans the end of the prompt"):
        strict.get_log_prob("The capital of Fran", "ce is Paris")


def test_characters_of_several_tokens_keep_all_their_tokens(smol: SequenceProbability) -> None:
    (score,) = smol.get_log_prob("日本の首都は東", "京です")
    ids = smol.subject.tokenizer.encode("日本の首都は東京です", special=True).ids.tolist()
    assert [t.id for t in score.tokens] == ids[-len(score.tokens) :]
    assert "".join(t.text for t in score.tokens) == "京です"


def test_many_targets_of_one_prompt_equal_each_asked_alone(lm: SequenceProbability) -> None:
    prompt = "A model is a function from tokens"
    targets = [" to", " to distributions", " of cats", ".", " to distributions over tokens"]
    together = lm.get_log_prob(prompt, targets)
    for score, target in zip(together, targets, strict=True):
        (alone,) = lm.get_log_prob(prompt, target)
        assert score.log_prob == pytest.approx(alone.log_prob, abs=2e-5)
        assert [t.rank for t in score.tokens] == [t.rank for t in alone.tokens]


def test_results_come_in_the_order_of_the_pairs(lm: SequenceProbability) -> None:
    prompts = ["The dog", "The cat", "The dog", "A model"]
    targets = [" jumps", " mind", " mind", " is"]
    scores = lm.get_log_prob(prompts, targets)
    assert [(s.prompt, s.target) for s in scores] == list(zip(prompts, targets, strict=True))


def test_a_bos_of_the_tokenizer_gives_an_empty_prompt_its_context(tiny_bos: Path, lm: SequenceProbability) -> None:
    with_bos = SequenceProbability(str(tiny_bos))
    (score,) = with_bos.get_log_prob("", "The dog")
    assert "".join(t.text for t in score.tokens) == "The dog"
    with pytest.raises(InputError, match="no BOS"):
        lm.get_log_prob("", "The dog")
    asked = SequenceProbability(str(lm.subject.facts.path), add_bos=True)  # type: ignore[union-attr]
    assert asked.get_log_prob("", "The dog")[0].log_prob == pytest.approx(score.log_prob, abs=1e-5)


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


@pytest.mark.parametrize(
    ("prompts", "targets"), [("a", ""), (["a", "b"], ["c"]), ([], []), ("a", []), (["a"], ["b", "c"])]
)
def test_a_question_without_an_answer_is_an_error_never_an_empty_list(
    lm: SequenceProbability, prompts: Any, targets: Any
) -> None:
    with pytest.raises(InputError) as caught:
        lm.get_log_prob(prompts, targets)
    assert caught.value.fix


def test_unknown_choices_are_refused(tiny: Path) -> None:
    with pytest.raises(OptionError):
        SequenceProbability(str(tiny), leading_space="maybe")
    with pytest.raises(OptionError):
        SequenceProbability(str(tiny), spanning="ignore")
    with pytest.raises(TypeError):
        SequenceProbability(str(tiny), colour="blue")


def test_the_function_takes_a_prompt_and_targets() -> None:
    scores = sm.prob("table:uniform", prompt="ab", targets=["c", "de"])
    assert [round(s.log_prob / math.log(256), 9) for s in scores] == [-1.0, -2.0]


def test_json_and_back() -> None:
    (score,) = sm.prob("table:successor", prompt="ab", targets=["x"])
    assert score.log_prob == -math.inf
    assert score.as_json()["log_prob"] is None
    assert SequenceScore.from_json(score.as_json()) == score


def test_a_file_of_results_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = SequenceProbability("table:uniform")
    pairs = [(f"prompt {i}", f" target {i}") for i in range(600)]
    whole = score_to_file(lm, pairs, tmp_path / "whole.jsonl")
    calls: list[int] = []
    ask = SequenceProbability.get_log_prob

    def failing(self: SequenceProbability, prompts: Any, targets: Any, progress: Any = None) -> list[SequenceScore]:
        calls.append(len(prompts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return ask(self, prompts, targets, progress)

    monkeypatch.setattr(SequenceProbability, "get_log_prob", failing)
    with pytest.raises(KeyboardInterrupt):
        score_to_file(lm, pairs, tmp_path / "r.jsonl")
    assert not (tmp_path / "r.jsonl").exists()
    assert score_to_file(lm, pairs, tmp_path / "r.jsonl") == whole
    assert (tmp_path / "r.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert calls == [256, 256, 256, 88], "the first 256 pairs were scored twice"
    assert not (tmp_path / "r.jsonl.partial").exists()


def test_a_partial_file_of_other_pairs_is_not_used(tmp_path: Path) -> None:
    lm = SequenceProbability("table:uniform")
    (tmp_path / "r.jsonl.partial").write_text('{"pairs": "others"}\n{"nonsense": 1}\n')
    results = score_to_file(lm, [("a", "b")], tmp_path / "r.jsonl")
    assert len(results) == 1
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 1


def test_nothing_asked_of_a_position_zero(lm: SequenceProbability) -> None:
    """Every score of a target has at least one token before it."""
    plan_rows: list[np.ndarray] = []
    score = lm.engine.score

    def watching(source: Any, done: Any) -> Any:
        plan_rows.extend(source.window(i).rows for i in range(len(source)))
        return score(source, done)

    lm.engine.score = watching  # type: ignore[method-assign]
    lm.get_log_prob("The", " dog")
    lm.engine.score = score  # type: ignore[method-assign]
    assert all((rows >= 0).all() and len(rows) for rows in plan_rows)
