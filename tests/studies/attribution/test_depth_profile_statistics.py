"""Errors by layer against longhand sums, and the rule that names a layer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scoremode.studies.attribution.layer_profile import (
    HARMLESS,
    OUT_OF_LINE,
    SMALLEST,
    DepthPoint,
    DepthProfile,
    ProfileSums,
    out_of_line,
)

LAYERS, WIDTH = 3, 5


def random_states(seed: int, tokens: int, places: int = LAYERS + 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(places, tokens, WIDTH)).astype(np.float32)


def added(windows: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]], groups: int) -> tuple[DepthPoint, ...]:
    sums = ProfileSums(LAYERS, groups)
    for one in windows:
        sums.add(*one)
    return sums.places()


def profile(places: tuple[DepthPoint, ...]) -> DepthProfile:
    return DepthProfile(("b", "c"), ("transformers", "served"), places, 1, 1, "documents")


def test_sums_equal_a_longhand_computation() -> None:
    """Windows of other lengths, one of a single token, in six groups: every number by loops over tokens."""
    windows, numbers = [], []
    for group, tokens in enumerate((4, 1, 7, 2, 3, 6)):
        a, b, f = (
            random_states(group, tokens),
            random_states(50 + group, tokens),
            random_states(90 + group, tokens, LAYERS),
        )
        windows.append((np.full(tokens, group), a, b, f))
        for t in range(tokens):
            numbers.append([[[float(x) for x in states[i, t]] for i in range(len(states))] for states in (a, b, f)])
    found = added(windows, 6)

    def norm(v: list[float]) -> float:
        return math.sqrt(sum(x * x for x in v))

    def minus(v: list[float], w: list[float]) -> list[float]:
        return [x - y for x, y in zip(v, w, strict=True)]

    for i, place in enumerate(found):
        squares = sum(norm(minus(a[i], b[i])) ** 2 for a, b, _ in numbers) / sum(norm(b[i]) ** 2 for _, b, _ in numbers)
        assert place.error.value == pytest.approx(math.sqrt(squares), rel=1e-12)
        cosines = [sum(x * y for x, y in zip(a[i], b[i], strict=True)) / norm(a[i]) / norm(b[i]) for a, b, _ in numbers]
        assert place.cosine.value == pytest.approx(sum(cosines) / len(cosines), rel=1e-12)
        if i == 0:
            own = [norm(minus(a[0], b[0])) / norm(b[0]) for a, b, _ in numbers]
        else:
            own = [
                norm(minus(a[i], f[i - 1])) / max(norm(minus(f[i - 1], a[i - 1])), SMALLEST * norm(f[i - 1]))
                for a, _, f in numbers
            ]
        assert place.own_error.value == pytest.approx(sum(own) / len(own), rel=1e-12)
        assert (place.error.n, place.error.groups) == (len(numbers), 6)
        assert place.error.stderr is not None


def test_equal_states_have_no_error_and_zero_states_no_nan() -> None:
    a = random_states(1, 6)
    a[:, 2] = 0.0
    places = added([(np.arange(6), a, a, a[1:])], 6)
    assert [(p.error.value, p.own_error.value, p.not_finite) for p in places] == [(0.0, 0.0, 0)] * 4
    assert [p.cosine.value for p in places] == pytest.approx([1.0] * 4)
    assert profile(places).verdict == "no layer is out of line"


def test_states_that_are_not_finite_are_counted_and_their_first_place_is_named() -> None:
    b = random_states(2, 8)
    a = b.copy()
    a[2:, 3] = np.nan
    a[3:, 4] = np.inf
    found = profile(added([(np.arange(8), a, b, b[1:])], 8))
    assert [p.not_finite for p in found.places] == [0, 0, 1, 2]
    assert [p.name for p in found.out_of_line] == ["layer 1"]
    assert found.verdict == "layer 1 is out of line: its states are not finite in 1 tokens"
    assert found.places[3].error.value == 0.0, "the other tokens are equal"


@pytest.mark.parametrize("index", [0, 1, 5])
def test_rule_names_one_layer_and_tolerates_the_usual_spread(index: int) -> None:
    own = np.array([0.010, 0.016, 0.012, 0.018, 0.006, 0.017])
    assert not out_of_line(own, [0] * 6).any()
    own[index] = OUT_OF_LINE * 0.018 * 1.01
    assert np.flatnonzero(out_of_line(own, [0] * 6)).tolist() == [index]


def test_rule_ignores_what_rounding_does() -> None:
    assert not out_of_line([1e-7, 1e-7, 0.9 * HARMLESS, 1e-7], [0] * 4).any()
    assert not out_of_line([0.5], [0]).any(), "a single place has nothing to be compared with"
    assert out_of_line([0.0, 0.0, 0.01], [0] * 3).tolist() == [False, False, True]
    own = np.full(31, 0.01)
    own[[4, 20]] = 0.3, 0.5
    assert np.flatnonzero(out_of_line(own, [0] * 31)).tolist() == [4, 20], "two of many are both named"
