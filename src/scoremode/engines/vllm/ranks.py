"""What tensor-parallel ranks tell each other: a few numbers per row, never logits. Loaded by vLLM's processes alone."""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from scoremode.head.divergence import DivergencePartials
from scoremode.head.partials import Partials


def pack_divergence(d: DivergencePartials) -> Tensor:
    """All fields in float64, which is exact for ids and counts, viewed as float32; gathering only copies the bits."""
    columns = [c.double()[:, None] for c in (*d.sums, d.q.largest, d.q.total, d.q.weighted, d.q.where)]
    return torch.cat([*columns, d.q.before.double()], dim=1).view(torch.float32)


def unpack_divergence(words: Tensor) -> DivergencePartials:
    x = words.contiguous().view(torch.float64)
    largest_p, largest_q, total_p, total_q, cross, largest, total, weighted, where = x[:, :9].unbind(1)
    q = Partials(largest.float(), where.long(), total.float(), weighted.float(), x[:, 9:].long())
    return DivergencePartials(q, largest_p, largest_q, total_p, total_q, cross)


def pack_partials(p: Partials) -> Tensor:
    floats = torch.stack([p.largest, p.total, p.weighted], dim=1)
    ints = torch.cat([p.where[:, None], p.before], dim=1).to(torch.int32)
    # sent as float32 because some of vLLM's collectives support no other 32-bit type; gathering only copies bits
    return torch.cat([floats.view(torch.int32), ints], dim=1).view(torch.float32)


def unpack_partials(words: Tensor) -> Partials:
    floats, ints = words[:, :3], words[:, 3:].contiguous().view(torch.int32).long()
    return Partials(floats[:, 0], ints[:, 0], floats[:, 1], floats[:, 2], ints[:, 1:])


def across_ranks(own: Tensor) -> list[Tensor]:
    """The same (n, c) tensor of every tensor-parallel rank, in rank order: a few numbers per row, never logits."""
    group = get_tp_group()
    gathered: Tensor = group.all_gather(own.contiguous(), dim=0)
    return list(torch.split(gathered, len(own)))


def largest_of_ranks(at_target: Tensor) -> Tensor:
    """The targets' logits on every rank; each is known only to the rank that has its id."""
    return torch.stack(across_ranks(at_target)).amax(0)


def every_rank(mine: bool) -> bool:
    return not any_rank(not mine)


def any_rank(mine: bool) -> bool:
    group = get_tp_group()
    if group.world_size == 1:
        return mine
    flag = torch.full((1, 1), float(mine), device=group.device)
    return bool(torch.cat(across_ranks(flag)).amax() > 0)
