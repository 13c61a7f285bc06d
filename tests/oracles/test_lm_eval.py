"""lm-eval-rolling against lm-evaluation-harness itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import scoremode as sm

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval")


def rolling(folder: Path, texts: list[str], **settings: Any) -> list[float]:
    """The harness's own log-likelihoods of whole texts."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, **settings)
    requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
    return [float(x) for x in lm.loglikelihood_rolling(requests, disable_tqdm=True)]


def ours(folder: Path, texts: list[str], tmp_path: Path, **settings: Any) -> sm.Run:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return sm.ppl(str(folder), corpus=str(path), method="lm-eval-rolling", **settings)


@pytest.mark.parametrize("which", ["tiny", "tiny_bos"])
@pytest.mark.parametrize("context", [128, 24])
def test_log_likelihoods_equal_the_harnesss(
    which: str, context: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(which)
    texts = ["The quick brown fox jumps over the lazy dog. " * 9, "A model", "x", "naïve 東京 " * 5]
    run = ours(folder, texts, tmp_path, context_length=context)
    by_document = [float(run.scores.logprob[run.facts.document == d].sum()) for d in range(len(texts))]
    assert by_document == pytest.approx(rolling(folder, texts, max_length=context), rel=1e-5)


def test_a_trained_model_on_real_text(stories: Path, wikitext_file: Path, tmp_path: Path) -> None:
    texts = [
        "Once upon a time, there was a little girl named Lily. She loved to play outside.",
        wikitext_file.read_text(encoding="utf-8")[:3000],
    ]
    run = ours(stories, texts, tmp_path)
    by_document = [float(run.scores.logprob[run.facts.document == d].sum()) for d in range(2)]
    assert by_document == pytest.approx(rolling(stories, texts), rel=1e-5)
    assert by_document == pytest.approx([-16.084974, -9065.93726], rel=1e-5), "the figures recorded from lm-eval 0.4.13"
