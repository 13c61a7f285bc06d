"""Distributions in 16 bits, as llama.cpp stores them: logits ─▶ records, and records with logits ─▶ KL.

Tensors of records are int16 with the bits of uint16 (budget.py), because PyTorch supports few operations on uint16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scoremode.head.budget import FLOOR, LARGEST_CODE, LEFT_OUT, rows_of_workspace, words_of

COPIES = 4  # most float64 copies of a row in memory at once


def encode_records(logits: Tensor) -> Tensor:
    """Turns logits (n, vocabulary) into records (n, words) int16 with llama.cpp's arithmetic: float32, ties to even.

    Runs on the device of the logits, so only the records are copied off it. A row with NaN or +inf gives a record whose
    floats are not finite, which the writer refuses.

    >>> encode_records(torch.tensor([[0.0, 1.0, 2.0]]))[0, 4:].tolist()
    [0, -32768, -1, 0]
    """
    n, vocabulary = logits.shape
    records = torch.zeros(n, words_of(vocabulary), dtype=torch.int16, device=logits.device)
    step = rows_of_workspace(vocabulary, 8 * COPIES, logits.device.type)
    for rows in (slice(i, i + step) for i in range(0, n, step)):
        _encode(logits[rows].float(), records[rows])
    return records


def _encode(x: Tensor, records: Tensor) -> None:
    largest = x.amax(1)
    lowest = torch.maximum(x.amin(1), largest - FLOOR)
    # each exponential is rounded to float32, but the sum is not, as in llama.cpp
    exponentials = (x - largest[:, None]).double().exp_().float()
    log_sum = exponentials.sum(1, dtype=torch.float64).log().float()
    # divided by a tensor, because PyTorch on a GPU would multiply by the reciprocal of a number and round differently
    scale = (largest - lowest) / torch.full_like(largest, LARGEST_CODE)
    records[:, :4] = torch.stack([scale, lowest - largest - log_sum], 1).view(torch.int16)
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    codes = torch.round(inverse[:, None] * (x - lowest[:, None]))  # half to even
    codes = torch.where(x > lowest[:, None], codes, 0.0).to(torch.int32)
    records[:, 4 : 4 + x.shape[1]] = codes.to(torch.int16)  # the low 16 bits are stored


def stored_log_probabilities(records: Tensor, vocabulary: int) -> Tensor:
    """Returns the log-probabilities of records (n, words) int16: (n, vocabulary), float64, all ids, not normalised."""
    floats = records[:, :4].contiguous().view(torch.float32).double()
    codes = records[:, 4 : 4 + vocabulary].to(torch.int32) & 0xFFFF
    return codes.double().mul_(floats[:, :1]).add_(floats[:, 1:])


def kl_from_records(records: Tensor, logits: Tensor) -> Tensor:
    """Computes KL(stored‖q) by llama.cpp's rule, (n,) in float64, for q's logits (n, vocabulary).

    It is Σ p · (log p - log q) over the ids with log p > -16. The stored p do not sum to 1, so the result may be
    slightly negative.
    """
    n, vocabulary = logits.shape
    kl = torch.empty(n, dtype=torch.float64, device=logits.device)
    step = rows_of_workspace(vocabulary, 8 * COPIES, logits.device.type)
    for rows in (slice(i, i + step) for i in range(0, n, step)):
        log_p = stored_log_probabilities(records[rows], vocabulary)
        gap = log_p - torch.log_softmax(logits[rows].double(), 1)
        terms = gap.mul_(log_p.exp()).masked_fill_(log_p <= LEFT_OUT, 0.0)
        torch.sum(terms, 1, out=kl[rows])
    return kl
