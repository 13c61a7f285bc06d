"""Arrays and numbers that every room shares: NumPy only, frozen, with shapes in comments."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

Ints = npt.NDArray[np.int64]

Ids = npt.NDArray[np.int32]

Bools = npt.NDArray[np.bool_]

Raw = npt.NDArray[Any]
"""Numbers bit for bit: float16 and float32 as NumPy has them, bfloat16 as uint16 bit patterns."""

BLOCK = 1 << 14
"""Targets that are worked on at a time, so that what is held at once does not grow with the text."""


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, no longer writable: values here are shared between threads, engines and caches."""
    array.setflags(write=False)
    return array


class MappedFile(mmap.mmap):
    """A file in memory, read only: the system reads its pages when they are used, and may drop them."""


def let_go(array: npt.NDArray[Any] | None) -> None:
    """Drop the pages of the mapped file that an array lies in from this process's memory; they are read again if used.

    Arrays that do not lie in a MappedFile are left alone.
    """
    base: Any = array
    while base is not None and not isinstance(base, MappedFile):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    if base is not None and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


PART = 1 << 20
"""Numbers of a long column that are looked at together."""


def in_parts(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """A long column part by part; a mapped one is not in memory as a whole.

    >>> [part.tolist() for part in in_parts(np.arange(3))]
    [[0, 1, 2]]
    """
    for begin in range(0, len(array), PART):
        yield array[begin : begin + PART]
        let_go(array)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its uncertainty.

    ``stderr`` is one standard error, None if there are too few groups to know it. ``n`` counts targets, ``groups``
    the independent pieces of text that the error was computed from. ``low`` and ``high`` are the 95 % bounds, by
    Student's t with ``freedom`` degrees of freedom.

    >>> Estimate(12.5, 0.25, 1000, 40)
    12.5 ± 0.25
    """

    value: float
    stderr: float | None
    n: int
    groups: int
    freedom: float | None = None
    low: float | None = None
    high: float | None = None

    def __repr__(self) -> str:
        error = "?" if self.stderr is None else f"{self.stderr:.3g}"
        return f"{self.value:.6g} ± {error}"

    def __float__(self) -> float:
        return self.value

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> Estimate:
        """An estimate as a manifest keeps it: no value means that it was infinite."""
        value = math.inf if stored["value"] is None else stored["value"]
        names = ("stderr", "n", "groups", "freedom", "low", "high")
        return Estimate(value, *(stored[name] for name in names))
