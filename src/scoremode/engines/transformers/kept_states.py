"""Hidden states that are kept between the layers of a model: on its GPU, in memory, or in a mapped file.

The place is chosen by size before anything is computed, and whether logits fit beside the states; ``place.words`` says
it to the user.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from scoremode.core.cache.units import size_words
from scoremode.core.disk.files import write_at
from scoremode.core.engine.distributions import from_raw, to_raw
from scoremode.core.free_memory import available
from scoremode.errors import EngineError
from scoremode.head.budget import free_on

SHARE = 0.5  # the most of the free memory that states may take; a swap needs the rest
LOGITS_SHARE = 0.25  # the most of a GPU's free memory that states and logits may take together, if logits are kept
LOGITS_SHARE_OF_MEMORY = 0.125  # replicas on one machine see the same free memory


@dataclass(frozen=True, slots=True)
class StatesPlace:
    """Where states are kept: ``gpu``, ``memory`` or ``file``, and how many bytes there will be, about."""

    kind: str
    size: int
    logits: int = 0  # bytes of logits on the model's device; 0: they are computed for every swap

    @property
    def words(self) -> str:
        where = {"gpu": "on the GPU", "memory": "in memory", "file": f"in a file in {tempfile.gettempdir()}"}
        logits = f"; the baseline's logits: about {size_words(self.logits)}" if self.logits else ""
        return f"states between layers: about {size_words(self.size)}, kept {where[self.kind]}{logits}"


def choose_place(
    size: int, device: torch.device, logits: int = 0, *, memory: int | None = None, disk: int | None = None
) -> StatesPlace:
    """Chooses where ``size`` bytes of states go, and whether so many bytes of logits are kept, too.

    EngineError if there is no room for the states. ``memory`` and ``disk`` are the free bytes, if the caller knows
    better than the system.
    """
    place = _place_of_states(size, device, memory, disk)
    room = LOGITS_SHARE_OF_MEMORY * ((available() if memory is None else memory) or 0)
    if device.type == "cuda":
        room = LOGITS_SHARE * free_on(device)
    beside = place.size if place.kind == ("gpu" if device.type == "cuda" else "memory") else 0
    return replace(place, logits=logits) if beside + logits <= room else place


def _place_of_states(size: int, device: torch.device, memory: int | None, disk: int | None) -> StatesPlace:
    if device.type == "cuda" and size <= SHARE * free_on(device):
        return StatesPlace("gpu", size)
    memory = available() if memory is None else memory
    if memory is None or size <= SHARE * memory:
        return StatesPlace("memory", size)
    disk = shutil.disk_usage(tempfile.gettempdir()).free if disk is None else disk
    if size <= disk:
        return StatesPlace("file", size)
    raise EngineError(
        f"the states between layers take about {size_words(size)}, and there is no room for them",
        fix="give fewer tokens (--max-windows N), or set TMPDIR to a larger disk",
    )


class KeptStates:
    """States by key. What was put is what comes back, bit for bit, on the model's device."""

    def __init__(self, place: StatesPlace, device: torch.device) -> None:
        self.place, self.device = place, device
        self._held: dict[Hashable, Tensor] = {}
        self._file = tempfile.TemporaryFile(prefix="scoremode-states-") if place.kind == "file" else None  # noqa: SIM115
        self._end = 0
        self._where: dict[Hashable, tuple[int, tuple[int, ...], np.dtype[np.generic], str]] = {}

    def put(self, key: Hashable, states: Tensor) -> None:
        if self._file is None:
            # a copy: a layer may write into what it is given
            self._held[key] = states.detach().to("cpu" if self.place.kind == "memory" else self.device, copy=True)
            return
        raw, dtype = to_raw(states), str(states.dtype).removeprefix("torch.")
        self._where[key] = (self._end, raw.shape, raw.dtype, dtype)
        write_at(self._file.fileno(), np.ascontiguousarray(raw).data.cast("B"), self._end)
        self._end += raw.nbytes

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held or key in self._where

    def get(self, key: Hashable) -> Tensor:
        """A copy that the caller may change."""
        if self._file is None:
            return self._held[key].to(self.device, copy=True)
        offset, shape, kind, dtype = self._where[key]
        mapped = np.memmap(self._file, kind, "r", offset, shape) if np.prod(shape) else np.zeros(shape, kind)
        return from_raw(np.array(mapped), dtype).to(self.device)

    def clear(self) -> None:
        """Gives back the memory or the file."""
        self._held.clear()
        self._where.clear()
        if self._file is not None:
            self._file.close()
