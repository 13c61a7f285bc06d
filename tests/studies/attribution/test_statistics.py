"""Sums per cell: means and errors as from all targets at once, the account, halves, and verdicts on mixtures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from scoremode.core.statistics.estimate import ratio
from scoremode.studies.attribution.result import Attribution, CandidateDamage, Cells, Damage, Recipe, UnitDamage
from scoremode.values import Floats
from tests.makers import ask

RNG = np.random.default_rng(4)
CELLS = Cells(np.repeat(np.arange(16), 10), np.ones(160), 8)


def of(kl: Floats) -> Damage:
    return Damage(kl, -kl, 10 - kl)


def attribution(parts: list[Floats], whole: Floats, served: Floats | None = None) -> Attribution:
    units = tuple(UnitDamage(f"layer {i}", i, None, 100, "rtn", 4.5, 1150.0, of(kl)) for i, kl in enumerate(parts))
    candidate = CandidateDamage("c", 4.5, units, of(whole), None if served is None else of(served))
    return Attribution("b", "layer", CELLS, (candidate,), 2e-9, "other batches")


def test_means_and_errors_are_those_of_all_targets_at_once(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in [*("ab" * (4 + i) for i in range(7)), "x", "yz"]))
    plan = ask("table:uniform", corpus=str(path), context_length=6).plan
    cells = Cells.of(plan)
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


def test_the_account_is_paired() -> None:
    hard = RNG.exponential(size=16)  # parts of a hard text are damaged more, and so is the whole
    found = attribution([hard, 2 * hard], 3.1 * hard, 3.1 * hard + 1)
    account = found.account(found[0])
    assert account.parts.value == pytest.approx(3 * hard.sum() / 160)
    assert account.interaction.value == pytest.approx(0.1 * hard.sum() / 160)
    assert account.rest is not None
    assert account.rest.value == pytest.approx(0.1)
    assert account.rest.stderr == pytest.approx(0, abs=1e-12)  # the difficulty of the text cancels
    assert (account.whole.stderr or 0) > 0.01
    assert account.ratio == pytest.approx(3 / 3.1)
    each = found.kl_per_gigabit(found[0].units[1])
    assert each is not None
    assert each.value == pytest.approx(2 * hard.sum() / 160 * 1e9 / 1150)
    assert found.as_json()["candidates"][0]["units"][1]["share"] == pytest.approx(2 / 3)


def test_infinite_damage_is_shown_and_not_hidden() -> None:
    kl = np.where(np.arange(16) == 3, np.inf, 1.0)
    account = attribution([kl], kl).as_json()["candidates"][0]["account"]
    assert account["whole"] is None  # JSON has no infinity
    assert account["interaction"] is None
    nothing = attribution([], np.zeros(16))
    assert nothing.account(nothing[0]).ratio is None


@pytest.mark.parametrize(
    ("bits", "kl", "words"),
    [(4.5, 0.2, "does not beat four"), (4.5, 0.05, "beats four .*, surely"), (4.8, 0.05, "no rival")],
)
def test_a_mixture_is_judged_by_a_uniform_candidate_of_its_size(bits: float, kl: float, words: str) -> None:
    text = np.repeat(RNG.uniform(0.9, 1.1, 8), 2)
    rivals = (CandidateDamage("three", 3.5, (), of(9 * text)), CandidateDamage("four", 4.5, (), of(text)))
    facts = Recipe("4.5 bits per weight", {}, bits, 0.1, of(10 * kl * text), rivals).as_json(CELLS)
    assert re.search(words, facts["verdict"])
    assert facts["measured_kl"] == pytest.approx(kl * text[1::2].mean())
