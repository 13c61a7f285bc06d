"""The table and the page of a profile by layer, and the table of routes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scoremode.studies.attribution.depth_profile import DepthPoint, DepthProfile
from scoremode.studies.attribution.page import render_blocks
from scoremode.studies.attribution.routing import routing_of
from scoremode.studies.attribution.tables import depth_profile_blocks, routing_blocks
from scoremode.values import Estimate
from tests.reports.test_table import drawn


def estimate(value: float) -> Estimate:
    return Estimate(value, value / 20, 100, 8)


def profile(own: list[float], **changes: Any) -> DepthProfile:
    places = tuple(
        DepthPoint(
            "embedding" if i == 0 else f"layer {i - 1}",
            estimate(0.0 if i == 0 else 0.01 * i),
            estimate(1 - 0.001 * i),
            estimate(value),
        )
        for i, value in enumerate(own)
    )
    found = DepthProfile(
        names=("org/base", "<b>served</b>"),
        engines=("transformers, float32, cpu", "llamacpp, Q8_0, cpu"),
        places=places,
        tokens=100,
        windows=4,
        groups="documents",
    )
    return replace(found, **changes)


HEALTHY = [0.0, 0.01, 0.012, 0.011]
BROKEN = [0.0, 0.01, 0.5, 0.011]


def printed(parts: Sequence[Any]) -> str:
    return drawn(parts, width=140)


def test_table_marks_the_layer_that_is_out_of_line() -> None:
    text = printed(depth_profile_blocks(profile(BROKEN)))
    assert "layer 1 ◀" in text
    assert "layer 1 is out of line: its own error is 0.5" in text
    assert "before the final norm: 100 tokens of 4 windows, errors over documents" in text
    healthy = printed(depth_profile_blocks(profile(HEALTHY)))
    assert "◀" not in healthy
    assert "no layer is out of line" in healthy


@pytest.mark.parametrize("own", [HEALTHY, BROKEN, [float("nan"), float("nan")]])
def test_page_is_escaped_and_has_the_table_whatever_the_numbers(own: list[float]) -> None:
    page = render_blocks("a <b>title</b>", "words", depth_profile_blocks(profile(own, notes=("a note",))))
    assert "<b>" not in page
    assert "&lt;b&gt;served&lt;/b&gt;" in page
    assert "A note" in page


def test_table_of_routes() -> None:
    a = np.zeros((2, 10, 1), np.int16)
    b = a.copy()
    b[1, :5] = 1
    kl = np.where(np.arange(10) < 5, 3.0, 1.0)
    found = routing_of(("b", "c"), ("layer 0", "layer 1"), (a, b), kl, np.arange(10), of_experts=4)
    text = printed(routing_blocks(found))
    assert re.search(r"layer 1 +50\.00% ± 16\.67%|layer 1 +50% ± 17%", text)
    assert "of the tokens have other experts in at least one layer; they hold 75" in text
