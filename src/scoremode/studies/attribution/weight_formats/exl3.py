"""EXL3: tiles of 16 × 16 weights, each a ring of bits, rotated by Hadamard matrices of 128 on both sides.

A tile of K bits per weight is a ring of 256 · K bits. Its weight number i is coded by the 16 bits of the ring that end
at bit (i + 1) · K: a formula, one of three, turns such a state into a number. Neighbours share 16 - K bits. Half
numbers of bits alternate: 2.5 is 2, 3, 2, 3, …

    weight = svh · H (decoded tiles)ᵀ H · suh        H: Hadamard matrices of 128 along the diagonal, divided by √128

Files store (input, output), the transpose of Transformers, with both sizes filled up to a multiple of 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from scoremode.core.models.safetensors import TRELLIS, StoredTensor
from scoremode.studies.attribution.weight_formats.stored import ModuleTensors, PlainTensors, Shape

if TYPE_CHECKING:
    import torch

TILE = 16  # weights along each side
BLOCK = 128  # of the Hadamard matrices
STATES = 1 << 16
DECODED_TOGETHER = 1 << 22  # weights
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}  # of two of the formulas, stored beside the tiles
FLOATS = ("F16", "BF16", "F32")
PLAIN = "3inst"  # the formula without a stored number
WIDTHS = (*range(16, 129, 16), 24, 40, 56)  # words of a tile: 1 to 8 bits, 1.5, 2.5 and 3.5


class Exl3Tensors(ModuleTensors):
    """An EXL3 checkpoint. ``shapes`` has the sizes before they were filled up, by name."""

    leaves, marks = (TRELLIS, "suh", "svh", *MULTIPLIERS), (TRELLIS,)

    def __init__(self, label: str, plain: PlainTensors, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        super().__init__(label, plain)

    def _decoded(self, module: str, shape: Shape) -> torch.Tensor:
        import torch

        outputs, inputs = shape
        formula = next((name for name in MULTIPLIERS if f"{module}.{name}" in self.plain.tensors), PLAIN)
        trellis, by_input, by_output = (self.plain.raw(f"{module}.{leaf}") for leaf in (TRELLIS, "suh", "svh"))
        weight = torch.empty(inputs, outputs)
        rows = BLOCK // TILE * max(1, DECODED_TOGETHER // (BLOCK * TILE * trellis.shape[1]))
        for begin in range(0, len(trellis), rows):
            here = slice(begin * TILE, (begin + rows) * TILE)
            block = rotated(decoded_tiles(trellis[begin : begin + rows], formula).float())
            block *= by_input.float()[here, None]
            weight[here] = (block * by_output.float())[: inputs - here.start, :outputs]
        return weight.T.contiguous()

    def _described(self, module: str, parts: Mapping[str, StoredTensor]) -> tuple[Shape, str]:
        shape, marks = parts[TRELLIS].shape, [leaf for leaf in MULTIPLIERS if leaf in parts]
        self.require(len(shape) == 3 and min(shape) > 0 and not any(n * TILE % BLOCK for n in shape[:2]), module)
        rows, columns, width = shape
        fits = (
            f"{module}.weight" not in self.plain.tensors
            and width in (WIDTHS if "mul1" in parts else WIDTHS[:8])
            and parts[TRELLIS].dtype in ("I16", "U16")
            and len(marks) <= 1
            and all(parts[leaf].dtype in ("I32", "U32") and parts[leaf].size == 1 for leaf in marks)
        )
        for leaf, size in (("suh", rows * TILE), ("svh", columns * TILE)):
            fits = fits and leaf in parts and parts[leaf].shape == (size,) and parts[leaf].dtype in FLOATS
        for leaf in marks if fits else ():  # another formula is not guessed
            fits = int(self.plain.raw(f"{module}.{leaf}")) & 0xFFFFFFFF == MULTIPLIERS[leaf]
        self.require(fits, module)
        sizes, wanted = (columns * TILE, rows * TILE), self._shapes.get(f"{module}.weight", ())
        if len(wanted) == 2 and all(0 <= sizes[i] - wanted[i] < BLOCK for i in (0, 1)):
            sizes = wanted[0], wanted[1]
        return sizes, f"EXL3 {width / 16:g} bit"


def decoded_tiles(trellis: torch.Tensor, formula: str) -> torch.Tensor:
    """Tiles (rows, columns, words of 16 bits) as one matrix in float16, before it is rotated: (16 rows, 16 columns)."""
    import torch

    rows, columns, width = trellis.shape
    # A ring's bits go from the highest to the lowest of 32-bit words, whose lower half is stored first.
    halves = trellis.numpy().view(np.uint16).reshape(rows, columns, -1, 2)
    ring = halves[..., ::-1].reshape(rows, columns, width).astype(np.uint32)
    pairs = (ring << 16) | np.roll(ring, -1, axis=-1)  # 32 bits from every 16th on
    ends = np.arange(1, 257) * width // 16  # for half numbers of bits, odd weights have the bit more
    begins = (ends - 16) % (16 * width)
    states = np.take(pairs, begins // 16, axis=-1) >> (16 - begins % 16).astype(np.uint32)
    numbers = torch.from_numpy(np.take(codebook(formula), states.astype(np.uint16)))
    # A tile's weights are in the order of a tensor core: (column % 8, row % 8 // 2, column // 8, row // 8, row % 2)
    parts = numbers.reshape(rows, columns, 8, 4, 2, 2, 2)
    return parts.permute(0, 5, 3, 6, 1, 4, 2).reshape(rows * TILE, columns * TILE)


@lru_cache
def codebook(formula: str) -> npt.NDArray[np.float16]:
    """The number, in float16, of each state of 16 bits."""
    state = np.arange(STATES, dtype=np.uint32)
    if formula == "mul1":  # the sum of four bytes, which is nearly normal; one multiplication and addition in float16
        total = (state * np.uint32(MULTIPLIERS["mul1"])).view(np.uint8).reshape(-1, 4).sum(axis=1, dtype=np.int64)
        scale, shift = np.array([0x1EEE, 0xC931], np.uint16).view(np.float16).astype(np.float64)
        return np.asarray((1024 + total) * scale + shift, np.float16)
    if formula == "mcg":
        mixed = state * np.uint32(MULTIPLIERS["mcg"])
    else:
        mixed = state * np.uint32(89226354) + np.uint32(64248484)
    halves = ((mixed & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16).reshape(-1, 2)
    return np.asarray(halves.astype(np.float64).sum(axis=1), np.float16)


def rotated(weights: torch.Tensor) -> torch.Tensor:
    """A matrix with blocks of 128 rows and of 128 columns multiplied by the Hadamard matrix."""
    import torch
    from scipy.linalg import hadamard

    matrix: torch.Tensor = torch.from_numpy(hadamard(BLOCK)).float() / BLOCK**0.5
    rows, columns = weights.shape
    by_rows = (matrix @ weights.reshape(-1, BLOCK, columns)).reshape(rows, -1, BLOCK)
    return (by_rows @ matrix).reshape(rows, columns)
