"""A baseline in vLLM's workers: hidden states of rows, and the slice of its head that a worker needs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scoremode.core.engine.baseline import head_of
from scoremode.core.engine.distributions import from_raw
from scoremode.core.references.format import RAW_DTYPES
from scoremode.core.references.reader import Reference
from scoremode.head.matrix import Head
from scoremode.values import Ints, Raw


class PinnedBuffers:
    """Two pinned buffers, used in turn, from which states are copied to a device while it still computes the layers.

    A copy from other memory would wait for the layers, and pinning new memory for each batch would be as slow.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2
        self._sent: list[Any] = [None] * 2  # for each buffer, the event after the last copy from it
        self._turn = 0

    def rows(self, count: int, width: int, dtype: str, device: torch.device) -> Raw:
        """Returns an array (count, width) for raw states, to be filled and then given to ``send``."""
        raw = RAW_DTYPES[dtype]
        if device.type != "cuda":
            return np.empty((count, width), raw)
        self._turn = 1 - self._turn
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        size = count * width * raw.itemsize
        if self._buffers[self._turn].numel() < size:
            self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        room: Raw = self._buffers[self._turn][:size].numpy().view(raw).reshape(count, width)
        return room

    def send(self, rows: Raw, dtype: str, device: torch.device) -> Tensor:
        """Copies the filled rows to the device and returns them."""
        states = from_raw(rows, dtype).to(device, non_blocking=True)
        if device.type == "cuda":
            self._sent[self._turn] = torch.cuda.current_stream(device).record_event()
        return states


class WorkerReference:
    """A reference in a folder, which KL is measured against."""

    def __init__(self, folder: str) -> None:
        self.folder, self._buffers = folder, PinnedBuffers()
        self._head: Head | None = None
        self._stored = Reference.open(folder, verify=False)  # verified before its path is sent to a worker

    def head(self, device: torch.device, first_id: int, width: int) -> Head:
        """Returns the head for ``width`` ids from ``first_id`` on, cached per slice."""
        if self._head is None or (self._head.first_id, self._head.vocabulary) != (first_id, width):
            self._head = None
            stored = head_of(self._stored, slice(first_id, first_id + width))
            self._head = Head(
                weight=from_raw(stored.weight, stored.dtype).to(device),
                vocabulary=width,
                bias=None if stored.bias is None else from_raw(stored.bias, stored.bias_dtype).to(device),
                scale=stored.scale,
                softcap=stored.softcap,
                first_id=first_id,
            )
        return self._head

    def rows(self, which: Ints, device: torch.device) -> Tensor:
        """Reads the states (n, d) of these rows of the reference. Consecutive rows are read together."""
        stored = self._stored
        rows = self._buffers.rows(len(which), stored.width, stored.dtype, device)
        cuts = [0, *(np.flatnonzero(np.diff(which) != 1) + 1).tolist(), len(which)]
        for begin, end in pairwise(cuts):
            if begin < end:
                stored.rows(int(which[begin]), end - begin, into=rows[begin:end])
        return self._buffers.send(rows, stored.dtype, device)
