"""llama.cpp's file of base logits, written longhand: one row, one number at a time, in float32, with struct."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scoremode.studies.kld.file import KldFile

F = np.float32
Logits = npt.NDArray[np.float32]


def nearest(value: np.float32) -> int:
    """Add 1.5 · 2^23, so that the sum has no room for fractions, and read the low bits of its mantissa."""
    (bits,) = struct.unpack("<i", struct.pack("<f", F(value + F(12582912.0))))
    return int((bits & 0x007FFFFF) - 0x00400000)


def record(row: Logits) -> bytes:
    """One distribution, as ``llama-perplexity`` writes it."""
    largest = F(row.max())
    least = max(F(row.min()), F(largest - F(16)))
    total = 0.0
    for x in row:
        total += float(F(math.exp(float(F(x - largest)))))
    log_sum = F(math.log(total))
    scale = F(F(largest - least) / F(65535))
    lowest = F(F(least - largest) - log_sum)
    codes = [0] * len(row)
    if scale:
        inverse = F(F(1) / scale)
        codes = [nearest(F(inverse * F(x - least))) if x > least else 0 for x in row]
    padding = [0] * (len(row) % 2)
    return struct.pack("<ff", scale, lowest) + struct.pack(f"<{len(codes + padding)}H", *codes, *padding)


def write_file(
    path: Path, tokens: npt.NDArray[Any], vocabulary: int, logits_of: Callable[[int, int], Logits], context: int
) -> Path:
    """A file over ``tokens`` (n,); ``logits_of(chunk, row)`` is asked for the rows that are kept."""
    chunks = len(tokens) // context
    parts = [b"_logits_", struct.pack("<iii", context, vocabulary, chunks)]
    parts.append(np.asarray(tokens[: chunks * context], "<i4").tobytes())
    for chunk in range(chunks):
        parts += [record(logits_of(chunk, row)) for row in range(context // 2, context - 1)]
    path.write_bytes(b"".join(parts))
    return path


def random_logits(n: int, vocabulary: int, seed: int = 0, size: float = 4.0) -> Logits:
    found: Logits = (np.random.default_rng(seed).standard_normal((n, vocabulary)) * size).astype(np.float32)
    return found


def log_p(path: Path, chunk: int, row: int) -> tuple[list[float], list[int]]:
    """Log-probabilities and codes of one record, read with struct alone."""
    data = path.read_bytes()
    context, vocabulary, chunks = struct.unpack_from("<iii", data, 8)
    words = vocabulary + vocabulary % 2 + 4
    at = 20 + 4 * chunks * context + 2 * words * (chunk * (context - 1 - context // 2) + row)
    scale, lowest = struct.unpack_from("<ff", data, at)
    codes = list(struct.unpack_from(f"<{vocabulary}H", data, at + 8))
    return [scale * code + lowest for code in codes], codes


def log_probabilities(file: KldFile, chunk: int) -> npt.NDArray[np.float64]:
    """The same for a whole chunk, from its mapped records: (rows, vocabulary)."""
    records = file.records(chunk)
    floats = np.ascontiguousarray(records[:, :4]).view("<f4").astype(np.float64)
    return floats[:, :1] * records[:, 4 : 4 + file.layout.vocabulary] + floats[:, 1:]


def kl_longhand(stored: list[float], logits: npt.NDArray[Any]) -> float:
    """The divergence of llama.cpp's reader, in float64."""
    x = [float(value) for value in logits]
    log_sum = max(x) + math.log(sum(math.exp(value - max(x)) for value in x))
    return sum(math.exp(p) * (p - (q - log_sum)) for p, q in zip(stored, x, strict=True) if p > -16.0)
