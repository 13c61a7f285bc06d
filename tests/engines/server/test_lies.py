"""Servers that lie: what moves perplexity by 1 % is refused or noted, and honest ones are never refused.

``benchmarks/hostile.py --servers`` repeats them, for many lies come and go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.engines.server.audit import Audit
from scoremode.engines.server.forms import PromptScores
from scoremode.engines.server.invariants import Ask
from scoremode.errors import UntrustedError
from tests.engines.server.lies import HONEST, LIES, SOMETIMES, Lie, LyingServer, Stories, is_good, outcome


@pytest.fixture(scope="module")
def honest(stories: Path) -> Stories:
    return Stories(stories)


@pytest.fixture(scope="module")
def text(honest: Stories) -> str:
    return honest.text()


@pytest.fixture(scope="module")
def truth(stories: Path, text: str) -> float:
    return float(sm.ppl(str(stories), dtype="float32", text=text, context_length=128).perplexity.value)


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_not_believed_in_silence(name: str, honest: Stories, text: str, truth: float) -> None:
    tries = 3 if name in SOMETIMES else 1  # in some answers alone: windows are asked again by chance
    for _ in range(tries):
        found, perplexity = outcome(honest, text, LIES[name])
        print(f"{name:<55}{perplexity / truth:8.3f}  {found}")
        if is_good(LIES[name], found, perplexity, truth):
            return
    pytest.fail(f"{name} is believed")


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_server_is_believed(name: str, honest: Stories, text: str, truth: float) -> None:
    for run in range(2):
        found, perplexity = outcome(honest, text, first=1000 * run, **HONEST[name])
        assert found.startswith("another model" if "nothing" not in name else "noted: the server gives one probability")
        assert perplexity == pytest.approx(truth, rel=5e-3)


def test_two_percent_more_tokens_are_sent() -> None:
    """And those that docs/server.md names. The draws do not end with the first windows."""

    sent_to_check = [0]

    class Counting(Ask):
        def __call__(self, ids: Sequence[int], *, likely: bool = False) -> PromptScores:
            sent_to_check[0] += len(ids)
            return PromptScores(-np.ones(len(ids) - 1), None, None)

        def every(self, ids: Sequence[int]) -> None: ...

    for length in (10, 100, 1000):
        ask, audit, sent, sent_to_check[0] = Counting(root="", fix="", most=20), Audit(bos=1), 0, 0
        ids = np.arange(1, length + 1, dtype=np.int32)
        for number in range(500):
            sent += length
            audit.window(ask, ids, -np.ones(length - 1))
            assert sent_to_check[0] <= 1540 + 1.5 * length + 0.02 * sent, (length, number)
        assert sent_to_check[0] > 500 + 0.005 * sent


def test_nothing_is_kept_of_a_server_that_is_not_believed(honest: Stories, text: str, tmp_path: Path) -> None:
    """Its answers are good at first. What was kept of them is not worth more than the others."""
    lie = Lie(lambda s, ids: s.true(ids) * (2 if len(ids) == 128 and s.lengths.count(128) > 4 else 1))
    for served in (
        LyingServer(stories=honest, lie=lie, ids=512, tokenizes=False),
        LyingServer(stories=honest, ids=512),
    ):
        served.tokenizes, served.max_model_len = False, 512
        with served, contextlib.suppress(UntrustedError):
            question: dict[str, Any] = {"tokenizer": str(honest.folder), "context_length": 128, "concurrency": 1}
            run = sm.ppl("small", engine=served.address, text=text, out=tmp_path / "o", **question)
    windows = len(np.unique(run.facts.window))
    assert served.lengths.count(128) >= windows - 1, "the last window may be shorter"


def test_a_prompt_that_is_asked_again_and_again_counts_once() -> None:
    """Windows may begin alike: their first tokens move alike, and say no more than those of one window."""
    audit = Audit(None)
    for ids in (np.arange(16), np.arange(16), np.arange(1, 17)):
        audit._add(audit.alone, np.full(15, 0.03), ids.astype(np.int32))
    assert audit.alone.count == 30
