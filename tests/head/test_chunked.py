"""The plain kernel where it differs from the blocked one: a budget for its rows, and logits that are given."""

from __future__ import annotations

import pytest
import torch

from scoremode.head.chunked import reduce_logits, score_rows
from scoremode.head.columns import define_columns, define_logits
from scoremode.head.matrix import Head
from tests.head.test_blocked import assert_same, draw

SHAPES = [
    (0, 7, 11, 1),
    (1, 1, 2, 1),
    (3, 17, 257, 1),
    (13, 24, 1023, 3),
    (37, 48, 3001, 1),
    (5, 8, 515, 9),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [1, 4096, 1 << 20])
def test_every_shape_and_budget_answers_to_the_definition(shape: tuple[int, int, int, int], budget: int) -> None:
    hidden, weight, targets = draw(*shape)
    head = Head(weight, vocabulary=len(weight))
    truth = define_columns(define_logits(hidden, weight), targets)
    assert_same(score_rows(hidden, head.logits, targets, len(weight), budget), truth)


@pytest.mark.parametrize("k", [1, 3, 40])
def test_ties_are_ranked_by_id_for_few_and_for_many_targets(k: int) -> None:
    logits = torch.randint(0, 5, (6, 519), generator=torch.Generator().manual_seed(k)).float()
    targets = torch.randint(0, 519, (6, k), generator=torch.Generator().manual_seed(k + 1))
    assert_same(reduce_logits(logits, targets), define_columns(logits, targets))
