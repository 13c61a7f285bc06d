"""Every room has a budget, in the table of docs/design.md: lines for code and tests, words for docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house import HOUSE, ROOT, WINGS

TABLE = re.compile(r"^\| (`.*?) \|.*\| ([\d,]+) \| [\d,]+ \|$", re.MULTILINE)
BUDGETS = {
    room: int(allowed.replace(",", "")) for room, allowed in TABLE.findall((ROOT / "docs/design.md").read_text())
}


def lines(path: Path) -> int:
    files = path.rglob("*.py") if path.is_dir() else [path]
    return sum(len(file.read_text().splitlines()) for file in files)


def weight(room: str) -> int:
    """Lines or words of a row of the table, which names folders and files in backticks."""
    names = re.findall(r"`(.+?)`", room)
    if names == ["docs/"]:
        return sum(len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md"))
    if names in (["src/"], ["tests/"]):
        return lines(ROOT / names[0])
    return sum(lines(HOUSE / name) for name in names)


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_weighs_no_more_than_it_may(room: str) -> None:
    assert weight(room) <= BUDGETS[room]


def test_every_room_has_a_budget() -> None:
    named = {name.rstrip("/") for room in BUDGETS for name in re.findall(r"`(.+?)`", room)}
    folders = {path.parent.relative_to(HOUSE).parts for path in HOUSE.rglob("*.py")} - {()}
    rooms = {"/".join(parts[: 2 if parts[0] in WINGS else 1]) for parts in folders}
    assert (rooms - set(WINGS)) | {path.name for path in HOUSE.glob("*.py")} <= named


def test_tests_lie_beside_their_wing() -> None:
    """A wing that comes off takes its tests along: they have a folder of its name."""
    wings = {path.parent.relative_to(HOUSE) for room in WINGS for path in (HOUSE / room).glob("*/__init__.py")}
    assert [wing for wing in sorted(wings) if not list((ROOT / "tests" / wing).glob("test_*.py"))] == []
