"""Servers that lie: what moves perplexity by 1 % is refused or noted, and honest ones are never refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scoremode as sm
from scoremode.errors import ScoremodeError
from tests.engines.server.lies import LIES, Lie, LyingServer, Stories

GENERAL = "no client can see"
QUESTION: dict[str, Any] = {"context_length": 128, "fresh": True, "concurrency": 1}


@pytest.fixture(scope="module")
def honest(stories: Path) -> Stories:
    return Stories(stories)


@pytest.fixture(scope="module")
def text(stories: Path, honest: Stories) -> str:
    from transformers import AutoTokenizer

    return honest.text(AutoTokenizer.from_pretrained(stories))


@pytest.fixture(scope="module")
def truth(stories: Path, text: str, tmp_path_factory: pytest.TempPathFactory) -> float:
    return float(sm.ppl(str(stories), dtype="float32", text=text, context_length=128).perplexity.value)


def believed(model: Path, text: str, served: LyingServer) -> tuple[str, float]:
    """What becomes of a run: refused, noted or another model; and its perplexity."""
    try:
        run = sm.ppl("small", engine=served.address, tokenizer=str(model), text=text, **QUESTION)
    except ScoremodeError as error:
        return f"refused: {error}", np.nan
    notes = [n for n in run.manifest["notes"] if any(w in n for w in ("proven", "depend", "worse", "floor", "zero"))]
    assert any(GENERAL in n for n in run.manifest["notes"])
    return f"noted: {notes}" if notes else "another model", float(run.perplexity.value)


def lying(stories: Stories, **how: Any) -> LyingServer:
    return LyingServer(stories=stories, ids=512, tokenizes=False, max_model_len=512, **how)


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_not_believed_in_silence(name: str, stories: Path, honest: Stories, text: str, truth: float) -> None:
    lie: Lie = LIES[name]
    with lying(honest, lie=lie, **lie.server) as served:
        found, perplexity = believed(stories, text, served)
    print(f"{name:<55}{perplexity / truth:8.3f}  {found}")
    good = (lie.wanted, "refused") if lie.wanted == "noted" else lie.wanted
    assert found.startswith(good) or abs(perplexity / truth - 1) < 0.01
