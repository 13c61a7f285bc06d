"""Quality against size: what is drawn, where, which candidates are on the front, and what is said of the others."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest

from scoremode.core.statistics.comparison import Comparison
from scoremode.reports.html.size_chart import DRAWN, FRAME, Point, SizeChart, size_chart, size_section
from tests.reports.demo import FORMATS, make_formats, with_statistics

KL, RATIO, SAME_TOP = DRAWN
Made = list[Comparison]


@pytest.fixture(scope="module")
def made() -> Made:
    return make_formats(400)


def chart_of(made: Made, measure: Any = KL, **changes: Mapping[str, Any]) -> tuple[SizeChart, dict[str, list[str]]]:
    """``changes`` are made to the statistics of candidates: ``_0={"kl_mean": None}``."""
    return size_chart(measure, [with_statistics(c, **changes.get(f"_{i}", {})) for i, c in enumerate(made)])


def section(made: Made, **changes: Mapping[str, Any]) -> str:
    return size_section([with_statistics(c, **changes.get(f"_{i}", {})) for i, c in enumerate(made)])


def points(*places: tuple[float, float], stderr: float | None = None) -> list[Point]:
    return [Point(i + 1, f"p{i}", f"p{i}", 0, size, value, stderr) for i, (size, value) in enumerate(places)]


def test_marks_stand_where_their_numbers_are(made: Made) -> None:
    """The drawing is read back: x by two ticks, y by two powers of ten."""
    drawn, _ = chart_of(made)
    svg = drawn.drawing("title")
    up = {label: FRAME.y(place) for place, label in drawn.up.marks()}
    along = {float(label): FRAME.x(place) for place, label in drawn.along.marks()}
    (b0, x0), *_, (b1, x1) = along.items()
    high, low = up["0.1"], up["0.01"]
    places = re.findall(r'class="hit" cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert len(places) == len(FORMATS)
    for point, (x, y) in zip(drawn.points, places, strict=True):
        assert (float(x) - x0) / (x1 - x0) * (b1 - b0) + b0 == pytest.approx(point.size, abs=0.02)
        assert 10 ** (-1 - (float(y) - high) / (low - high)) == pytest.approx(point.value, rel=0.02)


def test_the_legend_names_the_numbers_of_the_marks(made: Made) -> None:
    page = section(made)
    numbered = re.findall(r"<b>(\d+)</b>&nbsp;([^,<]+)", page)
    names = [name for name, *_ in FORMATS]
    assert sorted(numbered) == sorted((str(i), name) for i, name in enumerate(names, start=1))
    chart = page[page.index("of-kl_mean") : page.index("</svg>", page.index("of-kl_mean"))]
    assert re.findall(r'class="name[^>]*>(\d+)<', chart) == [str(i + 1) for i in range(len(FORMATS))]


def test_marks_have_names_that_cover_nothing_where_there_is_room(made: Made) -> None:
    """Up to twelve, without the beginning that all share if whole names have no room; a crowd has numbers alone."""
    drawn, _ = chart_of(made)
    assert [text for *_, text in drawn.names] == [
        f"…{name.removeprefix('Qwen3-4B-Instruct-2507-')}" for name, *_ in FORMATS
    ]
    for texts, letter, height in ((drawn.names, 6.7, 11), (drawn.numbers, 11, 16)):
        boxes = [(x, y - height, x + letter * len(text), y + 3) for x, y, text in texts]
        boxes += [(x - 7, y - 7, x + 7, y + 7) for x, y in drawn.places]
        assert not [
            (a, b)
            for a, b in itertools.combinations(boxes, 2)
            if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
        ]
    few = SizeChart(points((4, 0.1), (8, 0.001)), KL, "bits")
    assert [text for *_, text in few.names] == ["p0", "p1"]
    assert "wide" not in SizeChart(points(*((4, 0.1), (4, 0.1)) * 4), KL, "bits").drawing("t")
    assert not SizeChart(points(*((4 + i, 0.1**i) for i in range(13))), KL, "bits").names


def test_marks_of_one_group_differ_and_are_in_the_legend(made: Made) -> None:
    page = section(made[:5])
    keys = re.findall(r'mark-key".*?d="(.*?)".*?<b>(\d)', page)
    assert sorted(number for _, number in keys) == list("12345")
    chart = page[page.index("of-kl_mean") : page.index("</svg>", page.index("of-kl_mean"))]
    assert re.findall(r'class="dot s\d" d="(.*?)"', chart) == [mark for mark, _ in sorted(keys, key=lambda key: key[1])]


def test_a_large_range_is_logarithmic_and_a_small_one_is_not() -> None:
    assert SizeChart(points((4, 0.1), (8, 0.001)), KL, "bits").log
    assert not SizeChart(points((4, 0.1), (8, 0.05)), KL, "bits").log
    assert not SizeChart(points((4, 90), (8, 1)), SAME_TOP, "bits").log
    assert float(SizeChart(points((4, 0.1), (8, 0.05)), KL, "bits").up.place(0)) == 0


def test_the_baseline_is_in_every_chart_of_the_ratio() -> None:
    for places in (((4, 2.0), (8, 30.0)), ((4, 1.01), (8, 1.02)), ((4, 0.5), (8, 0.9))):
        drawn = SizeChart(points(*places), RATIO, "bits")
        assert 0 < float(drawn.up.place(1.0)) < 1
        assert "the baseline: 1" in drawn.drawing("t")


def test_the_noise_floor_is_an_area_or_said_to_be_below(made: Made) -> None:
    near = SizeChart(points((4, 0.1), (8, 0.001)), KL, "bits", [1e-4])
    assert 'class="noise"' in near.drawing("t")
    assert "noise floor 1e−4" in near.drawing("t")
    far = dataclasses.replace(near, floors=[1e-9]).drawing("t")
    assert 'class="noise"' not in far
    assert "noise floor 1e−9, below this chart" in far
    assert "noise floor 0<" in dataclasses.replace(near, floors=[0.0]).drawing("t")
    assert "noise floor, at most 2e−4" in dataclasses.replace(near, floors=[1e-4, 2e-4]).drawing("t")
    assert chart_of(made, RATIO)[0].floor is None


def test_a_divergence_of_zero_is_drawn_on_the_edge_and_said(made: Made) -> None:
    drawn, missing = chart_of(made, _0={"kl_mean": 0.0, "kl_mean_stderr": 0.0})
    assert missing == {}
    assert drawn.height(0.0) == 0.0
    assert drawn.points[drawn.front[-1]].name == FORMATS[0][0]
    words = f"On the lower edge, because a logarithmic axis has no 0: {FORMATS[0][0]}."
    assert words in section(made, _0={"kl_mean": 0.0})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kl_mean": None, "kl_infinite": 3}, "KL is infinite on 3 tokens"),
        ({"kl_mean": math.nan}, "its KL is not a number that can be drawn"),
        ({"kl_mean": math.inf}, "its KL is not a number that can be drawn"),
        ({"kl_mean": "0.1"}, "its KL is not a number that can be drawn"),
        ({"kl_mean": 1.7e308}, "its KL is not a number that can be drawn"),
    ],
)
def test_who_is_not_drawn_is_named(made: Made, change: dict[str, Any], why: str) -> None:
    drawn, missing = chart_of(made, _3=change)
    assert missing == {why: [FORMATS[3][0]]}
    assert len(drawn.points) == len(FORMATS) - 1
    assert f"Not drawn: {FORMATS[3][0]}: {why}." in section(made, _3=change)
    assert len(chart_of(made, RATIO, _3=change)[0].points) == len(FORMATS), "the ratio is known"


def without(comparison: Comparison, *names: str) -> Comparison:
    return dataclasses.replace(comparison, manifest={k: v for k, v in comparison.manifest.items() if k not in names})


def test_a_size_that_is_not_known_is_said(made: Made) -> None:
    comparisons = [without(made[0], "bits_per_weight"), *made[1:]]
    assert f"Not drawn: {FORMATS[0][0]}: bits per weight not known." in size_section(comparisons)


def test_sizes_are_drawn_if_no_bits_are_known(made: Made) -> None:
    comparisons = [without(c, "bits_per_weight") for c in made]
    page = size_section(comparisons)
    assert "KL against size" in page
    assert "size, GiB" in page
    drawn, _ = chart_of(comparisons)
    assert [p.size for p in drawn.points] == [c.manifest["bytes"] / 1024**3 for c in comparisons]
    bare = [without(c, "bits_per_weight", "bytes") for c in made]
    assert "size not known" in size_section(bare)
    assert "<svg" not in size_section(bare)


def test_only_measures_with_values_are_offered(made: Made) -> None:
    nothing: dict[str, Mapping[str, Any]] = {f"_{i}": {"kl_mean": None} for i in range(len(FORMATS))}
    page = section(made, **nothing)
    assert "size-kl_mean" not in page
    assert "No chart of KL, which needs two candidates. Not drawn: " in page
    assert re.findall(r'id="(size-\w+)" checked', page) == ["size-ppl_ratio"]


def test_two_candidates_are_needed(made: Made) -> None:
    assert size_section(made[:1]) == ""
    assert "which needs two candidates" not in size_section(made[:2])
    page = section(made[:2], _0={n.name: None for n in DRAWN})
    assert page.count("which needs two candidates. Not drawn: Qwen3-4B-Instruct-2507-Q8_0.gguf: ") == 3
    assert "<svg" not in page
