"""The table of a comparison on narrow screens: columns are left out before a name is torn, numbers are never cut."""

from __future__ import annotations

import dataclasses
import re

import pytest
from rich.cells import cell_len

from scoremode.core.statistics.comparison import BY_NAME, Comparison
from scoremode.reports.comparisons import comparison_table
from scoremode.reports.numbers import shown_statistic
from scoremode.reports.table import Cell, Column, Row, Table
from tests.reports.demo import make_demo, make_formats
from tests.reports.test_table import drawn

LONG = "an-organisation-with-long-name/A-Model-Of-72B-Instruct-{}-v1"


@pytest.fixture(scope="module")
def long_names() -> list[Comparison]:
    made = make_formats(6000)
    named = [dataclasses.replace(c, name=LONG.format(f"Q{i}")) for i, c in enumerate(made)]
    assert {len(c.name) for c in named} == {60}
    return named


STAY = ("ppl_candidate", "ppl_ratio", "kl_mean", "same_top")
MAY_LEAVE = ("kl_p99", "kl_median", "kl_max")


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 240])
def test_no_number_is_cut(long_names: list[Comparison], width: int) -> None:
    """A column is shown whole or named as left out, and the columns that matter most always stay."""
    out = drawn([comparison_table(long_names)], width=width)
    assert max(map(cell_len, out.splitlines())) <= width
    left_out = " ".join(out.rpartition("left out at this width:")[2].split()) if "left out" in out else ""
    stays = [name for name in MAY_LEAVE if measured_column(name) not in left_out]
    assert stays == [name for name in MAY_LEAVE if measured_column(name) in out.splitlines()[0] + out.splitlines()[1]]
    for c in long_names:
        for name in (*STAY, *stays):
            for wanted in filter(None, shown_statistic(BY_NAME[name], c.statistics())):
                assert re.search(rf"(?<!\S){re.escape(wanted)}(?!\S)", out), wanted
    flat = " ".join(out.split())
    for words in ("GGUF Q4_K_M", "exllamav3", *(("16.00", "4.96") if width > 60 else ())):
        assert words in flat


def measured_column(name: str) -> str:
    column = BY_NAME[name].column
    assert column is not None
    return column.title


@pytest.mark.parametrize("width", [60, 80, 100, 120])
@pytest.mark.parametrize("name", [LONG, "smollm2-Q4_1-{}_0.gguf"])
def test_names_are_whole_before_columns_stay(long_names: list[Comparison], name: str, width: int) -> None:
    """KL max and KL median go first; names that leave no room for numbers stand above them."""
    names = [name.format(f"Q{i}") for i in range(len(long_names))]
    table = comparison_table([dataclasses.replace(c, name=n) for c, n in zip(long_names, names, strict=True)])
    out = drawn([table], width=width)
    assert [n for n in names if not re.search(rf"^{re.escape(n)}( |$)", out, re.MULTILINE)] == []
    if left_out := re.search(r"left out at this width: (.*?); --columns (\S+), --json or", " ".join(out.split())):
        order = ["KL max", "KL median", "KL 99%", "bits overall"]
        assert set(left_out[1].split(", ")) == set(order[: len(left_out[1].split(", "))])
        again = drawn([comparison_table(long_names, left_out[2].split(","))], width=width)
        assert set(left_out[1].split(", ")) - {"bits overall"} <= set(re.split("  +|\n", again))
    assert bool(left_out) or width >= 100


def numbered(names: list[str], *cells: str) -> Table:
    return Table(list(map(Row, names)), [Column("n", list(map(Cell, cells)))])


def test_names_that_only_differ_in_the_middle_are_told_apart() -> None:
    names = ["a" * 30 + str(i) + "b" * 30 for i in range(3)]
    out = drawn([numbered(names, "1", "2", "3")], width=30)
    flat = out.replace("\n", "").replace(" ", "")
    for i in range(3):
        assert f"a{i}b" in flat
    wide = drawn([numbered(names, "1", "2", "3")], width=80)
    assert all(name in wide for name in names)


def test_a_table_that_fits_is_one_table() -> None:
    out = drawn([comparison_table(make_demo(6000))], width=100)
    assert "\n\n" not in out.strip()
    titles = ["ppl", "ratio", "KL mean", "KL median", "KL 99%", "KL max", "same top"]
    assert re.split("  +", out.splitlines()[0].strip()) == titles
    assert "format" not in out, "one format, one engine"


def test_wide_letters_count_twice() -> None:
    names = ["模型" * 20 + "甲", "模型" * 20 + "乙"]
    out = drawn([numbered(names, "123456789", "1")], width=40)
    assert max(map(cell_len, out.splitlines())) <= 40
    assert "123456789" in out
    assert "甲" in out
    assert "乙" in out
