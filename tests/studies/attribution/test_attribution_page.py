"""The page and the tables of an attribution: every figure is there, hostile names stay words, odd values are shown."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

import scoremode as sm
from scoremode.errors import InputError
from scoremode.studies.attribution.page import depth, render_attribution
from scoremode.studies.attribution.result import Attribution, CandidateDamage, Cells, Damage, Recipe, UnitDamage
from scoremode.studies.attribution.tables import attribution_blocks
from tests.reports.test_table import drawn

HOSTILE = '<script>alert("x")</script>&\u202e'
KINDS = ("q_proj", "k_proj", "down_proj", "norms")


def made(kl: float, *, changed: bool = True) -> Damage:
    sums = np.full(16, kl) * np.linspace(0.9, 1.1, 16)
    return Damage(sums, -sums, np.full(16, 9.0), changed)


def attribution(by: str = "matrix", layers: int = 5, name: str = "candidate") -> Attribution:
    numbers = np.arange(16)
    cells = Cells(numbers // 2, numbers % 2, np.full(16, 10.0), np.full(16, 10))
    units = []
    for layer in range(layers):
        for kind in KINDS if by == "matrix" else (None,):
            words = f"layer {layer}" + (f" {kind}" if kind else "")
            damage = made(0.01 * (layer + 1), changed=kind != "norms") if kind != "norms" else cells.unchanged()
            units.append(UnitDamage(words, layer, kind, 100, f"type of {name}", 4.5, 1000.0, damage))
    units.append(UnitDamage("embedding", None, "embedding", 50, "bfloat16", 16.0, 0.0, cells.unchanged()))
    candidate = CandidateDamage(name, 4.5, tuple(units), made(0.4), made(0.5), "an engine", (f"a note on {name}",))
    facts = {"corpus": name, "stderr_groups": "documents"}
    recipe = Recipe(
        "4.5 bits per weight", {"layer 0": name}, 4.4, 0.1, 0.0, made(0.3), (CandidateDamage(name, 4.5, (), made(0.4)),)
    )
    return Attribution(name, by, cells, (candidate,), 1e-8, "other batches", facts, (), recipe)


def shown(found: Attribution) -> str:
    return drawn(attribution_blocks(found.as_json()), width=140)


@pytest.mark.parametrize("by", ["layer", "matrix"])
def test_the_page_has_every_part(by: str) -> None:
    page = render_attribution(attribution(by))
    assert all(f'id="{name}"' in page for name in ("account", "map", "recipe", "units"))
    assert page.count('class="heat"') == (5 * 3 + 3 if by == "matrix" else 0)  # cells and the scale; no norms
    assert page.count('class="bar-of') == (0 if by == "matrix" else 2 * 5)  # for wide and narrow screens
    assert "beats candidate (4.50 bits per weight) on held-out windows, surely" in page
    assert "<dt>served</dt>" in page
    assert "Noise floor: KL" in page


def test_an_attribution_has_a_page_of_its_own(tmp_path: Path) -> None:
    found = attribution()
    assert sm.report(tmp_path / "page.html", found) == tmp_path / "page.html"
    with pytest.raises(InputError, match="page of its own"):
        sm.report(tmp_path / "page.html", found, found)


def test_hostile_names_stay_words() -> None:
    page = render_attribution(attribution(name=HOSTILE))
    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert "\u202e" not in shown(attribution(name=HOSTILE))


def test_the_table_names_the_worst_and_counts_the_rest() -> None:
    text = shown(attribution(layers=6))
    assert re.search(r"layer 5 down_proj +0\.00\d+ ± ", text)
    assert "6 more units have" in text
    assert "7 units with the baseline's own weights" in text
    assert re.search(r"interaction +-?0\.\d+", text)
    assert "mixture minus this" in text


def test_bits_that_say_nothing_are_not_shown() -> None:
    """Emulated weights are stored in as many bits as the baseline's."""
    found = attribution()
    units = tuple(structs.replace(one, bits=32.0, bits_saved=0.0, format="float32") for one in found[0].units)
    found = structs.replace(
        found, candidates=(structs.replace(found[0], bits_per_weight=32.0, units=units),), recipe=None
    )
    for text in (shown(found), render_attribution(found)):
        assert "emulated, or not quantized: no weights are stored in fewer bits than in the baseline" in text
        assert "32.00" not in text
        assert "float32" not in text
        assert "KL per Gbit" not in text
    assert "4.50 bits per weight" in shown(attribution())


def test_infinite_damage_comes_first_and_is_not_drawn() -> None:
    found = attribution("layer")
    units = list(found[0].units)
    units[2] = structs.replace(units[2], damage=Damage(np.full(16, np.inf), np.zeros(16), np.zeros(16)))
    whole = Damage(np.full(16, np.inf), np.zeros(16), np.zeros(16))
    odd = structs.replace(
        found, candidates=(structs.replace(found[0], units=tuple(units), whole=whole, served=None),), recipe=None
    )
    assert "∞" in render_attribution(odd)
    lines = [line for line in shown(odd).splitlines() if line.startswith("layer")]
    assert lines[0].startswith("layer 2")
    assert "∞" in lines[0]


def test_nothing_changed_is_a_page_too() -> None:
    found = attribution("layer")
    same = [structs.replace(one, damage=found.cells.unchanged()) for one in found[0].units]
    none = structs.replace(found[0], units=tuple(same), whole=found.cells.unchanged(), served=None, served_by=None)
    found = structs.replace(found, candidates=(none,), recipe=None, noise=None)
    assert "equal weights" in render_attribution(found)
    assert "6 units with the baseline's own weights" in shown(found)


def test_colours_are_logarithmic() -> None:
    assert depth(0.1, 1.0) == pytest.approx(0.06 + 0.94 / 2, abs=1e-3)
    assert depth(1e-9, 1.0) == 0.06
    assert depth(float("inf"), 1.0) == 1.0
    assert depth(0.0, 0.0) == 0.0
