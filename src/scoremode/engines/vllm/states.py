"""A baseline as vLLM's workers see it: hidden states of rows, and the slice of its head that a worker needs."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from scoremode.engines.heads import HeadFile, heads_folder
from scoremode.engines.tensors import from_raw, send
from scoremode.head.matrix import Head
from scoremode.store.reference import Reference
from scoremode.values import Ints, Raw

logger = logging.getLogger("vllm.scoremode")


class Baseline(Protocol):
    """What KL is measured against."""

    name: str

    def rows(self, which: Any, device: torch.device) -> Tensor:
        """The states (n, d) of these rows."""

    def head(self, device: torch.device, first_id: int, width: int) -> Head | None:
        """The ids ``first_id … first_id + width`` of the head; None if it cannot be loaded."""


class StoredStates:
    """A reference in a folder: rows by their numbers."""

    def __init__(self, folder: str) -> None:
        self.name = folder
        self._stored = Reference.open(folder, verify=False)  # already verified before its path is sent to a worker
        self._head: Head | None = None

    def rows(self, which: Ints, device: torch.device) -> Tensor:
        """States of these rows of the reference (n, d): consecutive rows are read together."""
        cuts = np.flatnonzero(np.diff(which) != 1) + 1
        runs = [self._stored.rows(int(run[0]), len(run)) for run in np.split(which, cuts) if len(run)]
        return send(from_raw(np.concatenate(runs), self._stored.dtype), device)

    def head(self, device: torch.device, first_id: int, width: int) -> Head:
        """Cached, because the ids are always the same."""
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


class SentStates:
    """States that come with each request, and a head that was sent before and lies in the service's own folder.

    A client's head must not end the server: one that cannot be read, or for which the device has no memory, is None.
    """

    def __init__(self, digest: str, dtype: str) -> None:
        self.name, self._digest, self._dtype = f"{digest} {dtype}", digest, dtype
        self._head: Head | None = None

    def rows(self, which: Raw, device: torch.device) -> Tensor:
        return send(from_raw(which, self._dtype), device)

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
            weight=from_raw(stored.weight(first_id, width), stored.dtype).to(device),
            vocabulary=width,
            bias=None if bias is None else from_raw(bias, stored.bias_dtype).to(device),
            scale=stored.scale,
            softcap=stored.softcap,
            first_id=first_id,
        )
