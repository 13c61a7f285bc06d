"""Each recipe written out longhand from its description, in float64, sharing no code with scoremode.core.plan.recipes.

Every function takes ``logits(ids) -> (len(ids), V)`` of a real model and returns the recipe's perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

LogitsOf = Callable[[list[int]], torch.Tensor]


def nll(logits_of: LogitsOf, fed: list[int], position: int, target: int, vocabulary: int | None = None) -> float:
    """-log P(target at ``position``) given the tokens fed before that position."""
    row = logits_of(fed)[position - 1].double()[:vocabulary]
    return float(torch.logsumexp(row, 0) - row[target])


def sliding_once(logits_of: LogitsOf, ids: list[int], context: int, stride: int) -> float:
    losses, reached = [], 1
    for start in range(0, len(ids), stride):
        window = ids[start : start + context]
        for i in range(len(window)):
            if start + i >= reached and i > 0:
                losses.append(nll(logits_of, window, i, window[i]))
                reached = start + i + 1
        if start + context >= len(ids):
            break
    assert len(losses) == len(ids) - 1
    return math.exp(sum(losses) / len(losses))


def exl3_2025(logits_of: LogitsOf, ids: list[int], context: int, stride: int, rows: int = 100) -> float:
    losses = []
    for a in list(range(0, len(ids) - context, stride))[:rows]:
        window = ids[a : a + context]
        losses += [nll(logits_of, window, i, window[i]) for i in range(1, context)]
    return math.exp(sum(losses) / len(losses))


def exl3_2026(logits_of: LogitsOf, ids: list[int], context: int, vocabulary: int, rows: int = 100) -> float:
    total, count = 0.0, 0
    for a in list(range(0, len(ids) - context, context))[:rows]:
        window = ids[a : a + context]
        for i in range(1, context):
            total -= nll(logits_of, window, i, window[i], vocabulary)
            count += 1
    return math.exp(-total / count)


def gptq(logits_of: LogitsOf, ids: list[int], context: int) -> float:
    means = []
    for k in range(len(ids) // context):
        window = ids[k * context : (k + 1) * context]
        losses = [nll(logits_of, window, i, window[i]) for i in range(1, context)]
        means.append(sum(losses) / len(losses) * context)
    return math.exp(sum(means) / (len(means) * context))


def llamacpp(logits_of: LogitsOf, ids: list[int], context: int, bos: int | None) -> tuple[float, float]:
    """Perplexity and the error printed beside it."""
    total, squares, count = 0.0, 0.0, 0
    for k in range(len(ids) // context):
        chunk = ids[k * context : (k + 1) * context]
        fed = list(chunk)
        if bos is not None:
            fed[0] = bos
        for j in range(context // 2, context - 1):
            v = nll(logits_of, fed, j + 1, chunk[j + 1])
            total, squares, count = total + v, squares + v * v, count + 1
    mean = total / count
    variance = squares / count - mean * mean
    return math.exp(mean), math.exp(mean) * math.sqrt(variance / (count - 1))


def lm_eval_rolling(logits_of: LogitsOf, ids: list[int], context: int, prefix: int) -> float:
    """Log-likelihood of one document."""
    total, done = 0.0, 0
    everything = [prefix, *ids]  # everything[i] is predicted from everything[:i]
    while done < len(ids):
        end = min(done + context, len(ids))
        begin = 0 if done == 0 else end - context
        fed = everything[begin:end]
        for t in range(done, end):
            total -= nll(logits_of, fed, t + 1 - begin, ids[t])
        done = end
    return total


def mean_of_texts(logits_of: LogitsOf, texts: list[list[int]], bos: int) -> float:
    each = []
    for ids in texts:
        fed = [bos, *ids]
        losses = [nll(logits_of, fed, i, fed[i]) for i in range(1, len(fed))]
        each.append(math.exp(sum(losses) / len(losses)))
    return sum(each) / len(each)
