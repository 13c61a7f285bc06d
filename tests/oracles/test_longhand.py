"""Every method, from the text to the printed number, against its recipe written longhand over the same real model."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scoremode as sm
from scoremode.core.plan.recipes import METHODS
from tests.oracles import longhand

ROWS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.\n",
    "",
    "In 1999 there were 12345 cats; naïve people said “déjà-vu” about 東京.\n",
    "A model is a function from tokens to distributions over tokens.\n",
    "",
    "Nothing more is known of the fox. The dog slept; the cats did not.\n",
]
TOLERANCE = 2e-5  # relative, of a perplexity: float32 against float64


class Judge:
    """A checkpoint and its tokenizer, used as plainly as possible."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.folder = folder
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    @functools.lru_cache(maxsize=256)  # noqa: B019 - a judge lives as long as the test session
    def _logits(self, ids: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return logits

    def logits(self, ids: list[int]) -> torch.Tensor:
        return self._logits(tuple(ids))

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])


@pytest.fixture(scope="module", params=["tiny", "tiny_bos"])
def judge(request: pytest.FixtureRequest) -> Judge:
    return Judge(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "wiki.test.raw"
    path.write_text("".join(row or " \n" for row in ROWS), encoding="utf-8")
    return path


JOINED = "\n\n".join(ROWS)


def value(judge: Judge, rows_file: Path, method: str, **settings: Any) -> sm.Run:
    return sm.ppl(str(judge.folder), corpus=f"wikitext2:{rows_file}", method=method, **settings)


def test_every_method_has_a_longhand_test() -> None:
    tested = {name.removeprefix("test_").replace("_", "-") for name in globals() if name.startswith("test_")}
    assert set(METHODS) <= tested


@pytest.mark.parametrize(("context", "stride"), [(32, 8), (17, 5), (64, 64 - 1)])
def test_sliding_once(judge: Judge, rows_file: Path, context: int, stride: int) -> None:
    run = value(judge, rows_file, "sliding-once", context_length=context, stride=stride)
    expected = longhand.sliding_once(judge.logits, judge.encode(JOINED), context, stride)
    assert run.perplexity.value == pytest.approx(expected, rel=TOLERANCE)


def test_exl3_2025(judge: Judge, rows_file: Path) -> None:
    run = value(judge, rows_file, "exl3-2025", context_length=32, stride=8)
    expected = longhand.exl3_2025(judge.logits, judge.encode(JOINED), 32, 8)
    assert run.perplexity.value == pytest.approx(expected, rel=TOLERANCE)
    three = value(judge, rows_file, "exl3-2025", context_length=32, stride=8, max_windows=3)
    assert three.perplexity.value == pytest.approx(
        longhand.exl3_2025(judge.logits, judge.encode(JOINED), 32, 8, rows=3), rel=TOLERANCE
    )


def test_exl3_2026(judge: Judge, rows_file: Path) -> None:
    run = value(judge, rows_file, "exl3-2026", context_length=32)
    expected = longhand.exl3_2026(judge.logits, judge.encode(JOINED, special=False), 32, len(judge.tokenizer))
    assert run.perplexity.value == pytest.approx(expected, rel=TOLERANCE)


def test_gptq(judge: Judge, rows_file: Path) -> None:
    run = value(judge, rows_file, "gptq", context_length=32)
    assert run.perplexity.value == pytest.approx(longhand.gptq(judge.logits, judge.encode(JOINED), 32), rel=TOLERANCE)


@pytest.mark.parametrize("context", [32, 21])
def test_llamacpp(judge: Judge, rows_file: Path, context: int) -> None:
    run = value(judge, rows_file, "llamacpp", context_length=context)
    text = rows_file.read_text(encoding="utf-8").removesuffix("\n")
    ids = judge.encode(text)
    bos = ids[0] if ids[0] == judge.tokenizer.bos_token_id else None
    perplexity, error = longhand.llamacpp(judge.logits, ids, context, bos)
    assert run.perplexity.value == pytest.approx(perplexity, rel=TOLERANCE)
    assert run.manifest["perplexity_stderr_llamacpp"] == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize(("context", "stride"), [(32, 8), (32, 32), (128, 50)])
def test_hf_stride(judge: Judge, rows_file: Path, context: int, stride: int) -> None:
    """Against the loop that the Transformers documentation describes, with the model's own loss."""
    run = value(judge, rows_file, "hf-stride", context_length=context, stride=stride)
    ids = torch.tensor([judge.encode(JOINED)])
    total, weight, reached = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + context, ids.shape[1])
        window, labels = ids[:, begin:end], ids[:, begin:end].clone()
        labels[:, : -(end - reached)] = -100
        with torch.inference_mode():
            loss = float(judge.model(window, labels=labels).loss)
        counted = int((labels != -100).sum()) - 1
        if counted:
            total, weight = total + loss * counted, weight + counted
        reached = end
        if end == ids.shape[1]:
            break
    assert run.perplexity.value == pytest.approx(math.exp(total / weight), rel=TOLERANCE)


def test_lm_eval_rolling(judge: Judge, tmp_path: Path) -> None:
    documents = [row for row in ROWS if row] + ["x"]
    corpus = tmp_path / "documents.jsonl"
    import json

    corpus.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    run = sm.ppl(str(judge.folder), corpus=str(corpus), method="lm-eval-rolling", context_length=16)
    prefix = judge.tokenizer.bos_token_id
    total = sum(longhand.lm_eval_rolling(judge.logits, judge.encode(d), 16, prefix) for d in documents)
    words = sum(len(d.split()) + d.endswith("\n") for d in documents)
    assert float(run.scores.logprob.sum()) == pytest.approx(total, rel=TOLERANCE)
    assert run.word_perplexity.value == pytest.approx(math.exp(-total / words), rel=10 * TOLERANCE)
    size = sum(len(d.encode()) for d in documents)
    assert run.bits_per_byte.value == pytest.approx(-total / size / math.log(2), rel=TOLERANCE)


def test_mean_of_texts(judge: Judge, rows_file: Path) -> None:
    run = value(judge, rows_file, "mean-of-texts", context_length=128)
    texts = [judge.encode(row, special=False) for row in ROWS if row]
    expected = longhand.mean_of_texts(judge.logits, texts, judge.tokenizer.bos_token_id)
    assert run.perplexity.value == pytest.approx(expected, rel=TOLERANCE)


def test_every_score_of_a_run_not_only_their_mean(judge: Judge, rows_file: Path) -> None:
    run = value(judge, rows_file, "gptq", context_length=16)
    ids = judge.encode(JOINED)
    expected = [
        -longhand.nll(judge.logits, ids[a : a + 16], i, ids[a + i])
        for a in range(0, len(ids) - 15, 16)
        for i in range(1, 16)
    ]
    assert np.abs(run.scores.logprob - np.array(expected)).max() < 1e-4
