"""Rollouts through a server: a small one whose distributions are known exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import scoremode as sm
from scoremode.engines.table.engine import TableEngine
from scoremode.errors import EngineError, ModelError, OptionError, ScoremodeError
from scoremode.studies.rollouts.engines.server_writer import _read
from tests.engines.server.small_server import NAMES, SmallServer

PROMPTS = [f"prompt {n}" for n in range(5)]
HOW: dict[str, Any] = {"max_tokens": 6, "samples": 2}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's tokenizer, whose ids are bytes, as a folder of Hugging Face."""
    made = Tokenizer(models.BPE(vocab={name: byte for byte, name in NAMES.items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = tmp_path_factory.mktemp("bytes")
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(found)
    HOW["tokenizer"] = str(found)
    return found


@pytest.fixture
def served() -> Iterator[SmallServer]:
    with SmallServer() as server:
        yield server


def write(server: SmallServer, **more: Any) -> sm.Rollouts:
    return sm.rollouts(server.model, PROMPTS, engine=server.address, **{**HOW, **more})


def true_logprob(server: SmallServer, found: sm.Rollouts, number: int) -> Any:
    ids = np.concatenate([found.prompt_ids[number][-1:], found.written[number]])
    return TableEngine(server.logits).logprobs[ids[:-1], ids[1:]]


def test_sampled_texts_have_both_log_probabilities(served: SmallServer, tmp_path: Path) -> None:
    found = write(served, temperature=1, out=tmp_path / "w")
    for number in range(len(found)):
        assert found.raw_logprob[number] == pytest.approx(true_logprob(served, found, number), abs=1e-12)
        assert found.logprob[number].tolist() == found.raw_logprob[number].tolist()
    assert found.manifest["missing"] == []
    assert any("the server's own sampler" in note for note in found.manifest["notes"])
    again = write(served, temperature=1)
    assert again.text == found.text
    scored = sm.ppl(served.model, corpus=found, engine=served.address, tokenizer=HOW["tokenizer"])
    assert scored.scores.logprob == pytest.approx(np.concatenate(found.raw_logprob), abs=1e-12)


def test_what_a_server_cannot_give_is_said(served: SmallServer, tmp_path: Path) -> None:
    found = write(served, temperature=0.7, top_p=0.9, out=tmp_path / "w")
    assert found.manifest["missing"] == ["logprob"]
    assert np.isnan(np.concatenate(found.logprob)).all()
    assert found.raw_logprob[0] == pytest.approx(true_logprob(served, found, 0), abs=1e-12)
    assert any("those after are not known" in note for note in found.manifest["notes"])
    assert sm.Rollouts.open(tmp_path / "w").text == found.text
    greedy = write(served)
    assert not np.concatenate(greedy.logprob).any()
    assert greedy.raw_logprob[0] == pytest.approx(true_logprob(served, greedy, 0), abs=1e-12)


def test_a_text_that_ends_by_itself(served: SmallServer) -> None:
    served.end = int(write(served).written[0][2])
    found = write(served)
    assert "stop" in found.finish
    for finish, ids in zip(found.finish, found.written, strict=True):
        assert (finish == "stop") == (ids[-1] == served.end)


@pytest.mark.parametrize(
    ("facts", "how", "words"),
    [
        ({"before_temperature": False}, {}, "after the temperature"),
        ({"is_strict": True}, {"temperature": 1}, "refuses to write"),
        ({}, {"temperature": 1, "top_k": 3}, "may ignore --top-k"),
        ({"names_ids": False}, {"temperature": 1}, "does not give the ids"),
    ],
)
def test_servers_that_cannot_are_refused(facts: dict[str, Any], how: dict[str, Any], words: str) -> None:
    with SmallServer(**facts) as server, pytest.raises(ScoremodeError, match=words):
        write(server, **how)


def test_a_server_that_gives_them_after_the_temperature_may_draw_from_its_own_distribution() -> None:
    with SmallServer(before_temperature=False) as server:
        found = write(server, temperature=1)
        assert found.raw_logprob[3] == pytest.approx(true_logprob(server, found, 3), abs=1e-12)


def test_a_tokenizer_that_only_the_server_has_is_refused_before_anything_is_written(served: SmallServer) -> None:
    with pytest.raises((ModelError, OptionError), match="does not list its tokens"):
        write(served, tokenizer=None)


@pytest.mark.parametrize("wrong", ["NaN", "-1", None, True, float("nan")])
def test_what_is_no_number_is_refused(wrong: Any) -> None:
    """The text "NaN" would pass the test for log-probabilities before temperature."""
    found: dict[str, Any] = {"tokens": ["token_id:1"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:1": -1.0}]}
    found["token_logprobs"] = [wrong]
    answer = {"choices": [{"logprobs": found, "finish_reason": "length"}]}
    link: Any = SimpleNamespace(root="http://h")
    with pytest.raises(EngineError, match="cannot be used"):
        _read(link, answer, 1)
