"""A reference as vLLM's workers read it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scoremode.engines.tensors import from_raw
from scoremode.head.matrix import Head
from scoremode.store.reference import Reference
from scoremode.values import Ints


class StoredStates:
    """A reference as a worker of vLLM sees it: rows by index, and the slice of the head that it needs."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._stored = Reference.open(folder, verify=False)  # already verified before its path is sent to a worker
        self._head: Head | None = None

    def rows(self, numbers: Ints, device: torch.device) -> Tensor:
        """States of these rows of the reference (n, d): consecutive rows are read together."""
        cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
        runs = [self._stored.rows(int(run[0]), len(run)) for run in np.split(numbers, cuts) if len(run)]
        return from_raw(np.concatenate(runs), self._stored.dtype).to(device)

    def head(self, device: torch.device, first_id: int, width: int) -> Head:
        """The ids ``first_id … first_id + width`` of the head; cached, because they are always the same."""
        if self._head is None or (self._head.first_id, self._head.vocabulary) != (first_id, width):
            stored, ids = self._stored, slice(first_id, first_id + width)
            bias = stored.head_bias()
            self._head = Head(
                weight=from_raw(stored.head_weight()[ids], stored.head_dtype).to(device),
                vocabulary=width,
                bias=None if bias is None else from_raw(bias[ids], stored.bias_dtype or "float32").to(device),
                scale=stored.scale,
                softcap=stored.softcap,
                first_id=first_id,
            )
        return self._head
