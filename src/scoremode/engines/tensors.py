"""Hidden states, heads and columns between files and devices: plain numbers on one side, tensors on the other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from scoremode.engines.base import StoredHead
from scoremode.head.definition import Columns
from scoremode.head.matrix import Head
from scoremode.plan.windows import Answers, Window
from scoremode.scores.schema import BUILT_IN
from scoremode.values import Ints, Raw

IndexedWindow = tuple[int, Window]
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


def split_columns(columns: Columns, ends: Ints) -> list[Answers]:
    """Columns of several windows as one Answers each: the only copy from the device, a few numbers per target."""
    found = {
        column.name: getattr(columns, column.name).to(getattr(torch, column.dtype)).cpu().numpy()
        for column in BUILT_IN.scores
    }
    starts = np.concatenate([[0], ends[:-1]])
    return [
        Answers.of({name: column[a:b] for name, column in found.items()}) for a, b in zip(starts, ends, strict=True)
    ]


def loaded_head(stored: StoredHead, device: torch.device) -> Head:
    """A stored head on a device."""
    weight = from_raw(stored.weight, stored.dtype)
    if device.type == "cpu":
        weight = weight.float()  # exact, once: half-precision products on a CPU are slow and rounded
    bias = None if stored.bias is None else from_raw(stored.bias, stored.bias_dtype).to(device)
    return Head(weight.to(device), stored.vocabulary, bias, stored.scale, stored.softcap)
