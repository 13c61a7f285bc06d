"""Prompts fed in any chunks, interrupted and fed again, give their lines once and in order. No engine needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from scoremode.core.scores.answers import measured
from scoremode.core.scores.schema import DIVERGENCE
from scoremode.engines.vllm.wire import (
    DIVERGENCE_WORDS,
    KERNEL_WORDS,
    Request,
    line_words,
    read_divergences,
    read_lines,
    states_words,
)
from scoremode.head.columns import define_columns

pytest.importorskip("vllm", reason="needs vLLM")
from scoremode.engines.vllm import pooler


def metadata(requests: list[tuple[Request, int, int, int]]) -> Any:
    """(request, begin, end, length) of each prompt of a batch, as vLLM describes it."""
    begins, ends, lengths = (np.array([r[i] for r in requests]) for i in (1, 2, 3))
    cursor = SimpleNamespace(
        num_scheduled_tokens_cpu=torch.from_numpy(ends - begins),
        seq_lens_cpu=torch.from_numpy(ends),
        prompt_lens_cpu=torch.from_numpy(lengths),
    )
    params = [SimpleNamespace(extra_kwargs=r[0].to_kwargs()) for r in requests]
    return SimpleNamespace(get_pooling_cursor=lambda: cursor, pooling_params=params)


def feed(request: Request, length: int, chunks: list[tuple[int, int]]) -> torch.Tensor | None:
    """What is returned after these chunks; a line is (row, its first target)."""
    kept: list[Any] = []
    out = None
    for begin, end in chunks:
        hidden = torch.arange(begin, end)  # a "hidden state" is its absolute position
        (part,) = pooler.read_parts(metadata([(request, begin, end, length)]))
        lines = torch.stack([hidden[torch.from_numpy(part.index)], torch.from_numpy(part.targets[:, 0]).long()], 1)
        out = pooler.keep(kept, part, lines)
    assert not kept, "a finished request keeps nothing"
    return out


def ask(length: int, share: float, rng: np.random.Generator) -> Request:
    rows = np.flatnonzero(rng.random(length) < share).astype(np.int32)
    return Request(rows, (1000 + rows)[:, None].astype(np.int32))


@pytest.mark.parametrize("seed", range(60))
def test_any_chunks_and_any_preemption(seed: int) -> None:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 60))
    request = ask(length, float(rng.choice([0.0, 0.1, 0.6, 1.0])), rng)
    chunks, at = [], 0
    while at < length:
        end = min(length, at + int(rng.integers(1, 20)))
        chunks.append((at, end))
        at = (
            end if end == length or rng.random() > 0.25 else int(rng.integers(0, end))
        )  # fed again from an earlier token
    out = feed(request, length, chunks)
    assert out is not None
    assert np.array_equal(out[:, 0].numpy(), request.rows)
    assert np.array_equal(out[:, 1].numpy(), request.targets[:, 0])


@pytest.mark.parametrize("chunks", [[(0, 8), (16, 24), (24, 30)], [(16, 30)]], ids=["a hole", "a cached prefix"])
def test_only_the_unbroken_end_is_given(chunks: list[tuple[int, int]]) -> None:
    out = feed(ask(30, 1.0, np.random.default_rng(0)), 30, chunks)
    assert out is not None
    assert out[:, 0].tolist() == list(range(16, 30))


def test_requests_of_a_batch_find_their_own_rows() -> None:
    rng = np.random.default_rng(1)
    a, b = ask(20, 0.5, rng), ask(40, 0.5, rng)
    parts = list(pooler.read_parts(metadata([(a, 0, 20, 20), (b, 10, 25, 40)])))
    positions = np.concatenate([np.arange(20), np.arange(10, 25)])
    assert np.array_equal(positions[parts[0].index], a.rows)
    inside = b.rows[(b.rows >= 10) & (b.rows < 25)]
    assert np.array_equal(positions[parts[1].index], inside)
    assert np.all(parts[1].index >= 20)
    assert [p.finished for p in parts] == [True, False]


class Pooler(pooler.ScorePooler):
    """The head is used only to find the width of its input."""

    def _matrix_of(self, hidden: torch.Tensor) -> Any:
        return hidden, None, None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, 0),
        ({"extra": "states"}, states_words(7, 2)),
        ({"extra": "kl", "reference": "anywhere"}, DIVERGENCE_WORDS),
        ({"self_test": True}, line_words(3) + 3 + KERNEL_WORDS),
    ],
    ids=["scores", "states", "kl", "self-test"],
)
def test_a_step_without_a_row_that_was_asked_for_gives_lines_of_the_usual_width(
    asked: dict[str, Any], words: int
) -> None:
    """They are joined to those of other steps: a window's first step may be all overlap, its last a single token."""
    request = Request(np.arange(4, 6, dtype=np.int32), np.zeros((2, 3), np.int32), **asked)
    (part,) = pooler.read_parts(metadata([(request, 0, 4, 8)]))
    none = Pooler(torch.nn.Linear(1, 1), pooler.Settings())._score(torch.zeros(4, 7, dtype=torch.bfloat16), [part])
    assert (none.shape, none.dtype) == ((0, line_words(3) + words), torch.int32)
    kept: list[Any] = []
    pooler.keep(kept, part, none)
    (last,) = pooler.read_parts(metadata([(request, 4, 8, 8)]))
    lines = torch.ones(2, line_words(3) + words, dtype=torch.int32)
    out = pooler.keep(kept, last, lines)
    assert out is not None
    assert torch.equal(out, lines)


def test_words_keep_every_bit() -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0)) * 5
    columns = define_columns(logits, torch.arange(18).view(9, 2))
    large = torch.full_like(columns.rank, (1 << 24) + 1)
    answers = read_lines(pooler.to_words(replace(columns, rank=large)).numpy(), 2)
    assert np.array_equal(measured(answers.rank), large.numpy())
    assert np.array_equal(answers.logprob.astype(np.float32), columns.logprob.float().numpy())
    assert np.array_equal(measured(answers.top), columns.top.numpy())


def test_words_of_workers_that_measure_kl_alone() -> None:
    values = np.array([[0.25, np.nan, np.nan, np.nan], [np.inf, np.nan, np.nan, np.nan]])
    found = read_divergences(values.view(np.int32))
    assert list(found) == ["kl"]
    assert found["kl"].tolist() == [0.25, np.inf]
    every = read_divergences(np.array([[0.25, 0.5, 0.75, 5.0]]).view(np.int32))
    assert {name: column.tolist() for name, column in every.items()} == dict(
        zip([column.name for column in DIVERGENCE], [[0.25], [0.5], [0.75], [5]], strict=True)
    )
    assert every["same_first"].dtype == np.int32
