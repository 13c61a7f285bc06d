"""The first few choices of a row of logits, in order, and how many of them two rows share.

A choice is an int64 key: the logit, in a form that is ordered as an integer, above the id, counted from the last one
down. So keys are never equal, a larger key is the earlier choice, and of equal logits the lower id comes first.
``torch.topk`` of logits does not promise that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scoremode.head.budget import FIRST, rows_of_workspace

LAST_ID = (1 << 31) - 1  # ids are int32
WIDE = 4096  # ids from which on it is faster to look at parts of a row first
ABSENT = -(1 << 63)  # fills the places of a slice with fewer ids; it is below every choice


def first_choices(x: Tensor, first_id: int = 0) -> Tensor:
    """Returns the keys (n, FIRST) of the first choices in logits (n, width), whose ids count from ``first_id``."""
    n, width = x.shape
    keys = torch.full((n, FIRST), ABSENT, dtype=torch.int64, device=x.device)
    if n == 0 or width == 0:
        return keys
    logits, ids = _largest(x, min(FIRST + 1, width))
    count = min(FIRST, width)
    keys[:, :count] = _keys(logits, ids + first_id)[:, :count]
    every = torch.arange(width, device=x.device) + first_id
    for rows in _tied(logits, width):
        keys[rows, :count] = _keys(x[rows], every).topk(count).values
    return keys


def _tied(logits: Tensor, width: int) -> tuple[Tensor, ...]:
    """Returns the rows with equal logits, a few at a time. They are rare, so only these are looked at again."""
    rows = (logits[:, 1:] == logits[:, :-1]).any(1).nonzero()[:, 0]
    return torch.split(rows, rows_of_workspace(width, 32, logits.device.type)) if len(rows) else ()


def _largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the largest logits of each row and their ids, (n, count), in order; of equal logits, any.

    Looks first for the ``count`` parts of a row with the largest logits: no logit outside them is larger than all of
    these. It takes a third of the time of ``torch.topk`` of whole rows on a CPU.
    """
    width, length = x.shape[1], 256
    if width < WIDE:
        return torch.topk(x, count)
    whole = width // length * length
    parts = x[:, :whole].view(len(x), -1, length)
    best = parts.amax(2).topk(count).indices[:, :, None]
    near = torch.cat([parts.gather(1, best.expand(-1, -1, length)).flatten(1), x[:, whole:]], 1)
    inside, rest = torch.arange(length, device=x.device), torch.arange(whole, width, device=x.device)
    ids = torch.cat([(best * length + inside).flatten(1), rest.expand(len(x), -1)], 1)
    logits, places = near.topk(count)
    return logits, ids.gather(1, places)


def _keys(x: Tensor, ids: Tensor) -> Tensor:
    bits = (x.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) | (LAST_ID - ids)


class LeadingChoices:
    """The first choices of n rows whose logits come in blocks of chunks, in the order of their ids.

    It keeps the FIRST chunks whose largest logits come first, because no other chunk has a first choice.
    """

    def __init__(self, n: int, length: int) -> None:
        self.keys = torch.full((n, FIRST), ABSENT, dtype=torch.int64)  # of each chunk, as if its largest were its first
        self.begins = torch.zeros(n, FIRST, dtype=torch.int64)  # id of each chunk's first logit
        self.logits = torch.full((n, FIRST, length), float("-inf"))

    def add(self, chunks: Tensor, largest: Tensor, begin: int, first_id: int) -> None:
        """Adds a block (n, chunks, length), given each chunk's largest logit and the id of the block's first logit.

        Ids below ``first_id`` are no choices; their logits must be -inf.
        """
        length, skipped = chunks.shape[2], (first_id - begin) // chunks.shape[2]
        begins = begin + length * torch.arange(skipped, chunks.shape[1])
        keys = torch.cat([self.keys, _keys(largest[:, skipped:], begins.clamp_min(first_id))], 1)
        mask = torch.zeros_like(keys, dtype=torch.bool).scatter_(1, keys.topk(FIRST).indices, True)
        rows, new = mask[:, FIRST:].nonzero(as_tuple=True)
        old = (~mask[:, :FIRST]).nonzero()[:, 1]  # a row loses as many chunks as it gains, so these are the same rows
        self.keys[rows, old], self.begins[rows, old] = keys[rows, FIRST + new], begins[new]
        self.logits[rows, old] = chunks[rows, skipped + new]

    def choices(self) -> Tensor:
        """Returns the keys (n, FIRST) of the first choices, after all blocks were added."""
        inside = torch.arange(self.logits.shape[2])
        logits, places = self.logits.flatten(1).topk(FIRST + 1)
        ids = self.begins.gather(1, places // len(inside)) + places % len(inside)
        choices = _keys(logits, ids)[:, :FIRST]
        for rows in _tied(logits, FIRST * len(inside)):
            ids, first_id = self.begins[rows, :, None] + inside, LAST_ID - (self.keys[rows, :, None] & 0xFFFFFFFF)
            keys = _keys(self.logits[rows], ids).masked_fill_(ids < first_id, ABSENT)
            choices[rows] = keys.flatten(1).topk(FIRST).values
        return choices


def joined_choices(parts: list[Tensor]) -> Tensor:
    """Returns the first choices of several slices together."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1).topk(FIRST).values


def agreement(first_p: Tensor, first_q: Tensor) -> Tensor:
    """Counts the leading choices (n,) that are the same ids in the same order.

    Both lack the same places of a vocabulary with fewer than FIRST ids, and these count as the same.
    """
    same = ((first_p ^ first_q) & 0xFFFFFFFF) == 0  # the part of a key that says the id
    return same.long().cumprod(1).sum(1)
