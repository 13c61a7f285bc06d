"""The last matrix of a model, or one rank's slice of it, and the bias, scale and cap that follow its product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scoremode.head.precision import full_float32

SHALLOW = 1536  # up to this width, reducing a tile of logits takes about as long as computing the tile


@dataclass(frozen=True, slots=True)
class Head:
    """Hidden states (n, d) -> logits of the ids ``first_id .. first_id + vocabulary``.

    ``vocabulary`` is the number of real rows: rows after it are padding and get no probability. ``first_id`` is not 0
    if the matrix is a slice of a larger one, as with tensor parallelism.
    """

    weight: Tensor  # (padded vocabulary, d)
    vocabulary: int
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    first_id: int = 0

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 logits (n, vocabulary), accumulated in float32 for any dtype of the weights."""
        return self.shaped(product_in_float32(hidden, self.weight[: self.vocabulary]))

    def shaped(self, x: Tensor) -> Tensor:
        """Applies bias, scale and cap in place to a product (n, vocabulary) in float32."""
        if self.bias is not None:
            x += self.bias[: self.vocabulary].float()
        if self.scale != 1.0:
            x *= self.scale
        if self.softcap is not None:
            x.div_(self.softcap).tanh_().mul_(self.softcap)
        return x

    def within(self, vocabulary: int) -> Head:
        """Returns the part of the slice whose ids are below ``vocabulary``."""
        width = max(0, min(self.vocabulary, vocabulary - self.first_id))
        return Head(self.weight, width, self.bias, self.scale, self.softcap, self.first_id)


def product_in_float32(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns ``hidden @ weight.T`` in float32, even if the inputs have a lower precision."""
    if weight.is_cuda and hidden.dtype == weight.dtype and weight.dtype != torch.float32:
        # tensor cores accumulate in float32; out_dtype returns that sum instead of rounding it to bfloat16
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    with full_float32():
        if weight.dtype == torch.float32:
            return torch.mm(hidden.float(), weight.T)
        return torch.cat([torch.mm(hidden.float(), block.float().T) for block in torch.split(weight, 8192)], dim=1)
