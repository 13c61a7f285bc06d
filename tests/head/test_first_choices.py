"""The first choices of rows of logits, judged by a stable sort."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scoremode.head import first_choices as module
from scoremode.head.budget import FIRST
from scoremode.head.first_choices import LAST_ID, LeadingChoices, agreement, first_choices, joined_choices


def ids_of(keys: Tensor) -> list[list[int]]:
    return [[LAST_ID - (key & 0xFFFFFFFF) for key in row if key != module.ABSENT] for row in keys.tolist()]


def sorted_ids(x: Tensor) -> list[list[int]]:
    found: list[list[int]] = x.double().sort(dim=1, descending=True, stable=True).indices[:, :FIRST].tolist()
    return found


@pytest.mark.parametrize("width", [1, 2, 3, 5, 6, 7, 255, 1003, 4096, 5003, 12_289])
@pytest.mark.parametrize("levels", [0, 2, 40], ids=["distinct", "two values", "forty values"])
def test_they_are_those_of_a_stable_sort(width: int, levels: int) -> None:
    random = torch.Generator().manual_seed(width)
    x = torch.randn(17, width, generator=random)
    if levels:
        x = torch.randint(-levels // 2, levels // 2, (17, width), generator=random).float()
    x[1, ::2] = float("-inf")
    x[2] = float("-inf")
    x[3], x[3, width // 2] = 0.0, -0.0  # equal
    x[4], x[5] = 1.5, -2.5
    assert ids_of(first_choices(x)) == sorted_ids(x)
    assert ids_of(first_choices(x[:, : width - 1])) == sorted_ids(x[:, : width - 1])  # rows that are not contiguous
    assert first_choices(x[:0]).shape == (0, FIRST)
    for cut in {1, width // 3, width - 1}:
        parts = [first_choices(x[:, :cut]), first_choices(x[:, cut:], cut)]
        assert torch.equal(joined_choices(parts), first_choices(x))
    for lead in (100, 107, 245):  # columns before those of the ids
        columns, leading = torch.cat([torch.zeros(17, lead), x], 1), LeadingChoices(17, 20)
        for begin in range(lead // 100 * 100, lead + width, 100):
            early, fresh = min(begin, lead + width - 100), max(begin, lead)  # the last block repeats some ids
            block = columns[:, early : early + 100].clone()
            block[:, : fresh - early] = float("-inf")
            chunks = block.view(17, 5, 20)
            leading.add(chunks, chunks.amax(2), early - lead, fresh - lead)
        assert torch.equal(leading.choices(), first_choices(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_many_ties(dtype: torch.dtype) -> None:
    x = (torch.randn(50, 5003, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    assert ids_of(first_choices(x)) == sorted_ids(x)


def test_agreement_ends_at_the_first_difference() -> None:
    p = torch.tensor([[9.0, 8, 7, 6, 5, 4]]).expand(4, -1)
    q = p.clone()
    q[1, [4, 5]] = q[1, [5, 4]]  # the fifth choice
    q[2, [0, 1]] = q[2, [1, 0]]  # the first two: the third one agrees again, and does not count
    q[3, 2] = 6.0  # equal to the fourth, and the lower id
    assert agreement(first_choices(p), first_choices(q)).tolist() == [5, 4, 0, 5]


def test_all_ids_of_a_small_vocabulary_in_order_count_as_five() -> None:
    same, other = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[3.0, 1.0, 2.0]])
    assert agreement(first_choices(same), first_choices(same)).tolist() == [5]
    assert agreement(first_choices(same), first_choices(other)).tolist() == [1]
