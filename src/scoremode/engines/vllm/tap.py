"""Logits of a vLLM model before they are rounded, gathered or copied: this rank's own part, in float32.

Every causal model of vLLM ends in ``compute_logits``, and that ends in a ``LogitsProcessor``, which projects, gathers
the shards, cuts the padding, caps and scales. The tap replaces only the first three steps, on the processors of one
model object. Whatever a model does around them (a norm before, a bias, a cap, a scale) stays the model's own code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from scoremode.head.matrix import Head, product_in_float32


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the vocabulary this rank projects, and how."""

    first_id: int
    width: int  # real ids: the padding behind them is cut off
    vocabulary: int  # of the whole model
    ranks: int  # 1: this rank sees the whole vocabulary
    exact: bool  # accumulated and kept in float32

    @property
    def columns(self) -> int:
        """Of the widest shard. Ranks must cut their rows alike, or their exchanges do not match: never ``width``."""
        return -(-self.vocabulary // self.ranks)


class _Reached(Exception):  # noqa: N818  # not an error
    """Ends ``compute_logits`` where the head's matrix would be applied, and says to what."""

    def __init__(self, hidden: Tensor, head: Head | None, shard: Shard) -> None:
        super().__init__()
        self.hidden, self.head, self.shard = hidden, head, shard


class Tap:
    """A model's head, a few rows at a time.

    ``exact`` asks for logits kept in float32. A quantized head cannot give them: then, and where exactness was not
    asked for, the logits are those that the serving kernel gives.
    """

    def __init__(self, model: Any, exact: bool) -> None:
        self._model = model
        self._exact = exact
        self._mode = "stock"  # "shard", "gather" or "matrix" while we ask; a worker is single-threaded
        self._shard: Shard | None = None
        processors = [m for m in model.modules() if isinstance(m, LogitsProcessor)]
        for processor in processors:
            # on the object, not the class: other models in this process keep their own
            processor._get_logits = partial(self._project, processor, processor._get_logits)

    def logits(self, hidden: Tensor, gather: bool) -> tuple[Tensor, Shard]:
        """float32 logits of these rows (n, shard.width), and which ids they belong to."""
        self._mode, self._shard = ("gather" if gather else "shard"), None
        try:
            x = self._model.compute_logits(hidden)
        finally:
            self._mode = "stock"
        if self._shard is None:  # a model that projects on its own, past any LogitsProcessor
            if x is None or get_tp_group().world_size > 1:
                raise RuntimeError(
                    f"scoremode cannot read the logits of {type(self._model).__name__} under tensor parallelism: "
                    "it does not use vLLM's LogitsProcessor; use --tensor-parallel-size 1"
                )
            self._shard = Shard(0, x.shape[-1], x.shape[-1], 1, exact=False)
        return x.float(), self._shard

    def matrix(self, hidden: Tensor) -> tuple[Tensor, Head, Shard] | None:
        """The head as a matrix, and the rows that it is applied to (a model may norm them before); None if it is not.

        What a model does to logits afterwards in code of its own is not seen here: ``ScorePooler`` makes sure.
        """
        self._mode = "matrix"
        try:
            self._model.compute_logits(hidden)
        except _Reached as found:
            return None if found.head is None else (found.hidden, found.head, found.shard)
        finally:
            self._mode = "stock"
        return None

    def served_logits(self, hidden: Tensor) -> Tensor | None:
        """What ``compute_logits`` gives when vLLM serves: whole, in the model's dtype; None on ranks without."""
        x: Tensor | None = self._model.compute_logits(hidden)
        return x

    def describe(self, hidden: Tensor) -> Shard:
        """The shard, learnt from one row."""
        return self.logits(hidden[:1], gather=False)[1]

    def _project(
        self, processor: Any, stock: Any, hidden: Tensor, lm_head: Any, bias: Tensor | None, *rest: Any
    ) -> Tensor | None:
        """Stands in for ``LogitsProcessor._get_logits`` of one processor."""
        if self._mode == "stock":
            served: Tensor | None = stock(hidden, lm_head, bias, *rest)
            return served
        shard = _shard_of(processor, lm_head, self._exact and _is_plain(lm_head))
        if self._mode == "matrix":
            raise _Reached(hidden, _head_of(processor, lm_head, bias, shard), shard)
        if shard.exact:
            x = _exact_product(hidden, lm_head, bias, shard.width)
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

    A quantization that leaves the head alone hands it a method for linear layers, else for embeddings: both are plain.
    """
    weight = getattr(lm_head, "weight", None)
    plain_method = isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod)
    return plain_method and isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 2


def _shard_of(processor: Any, lm_head: Any, exact: bool) -> Shard:
    indices, vocabulary = lm_head.shard_indices, int(processor.org_vocab_size)
    first = int(indices.org_vocab_start_index)
    # the processor may know of fewer ids than the matrix has rows for: it cuts the rest off when it serves
    width = max(0, min(int(indices.org_vocab_end_index), vocabulary) - first)
    return Shard(first, width, vocabulary, int(lm_head.tp_size), exact)


def _head_of(processor: Any, lm_head: Any, bias: Tensor | None, shard: Shard) -> Head | None:
    scale, cap = float(processor.scale), processor.soft_cap
    if not shard.exact or (scale != 1.0 and cap is not None):  # vLLM caps first and scales then, a Head the other way
        return None
    return Head(lm_head.weight, shard.width, bias, scale, None if cap is None else float(cap), shard.first_id)


def _exact_product(hidden: Tensor, lm_head: Any, bias: Tensor | None, width: int) -> Tensor:
    x = product_in_float32(hidden, lm_head.weight[:width])
    return x if bias is None else x.add_(bias[:width].float())
