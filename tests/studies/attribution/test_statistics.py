"""Sums per cell: means and errors as from all targets at once, the account, halves, and verdicts on mixtures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scoremode.core.statistics.estimate import ratio
from scoremode.studies.attribution.result import (
    Attribution,
    CandidateDamage,
    Cells,
    Damage,
    PlanCells,
    Recipe,
    UnitDamage,
    account_of,
    ordered,
)
from scoremode.values import Floats
from tests.makers import ask

RNG = np.random.default_rng(4)


def some_cells(groups: int = 8) -> Cells:
    numbers = np.arange(2 * groups)
    return Cells(numbers // 2, numbers % 2, np.full(2 * groups, 10.0), np.full(2 * groups, 10))


def of(kl: Floats, *, changed: bool = True) -> Damage:
    return Damage(kl, -kl, 10 - kl, changed)


def test_means_and_errors_are_those_of_all_targets_at_once(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in [*("ab" * (4 + i) for i in range(7)), "x", "yz"]))
    plan = ask("table:uniform", corpus=str(path), context_length=6).plan
    cells = PlanCells(plan)
    kl = RNG.exponential(size=plan.targets)
    moved, same = RNG.normal(size=plan.targets), RNG.random(plan.targets) < 0.8
    damage, groups = cells.sums(kl, moved, same), cells.group[cells._index]
    for sums, values in ((damage.kl, kl), (damage.moved, moved), (damage.same, same.astype(float))):
        expected, found = ratio(values, np.ones(plan.targets), groups), cells.mean(sums)
        assert found.value == pytest.approx(expected.value, rel=1e-12)
        assert found.stderr == pytest.approx(expected.stderr, rel=1e-9)
        assert (found.n, found.groups) == (expected.n, expected.groups)
    late = plan.target_window >= (len(plan) + 1) // 2
    assert cells.mean(damage.kl, "second").value == pytest.approx(kl[late].mean())
    assert cells.mean(damage.kl, "first").value == pytest.approx(kl[~late].mean())


def test_records_come_back_as_they_were() -> None:
    cells = some_cells()
    damage = of(RNG.random(16))
    again = cells.damage(damage.packed())
    assert np.array_equal(again.kl, damage.kl)
    assert np.array_equal(again.same, damage.same)
    assert again.is_changed
    assert not cells.damage(cells.unchanged().packed()).is_changed
    for body in (b"", b"\1abc", damage.packed()[:-24]):
        with pytest.raises(ValueError, match="other cells"):
            cells.damage(body)


def test_the_account_is_paired() -> None:
    cells = some_cells()
    hard = RNG.exponential(size=16)  # parts of a hard text are damaged more, and so is the whole
    parts, whole, served = [of(hard), of(2 * hard)], of(3.1 * hard), of(3.1 * hard + 1)
    account = account_of(cells, parts, whole, served)
    assert account.parts.value == pytest.approx(3 * hard.sum() / 160)
    assert account.interaction.value == pytest.approx(0.1 * hard.sum() / 160)
    assert account.rest is not None
    assert account.rest.value == pytest.approx(0.1)
    assert account.rest.stderr == pytest.approx(0, abs=1e-12)  # the difficulty of the text cancels
    assert account.whole.stderr is not None
    assert account.whole.stderr > 0.01
    assert account.ratio == pytest.approx(3 / 3.1)
    alone = account_of(cells, [], cells.unchanged())
    assert (alone.whole.value, alone.parts.value, alone.ratio) == (0.0, 0.0, None)


def test_infinite_damage_is_shown_and_not_hidden() -> None:
    kl = np.ones(16)
    kl[3] = np.inf
    account = account_of(some_cells(), [of(kl)], of(kl)).as_json()
    assert account["whole"] is None  # JSON has no infinity
    assert account["interaction"] is None


def unit(name: str, kl: float, layer: int | None = None) -> UnitDamage:
    return UnitDamage(name, layer, None, 100, "rtn", 4.5, 1150.0, of(np.full(16, kl)))


def test_units_are_ordered_by_damage_and_measured_per_bit() -> None:
    units = (unit("layer 0", 0.1, 0), unit("layer 1", 0.4, 1))
    candidate = CandidateDamage("c", 4.5, units, of(np.full(16, 0.5)))
    found = Attribution("b", "layer", some_cells(), (candidate,), 2e-9, "other batches")
    assert [one.name for one in ordered(found, units)] == ["layer 1", "layer 0"]
    each = found.kl_per_gigabit(units[1])
    assert each is not None
    assert each.value == pytest.approx(0.04 * 1e9 / 1150)
    assert found.as_json()["candidates"][0]["units"][1]["share"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("bits", "kl", "words"),
    [
        (4.5, 0.2, "does not beat"),
        (4.5, 0.05, "surely"),
        (4.2, 0.2, "no uniform candidate has the size"),
        (4.8, 0.05, "no rival"),
    ],
)
def test_a_mixture_is_judged_by_a_uniform_candidate_of_its_size(bits: float, kl: float, words: str) -> None:
    cells, text = some_cells(), np.repeat(RNG.uniform(0.9, 1.1, 8), 2)
    rivals = (CandidateDamage("three", 3.5, (), of(9 * text)), CandidateDamage("four", 4.5, (), of(text)))
    recipe = Recipe("4.5 bits per weight", {}, bits, 0.1, 0.0, of(10 * kl * text), rivals)
    assert words in recipe.verdict(cells)
    facts = recipe.as_json(cells)
    assert [row["name"] for row in facts["uniform"]] == ["three", "four"]
    assert facts["measured_kl"] == pytest.approx(kl * text[1::2].mean())
