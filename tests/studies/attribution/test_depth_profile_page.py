"""The table and the page of a profile by layer, and the table of routes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from scoremode.studies.attribution.layer_profile import DepthPoint, DepthProfile
from scoremode.studies.attribution.page import render_blocks
from scoremode.studies.attribution.routing import routing_of
from scoremode.studies.attribution.tables import depth_profile_blocks, routing_blocks
from scoremode.values import Estimate
from tests.reports.test_table import drawn


def profile(own: list[float]) -> DepthProfile:
    names = ("embedding", "layer 0", "layer 1", "layer 2")
    error, cosine = Estimate(0.01, 0.001, 100, 8), Estimate(0.99, 0.01, 100, 8)
    places = tuple(
        DepthPoint(name, error, cosine, Estimate(value, value / 20, 100, 8))
        for name, value in zip(names, own, strict=True)
    )
    engines = ("transformers, float32, cpu", "llamacpp, Q8_0, cpu")
    return DepthProfile(("org/base", "<b>served</b>"), engines, places, 100, 4, "documents", ("a note",))


@pytest.mark.parametrize("broken", [0.012, 0.5, float("nan")])
def test_table_marks_the_layer_that_is_out_of_line_and_the_page_is_escaped(broken: float) -> None:
    blocks = depth_profile_blocks(profile([0.0, 0.01, broken, 0.011]))
    text = drawn(blocks, width=140)
    assert ("layer 1 ◀" in text) == (broken != 0.012)
    assert ("layer 1 is out of line: its own error is 0.5" in text) == (broken == 0.5)
    assert "before the final norm: 100 tokens of 4 windows, errors over documents" in text
    page = render_blocks("a <b>title</b>", "words", blocks, "about")
    assert "<b>" not in page
    assert "&lt;b&gt;served&lt;/b&gt;" in page
    assert "A note" in page


def test_table_of_routes() -> None:
    a = np.zeros((2, 10, 1), np.int16)
    b = a.copy()
    b[1, :5] = 1
    kl = np.where(np.arange(10) < 5, 3.0, 1.0)
    found = routing_of(("b", "c"), ("layer 0", "layer 1"), (a, b), kl, np.arange(10), of_experts=4)
    text = drawn(routing_blocks(found), width=140)
    assert re.search(r"layer 1 +50\.00% ± 16\.67%|layer 1 +50% ± 17%", text)
    assert "of the tokens have other experts in at least one layer; they hold 75" in text
