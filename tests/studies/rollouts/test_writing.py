"""Texts that Transformers writes: greedy ones against its own generate, log-probabilities against the decode path."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_for
from scoremode.studies.rollouts.texts import Rollouts
from scoremode.studies.rollouts.writing import DrawingRules, WritingRequest
from tests import rounding

PROMPTS: list[Any] = [
    "The quick brown fox",
    "A model",
    {"messages": [{"role": "user", "content": "In 1999"}]},
    "d",
    "the lazy dog, and",
    "naïve 東京",
]


@pytest.fixture(scope="module")
def written(tiny: Path) -> Rollouts:
    return sm.rollouts(str(tiny), PROMPTS, samples=3, temperature=1, max_tokens=40, dtype="float32", sequences=5)


def test_greedy_texts_are_those_of_generate(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    found = sm.rollouts(str(tiny), PROMPTS, max_tokens=20, dtype="float32", sequences=4)
    stock: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype="float32")
    for prompt, written in zip(found.prompt_ids, found.written, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        alone = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert written.tolist() == alone[0, len(prompt) :].tolist()
    assert found.prompt_text[2] == "<s>user: In 1999</s>\n<s>assistant: "


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_log_probabilities_are_those_of_the_paths(tiny: Path, written: Rollouts, path: str) -> None:
    run = sm.ppl(str(tiny), corpus=written, path=path, dtype="float32")
    raw = np.concatenate(written.raw_logprob)
    assert np.abs(run.scores.logprob - raw).max() < rounding.of_checkpoint(tiny)
    assert (raw == np.concatenate(written.logprob)).all()
    assert run.perplexity.groups == len(PROMPTS)
    assert run.manifest["stderr_groups"] == "prompts"


def test_a_text_does_not_depend_on_the_texts_beside_it(tiny: Path, written: Rollouts) -> None:
    how: dict[str, Any] = {"temperature": 1, "max_tokens": 40, "dtype": "float32"}
    alone = sm.rollouts(str(tiny), PROMPTS, samples=3, sequences=1, **how)
    assert [ids.tolist() for ids in alone.written] == [ids.tolist() for ids in written.written]
    fewer = sm.rollouts(str(tiny), PROMPTS, samples=1, **how)
    assert [ids.tolist() for ids in fewer.written] == [ids.tolist() for ids in written.written[::3]]
    other = sm.rollouts(str(tiny), PROMPTS, samples=1, seed=1, **how)
    assert [ids.tolist() for ids in other.written] != [ids.tolist() for ids in fewer.written]


def test_texts_end_at_end_tokens(tiny: Path) -> None:
    """Without a place among other texts that go on, and with one."""
    chosen = choose(str(tiny), "transformers", {"dtype": "float32"})
    prompts = [np.array(ids, np.int32) for ids in ([5, 6], [7], [8, 9, 10], [11], [12, 13])]
    asked = [WritingRequest(ids, i, 30) for i, ids in enumerate(prompts)]
    none = np.zeros(len(asked), np.bool_)
    with closing(open_for(chosen, "writes", Work(64), DrawingRules(1.0))) as writer:
        writer.ends = frozenset()
        free = dict(writer.write(asked, none, lambda _: None))
        stop = int(free[0].ids[4])
        writer.ends = frozenset([stop])
        told: list[int] = []
        ended = dict(writer.write(asked, none, told.append))
        some = dict(writer.write(asked, np.arange(len(asked)) != 2, lambda _: None))
    assert list(some) == [2]
    assert some[2].ids.tolist() == ended[2].ids.tolist()
    for i, text in ended.items():
        whole = free[i].ids.tolist()
        assert text.ids.tolist() == (whole[: whole.index(stop) + 1] if stop in whole else whole)
        assert np.abs(text.raw_logprob - free[i].raw_logprob[: len(text.ids)]).max() < rounding.of_checkpoint(tiny)
    assert len(ended[0].ids) == free[0].ids.tolist().index(stop) + 1
    assert sum(told) == sum(len(text.ids) for text in ended.values())


def test_a_full_context_ends_texts(tiny: Path) -> None:
    room = choose(str(tiny), "transformers", {}).subject.context_length
    assert room is not None
    long = "dog " * room
    found = sm.rollouts(str(tiny), ["fox", long, "dog " * (room // 2)], max_tokens=room, dtype="float32")
    assert found.finish[1] == "context"
    assert [len(found.written[1]), len(found.logprob[1])] == [0, 0]
    assert any("no token, because their prompt fills the context" in note for note in found.manifest["notes"])
    for prompt, ids, finish in zip(found.prompt_ids[::2], found.written[::2], found.finish[::2], strict=True):
        assert finish == ("stop" if ids[-1] == 1 else "context")
        assert len(prompt) + len(ids) <= room
    with pytest.raises(sm.ScoremodeError, match=r"text 1 has .* tokens with its prompt"):
        sm.ppl(str(tiny), corpus=found, dtype="float32")


def test_a_served_head_in_bfloat16_writes_too(tiny: Path, written: Rollouts) -> None:
    how: dict[str, Any] = {"temperature": 1, "max_tokens": 8, "samples": 2}
    served = sm.rollouts(str(tiny), PROMPTS, head="as-served", dtype="bfloat16", **how)
    run = sm.ppl(str(tiny), corpus=served, path="decode", head="as-served", dtype="bfloat16")
    assert served.manifest["head"] == "as-served"
    assert np.abs(run.scores.logprob - np.concatenate(served.raw_logprob)).mean() < 0.05


def test_a_model_of_another_tokenizer_is_refused(tiny_bos: Path, written: Rollouts) -> None:
    with pytest.raises(sm.ScoremodeError, match="has another tokenizer"):
        sm.ppl("table:uniform", corpus=written)
    run = sm.plan(str(tiny_bos), corpus=written)  # the same tokens, and another fingerprint
    assert any("another tokenizer" in note for note in run["notes"])
