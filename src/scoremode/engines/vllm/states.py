"""A baseline as vLLM's workers see it: hidden states of rows, and the slice of its head that a worker needs."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from scoremode.engines.heads import HeadFile, heads_folder
from scoremode.engines.tensors import from_raw
from scoremode.head.matrix import Head
from scoremode.references.format import RAW_DTYPES
from scoremode.references.reader import Reference
from scoremode.values import Ints, Raw

logger = logging.getLogger("vllm.scoremode")


class Baseline(Protocol):
    """What KL is measured against."""

    name: str

    def rows(self, which: Any, device: torch.device) -> Tensor:
        """The states (n, d) of these rows."""

    def head(self, device: torch.device, first_id: int, width: int) -> Head | None:
        """The ids ``first_id … first_id + width`` of the head; None if it cannot be loaded."""


class PinnedBuffers:
    """Two buffers, used in turn, from which states go to a device while it still computes the layers.

    A copy from other memory would wait for the layers, and pinning new memory for each batch would take as long.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2
        self._sent: list[Any] = [None] * 2  # when the copy from each buffer is done
        self._turn = 0

    def rows(self, count: int, width: int, dtype: str, device: torch.device) -> Raw:
        """Room for raw states (count, width), to be filled and then sent."""
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
        """The filled rows on the device."""
        found = from_raw(rows, dtype).to(device, non_blocking=True)
        if device.type == "cuda":
            self._sent[self._turn] = torch.cuda.current_stream(device).record_event()
        return found


class StoredStates:
    """A reference in a folder: rows by their numbers."""

    def __init__(self, folder: str) -> None:
        self.name = folder
        self._stored = Reference.open(folder, verify=False)  # already verified before its path is sent to a worker
        self._head: Head | None = None
        self._buffers = PinnedBuffers()

    def rows(self, which: Ints, device: torch.device) -> Tensor:
        """States of these rows of the reference (n, d): consecutive rows are read together."""
        stored = self._stored
        rows = self._buffers.rows(len(which), stored.width, stored.dtype, device)
        cuts = [0, *(np.flatnonzero(np.diff(which) != 1) + 1).tolist(), len(which)]
        for begin, end in pairwise(cuts):
            if begin < end:
                stored.rows(int(which[begin]), end - begin, into=rows[begin:end])
        return self._buffers.send(rows, stored.dtype, device)

    def head(self, device: torch.device, first_id: int, width: int) -> Head:
        """Cached, because the ids are always the same."""
        if self._head is None or (self._head.first_id, self._head.vocabulary) != (first_id, width):
            stored, ids = self._stored, slice(first_id, first_id + width)
            bias = stored.head_bias()
            self._head = Head(
                weight=from_raw(stored.head_weight()[ids], stored.head.dtype).to(device),
                vocabulary=width,
                bias=None if bias is None else from_raw(bias[ids], stored.head.bias_dtype or "float32").to(device),
                scale=stored.head.scale,
                softcap=stored.head.softcap,
                first_id=first_id,
            )
        return self._head


class SentStates:
    """States that come with each request, and a head that was sent before and lies in the service's own folder.

    A client's head must not end the server: one that cannot be read, or for which the device has no memory, is None.
    """

    def __init__(self, digest: str, dtype: str) -> None:
        self.name, self._digest, self._dtype = f"{digest} {dtype}", digest, dtype
        self._head: Head | None = None
        self._buffers = PinnedBuffers()

    def rows(self, which: Raw, device: torch.device) -> Tensor:
        rows = self._buffers.rows(len(which), which.shape[1], self._dtype, device)
        rows[:] = which
        return self._buffers.send(rows, self._dtype, device)

    def head(self, device: torch.device, first_id: int, width: int) -> Head | None:
        if self._head is None or (self._head.first_id, self._head.vocabulary) != (first_id, width):
            self._head = None
            try:
                self._head = self._load(device, first_id, width)
            except (OSError, ValueError, MemoryError, RuntimeError) as error:
                logger.warning("scoremode: the head of a baseline cannot be loaded: %s", error)
        return self._head

    def _load(self, device: torch.device, first_id: int, width: int) -> Head:
        stored = HeadFile.open(heads_folder() / self._digest)
        bias = stored.bias(first_id, width)
        return Head(
            weight=from_raw(stored.weight(first_id, width), stored.header.dtype).to(device),
            vocabulary=width,
            bias=None if bias is None else from_raw(bias, stored.header.bias_dtype or "").to(device),
            scale=stored.header.scale,
            softcap=stored.header.softcap,
            first_id=first_id,
        )
