"""Long columns that lie in a temporary file: arrays like any others, but their pages can be dropped and read again."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

LONG = 1 << 20  # rows; a shorter column stays in memory
EVERY = 64  # blocks between two calls of ``dropped``

Column = npt.NDArray[Any]


def mapped(blocks: Iterator[Column], rows: int) -> Column:
    """A column of numbers as a read-only array over a temporary file, which goes with the array."""
    first = next(blocks)
    with tempfile.TemporaryFile(prefix="scoremode-") as file:
        for block in chain([first], blocks):
            file.write(np.ascontiguousarray(block).data)
        file.flush()
        assert file.tell() == rows * first.dtype.itemsize, "blocks that do not add up to the column"
        return np.memmap(file, first.dtype, "r").view(np.ndarray)


def drop_pages(array: Column) -> None:
    """Give back the memory of a mapped array's pages; an array in memory stays as it is."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


def dropped(arrays: tuple[Column | None, ...], number: int) -> None:
    """Call this after each block that was read from mapped arrays: every so often, their pages go."""
    if number % EVERY == EVERY - 1:
        for array in arrays:
            if array is not None:
                drop_pages(array)
