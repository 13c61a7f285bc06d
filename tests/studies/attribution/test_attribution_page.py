"""The page and the tables of an attribution: every figure is there, hostile names stay words, odd values are shown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import scoremode as sm
from scoremode.errors import InputError
from scoremode.studies.attribution.page import render_attribution
from scoremode.studies.attribution.result import Attribution, CandidateDamage, Cells, Damage, Recipe, UnitDamage
from scoremode.studies.attribution.tables import attribution_blocks
from tests.reports.test_table import drawn

HOSTILE = '<script>alert("x")</script>&\u202e'
KINDS = ("q_proj", "k_proj", "down_proj", "norms")
CELLS = Cells(np.repeat(np.arange(16), 10), np.ones(160), 8)


def made(kl: float) -> Damage:
    sums = np.full(16, kl) * np.linspace(0.9, 1.1, 16)
    return Damage(sums, -sums, np.full(16, 9.0))


def attribution(by: str = "matrix", layers: int = 5, name: str = "candidate") -> Attribution:
    units = []
    for layer in range(layers):
        for kind in KINDS if by == "matrix" else (None,):
            words = f"layer {layer}" + (f" {kind}" if kind else "")
            damage = CELLS.unchanged() if kind == "norms" else made(0.01 * (layer + 1))
            units.append(UnitDamage(words, layer, kind, 100, f"type of {name}", 4.5, 1000.0, damage))
    units.append(UnitDamage("embedding", None, "embedding", 50, "bfloat16", 16.0, 0.0, CELLS.unchanged()))
    candidate = CandidateDamage(name, 4.5, tuple(units), made(0.4), made(0.5), "an engine", (f"a note on {name}",))
    rivals = (CandidateDamage(name, 4.5, (), made(0.4)),)
    recipe = Recipe("4.5 bits per weight", {"layer 0": name}, 4.4, 0.1, made(0.3), rivals)
    return Attribution(name, by, CELLS, (candidate,), 1e-8, "other batches", {"corpus": name}, (), recipe)


def shown(found: Attribution) -> str:
    return drawn(attribution_blocks(found), width=140)


@pytest.mark.parametrize("by", ["layer", "matrix"])
def test_the_page_has_every_part(by: str) -> None:
    page = render_attribution(attribution(by))
    assert all(f'id="{name}"' in page for name in ("account", "map", "recipe", "units"))
    assert page.count('class="heat"') == (2 * (5 * 4 + 3) if by == "matrix" else 0)  # cells and the scale, twice
    assert page.count('class="bar-of') == (0 if by == "matrix" else 2 * 6)  # for wide and narrow screens
    assert "beats candidate (4.50 bits per weight) on held-out windows, surely" in page
    assert "<dt>served</dt>" in page
    assert "Noise floor: KL" in page
    assert "KL per Gbit saved" in page


def test_an_attribution_has_a_page_of_its_own(tmp_path: Path) -> None:
    found = attribution()
    assert sm.report(tmp_path / "page.html", found) == tmp_path / "page.html"
    with pytest.raises(InputError, match="page of its own"):
        sm.report(tmp_path / "page.html", found, found)


def test_hostile_names_stay_words() -> None:
    page = render_attribution(attribution(name=HOSTILE))
    assert "<script>alert" not in page
    assert "\u202e" not in page + shown(attribution(name=HOSTILE))


def test_the_table_names_the_worst_and_counts_the_rest() -> None:
    text = shown(attribution(layers=6))
    assert re.search(r"layer 5 down_proj +0\.00\d+ ± ", text)
    assert "13 units with less KL, or the baseline's own weights: layer 1 q_proj, " in text
    assert re.search(r"interaction +-?0\.\d+", text)
    assert "mixture minus this" in text


def test_infinite_damage_comes_first_and_is_not_drawn() -> None:
    found, infinite = attribution("layer"), Damage(np.full(16, np.inf), np.zeros(16), np.zeros(16))
    units = list(found[0].units)
    units[2] = replace(units[2], damage=infinite)
    odd = replace(found, candidates=(replace(found[0], units=tuple(units), whole=infinite),))
    assert "∞" in render_attribution(odd)
    lines = [line for line in shown(odd).splitlines() if line.startswith("layer")]
    assert lines[0].startswith("layer 2")
    assert "∞" in lines[0]


@pytest.mark.parametrize("by", ["layer", "matrix"])
def test_nothing_changed_is_a_page_too(by: str) -> None:
    found = attribution(by)
    same = tuple(replace(one, damage=CELLS.unchanged()) for one in found[0].units)
    none = replace(found[0], units=same, whole=CELLS.unchanged(), served=None)
    found = replace(found, candidates=(none,), recipe=None, noise=None)
    assert "equal weights" in render_attribution(found)
    assert "units with less KL, or the baseline's own weights: layer 0" in shown(found)
