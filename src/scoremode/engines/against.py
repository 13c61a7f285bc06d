"""Hidden states and heads between engines, files and devices: raw bits on one side, tensors on the other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scoremode.engines.base import Baseline, StoredHead
from scoremode.errors import ModelError
from scoremode.head.matrix import Head
from scoremode.references import Raw, Reference
from scoremode.types import Ints, Window

Asked = tuple[int, Window]
"""A window and its index in the plan."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def to_raw(x: Tensor) -> Raw:
    """The numbers bit for bit; bfloat16 as uint16."""
    x = x.detach().cpu().contiguous()
    raw: Raw = x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    return raw


def from_raw(raw: Raw, dtype: str) -> Tensor:
    if not raw.flags.writeable:  # a mapped file: torch must not think that it may write there
        raw = raw.copy()
    x = torch.from_numpy(np.ascontiguousarray(raw))
    return x.view(torch.bfloat16) if dtype == "bfloat16" else x


def store_head(head: Head) -> StoredHead:
    dtype, bias_dtype = (str(t.dtype).removeprefix("torch.") for t in (head.weight, head.weight))
    bias = None
    if head.bias is not None:
        bias, bias_dtype = to_raw(head.bias), str(head.bias.dtype).removeprefix("torch.")
    return StoredHead(to_raw(head.weight), bias, dtype, bias_dtype, head.vocabulary, head.scale, head.softcap)


class StoredStates:
    """A reference as a worker of vLLM sees it: rows by their numbers, and the slice of the head that it needs."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._stored = Reference.open(folder, verify=False)  # whoever names it to a worker has verified it
        self._head: Head | None = None

    def rows(self, numbers: Ints, device: torch.device) -> Tensor:
        """States of these rows of the reference (n, d): runs of neighbours are read together."""
        cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
        runs = [self._stored.rows(int(run[0]), len(run)) for run in np.split(numbers, cuts) if len(run)]
        return from_raw(np.concatenate(runs), self._stored.dtype).to(device)

    def head(self, device: torch.device, first_id: int, width: int) -> Head:
        """The ids ``first_id … first_id + width`` of the head; kept, because they are always the same."""
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


class Against:
    """A baseline on the device of the candidate."""

    def __init__(self, baseline: Baseline, device: torch.device, vocabulary: int) -> None:
        stored = baseline.head
        if stored.vocabulary != vocabulary:  # never cut to the smaller: the rest would be probability left out
            raise ModelError(
                f"the baseline has {stored.vocabulary} ids and the candidate {vocabulary}",
                fix="compare models with one vocabulary",
            )
        self.baseline, self.device = baseline, device
        weight = from_raw(stored.weight, stored.dtype)
        if device.type == "cpu":
            weight = weight.float()  # exact, once: half-precision products on a CPU are slow and rounded
        bias = None if stored.bias is None else from_raw(stored.bias, stored.bias_dtype).to(device)
        self.head = Head(weight.to(device), stored.vocabulary, bias, stored.scale, stored.softcap)

    def states(self, asked: list[Asked]) -> Tensor:
        """The baseline's hidden states for the rows of these windows, one behind the other."""
        raw = [self.baseline.states(index, window) for index, window in asked]
        return torch.cat([from_raw(own, self.baseline.dtype).to(self.device) for own in raw])
