"""Answers as lines of int32 words, one line per row: how they cross the border of a process or a machine.

Floats are stored by their bits, so that ids and ranks stay exact and nothing is rounded on the way:

    logprob × k | rank × k | entropy | top | top_logprob | KL in float64, where it was asked for
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scoremode.plan.windows import Answers
from scoremode.values import Floats

KL_WORDS = 2  # a divergence is one float64
Words = npt.NDArray[np.int32]


def width(k: int) -> int:
    """Words per line of an answer with k targets."""
    return 2 * k + 3


def unpack(words: Words, k: int) -> Answers:
    """Answers from lines of int32 words (m, width)."""
    words = np.ascontiguousarray(words)
    floats = words.view(np.float32)
    return Answers(
        logprob=floats[:, :k].astype(np.float64),
        rank=words[:, k : 2 * k].astype(np.int64),
        entropy=floats[:, 2 * k].astype(np.float64),
        top=words[:, 2 * k + 1].copy(),
        top_logprob=floats[:, 2 * k + 2].astype(np.float64),
    )


def divergences(words: Words) -> Floats:
    """KL (m,) from the words (m, KL_WORDS) that follow the lines."""
    return np.ascontiguousarray(words).view(np.float64)[:, 0].copy()
