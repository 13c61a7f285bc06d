"""Reads the logits of a vLLM model in float32 before they are rounded, gathered or copied, on each rank separately.

Every causal model of vLLM ends in ``compute_logits``, which ends in a ``LogitsProcessor``. The processor projects,
gathers the shards, removes the padding, caps and scales. The tap replaces only the first three steps, on the processors
of one model object. All other steps (a norm before, a bias, a cap, a scale) are still done by the model's own code.
Tensor-parallel ranks then exchange a few numbers per row, never logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from scoremode.head.columns import RowBlock
from scoremode.head.matrix import Head, product_in_float32


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the vocabulary whose logits this rank computes."""

    first_id: int
    width: int  # real ids; the padding after them is removed
    vocabulary: int  # size of the whole vocabulary
    ranks: int  # 1: this rank sees the whole vocabulary
    exact: bool  # logits are accumulated and stored in float32

    @property
    def columns(self) -> int:
        """Width of the widest shard. Split rows by it, not by ``width``, so that all ranks split them alike."""
        return -(-self.vocabulary // self.ranks)


class _Reached(Exception):  # noqa: N818  # not an error
    """Raised to end ``compute_logits`` just before it applies the head's matrix; carries the matrix and its input."""

    def __init__(self, hidden: Tensor, head: Head | None, shard: Shard) -> None:
        super().__init__()
        self.hidden, self.head, self.shard = hidden, head, shard


class Tap:
    """Gives access to a model's head: logits of a few rows at a time, or its matrix.

    ``exact`` requests logits in float32. Without ``exact``, or if the head is quantized, the logits are those of the
    serving kernel.
    """

    def __init__(self, model: Any, exact: bool) -> None:
        self._model = model
        self._exact = exact
        self._mode = "stock"  # "shard", "gather" or "matrix" during our own calls; safe, as a worker has one thread
        self._shard: Shard | None = None
        processors = [m for m in model.modules() if isinstance(m, LogitsProcessor)]
        for processor in processors:
            # on the object, not on the class: other models in this process are not affected
            processor._get_logits = partial(self._project, processor, processor._get_logits)

    def rows(self, hidden: Tensor, index: Tensor) -> Tensor:
        """Returns the hidden states of the rows that are scored next."""
        return hidden[index]

    def logits(self, hidden: Tensor, gather: bool) -> tuple[Tensor, Shard]:
        """Returns the float32 logits (n, shard.width) of these rows, and the shard that says which ids they are for."""
        self._mode, self._shard = ("gather" if gather else "shard"), None
        try:
            x = self._model.compute_logits(hidden)
        finally:
            self._mode = "stock"
        if self._shard is None:  # the model projects without a LogitsProcessor
            if x is None or get_tp_group().world_size > 1:
                raise RuntimeError(
                    f"scoremode cannot read the logits of {type(self._model).__name__} under tensor parallelism: "
                    "it does not use vLLM's LogitsProcessor; use --tensor-parallel-size 1"
                )
            self._shard = Shard(0, x.shape[-1], x.shape[-1], 1, exact=False)
        return x.float(), self._shard

    def matrix(self, hidden: Tensor) -> tuple[Tensor, Head, Shard] | None:
        """Returns the input rows of the head (a model may norm them first), its matrix and its shard, or None.

        None: no usable matrix. Changes of the logits by a model's later code are not seen here: ``ScorePooler`` checks.
        """
        self._mode = "matrix"
        try:
            self._model.compute_logits(hidden)
        except _Reached as reached:
            return None if reached.head is None else (reached.hidden, reached.head, reached.shard)
        finally:
            self._mode = "stock"
        return None

    def served_logits(self, hidden: Tensor) -> Tensor | None:
        """Returns the output of ``compute_logits`` as served: all ids, the model's dtype; None on ranks without it."""
        x: Tensor | None = self._model.compute_logits(hidden)
        return x

    def _project(
        self, processor: Any, stock: Any, hidden: Tensor, lm_head: Any, bias: Tensor | None, *rest: Any
    ) -> Tensor | None:
        """Replaces ``LogitsProcessor._get_logits`` on one processor."""
        if self._mode == "stock":
            served: Tensor | None = stock(hidden, lm_head, bias, *rest)
            return served
        shard = _shard_of(processor, lm_head, self._exact and _is_plain(lm_head))
        if self._mode == "matrix":
            raise _Reached(hidden, _head_of(processor, lm_head, bias, shard), shard)
        if shard.exact:
            x = product_in_float32(hidden, lm_head.weight[: shard.width])
            x = x if bias is None else x.add_(bias[: shard.width].float())
        else:
            x = lm_head.quant_method.apply(lm_head, hidden, bias=bias)
        if self._mode == "gather" and shard.ranks > 1:
            padded = torch.nn.functional.pad(x, (0, lm_head.num_embeddings_per_partition - x.shape[-1]))
            x = get_tp_group().all_gather(padded, dim=-1)
            shard = Shard(0, shard.vocabulary, shard.vocabulary, 1, shard.exact)
        self._shard = shard
        return x[..., : shard.width]


def _is_plain(lm_head: Any) -> bool:
    """Is the head an ordinary matrix of floats?

    If a quantization leaves the head unquantized, its method is that of linear layers or of embeddings: both are plain.
    """
    weight = getattr(lm_head, "weight", None)
    plain_method = isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod)
    return plain_method and isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 2


def _shard_of(processor: Any, lm_head: Any, exact: bool) -> Shard:
    indices, vocabulary = lm_head.shard_indices, int(processor.org_vocab_size)
    first = int(indices.org_vocab_start_index)
    # the processor may have fewer ids than the matrix has rows; when serving, it removes the other rows
    width = max(0, min(int(indices.org_vocab_end_index), vocabulary) - first)
    return Shard(first, width, vocabulary, int(lm_head.tp_size), exact)


def _head_of(processor: Any, lm_head: Any, bias: Tensor | None, shard: Shard) -> Head | None:
    scale, cap = float(processor.scale), processor.soft_cap
    if not shard.exact or (scale != 1.0 and cap is not None):  # vLLM caps, then scales; a Head scales, then caps
        return None
    return Head(lm_head.weight, shard.width, bias, scale, None if cap is None else float(cap), shard.first_id)


# ── between ranks ────────────────────────────────────────────────────────────────────────────────────────────────────
Slice = TypeVar("Slice", bound=RowBlock)


def slices_of_ranks(part: Slice) -> list[Slice]:
    """Gathers what each rank computed from its slice of the vocabulary, in rank order."""
    return [part.like_from_words(words) for words in across_ranks(part.to_words())]


def across_ranks(tensor: Tensor) -> list[Tensor]:
    """Gathers an (n, c) tensor from each tensor-parallel rank, in rank order: a few numbers per row, never logits."""
    group = get_tp_group()
    gathered: Tensor = group.all_gather(tensor.contiguous(), dim=0)
    return list(torch.split(gathered, len(tensor)))


def largest_of_ranks(at_target: Tensor) -> Tensor:
    """Gives every rank the logits of all targets. Before, only the rank that has a target's id knows its logit."""
    return torch.stack(across_ranks(at_target)).amax(0)


def every_rank(mine: bool) -> bool:
    return not any_rank(not mine)


def any_rank(mine: bool) -> bool:
    group = get_tp_group()
    if group.world_size == 1:
        return mine
    flag = torch.full((1, 1), float(mine), device=group.device)
    return bool(torch.cat(across_ranks(flag)).amax() > 0)
