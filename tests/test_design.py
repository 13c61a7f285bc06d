"""docs/design.md shows the house as it is: every file of src/scoremode is on its map, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house import FLOORS, HOUSE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "design.md"
INSIDE = (
    "engines/table",
    "engines/transformers",
    "engines/vllm",
    "engines/llamacpp",
    "engines/exllamav3",
    "engines/server",
    "models/recipes",
    "models/weight_formats",
    "verbs/prob",
    "report/terminal",
    "report/html",
)  # shown as folders


def drawn() -> set[str]:
    """Files and folders on the map, by their paths."""
    block = re.search(r"^src/scoremode/\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert block is not None
    found: set[str] = set()
    room = ""
    for line in block[1].splitlines():
        top = re.match(r"[├└]── (\w+)/", line)
        if top:
            room = top[1] + "/"
        inner = line.startswith(("│   ", "    "))
        for name in re.findall(r"\b(\w+\.py)\b(?!:)", re.split(r" {6,}", line.strip())[0] if inner else line[:24]):
            found.add((room if inner else "") + name)
        if inner:
            found |= {room + name for name in re.findall(r"(?<![\w/])(\w+)/(?=\s)", line)}
    return found


def test_every_file_is_on_the_map_and_every_name_on_the_map_is_a_file() -> None:
    there = set()
    for path in HOUSE.rglob("*.py"):
        name = path.relative_to(HOUSE).as_posix()
        folder = next((inside for inside in INSIDE if name.startswith(inside + "/")), None)
        if folder is not None:
            there.add(folder)
        elif not name.endswith("/__init__.py"):
            there.add(name)
    shown = drawn()
    assert there - shown == set(), "not on the map"
    assert shown - there == set(), "on the map, but not there"


def test_the_floors_on_the_page_are_those_that_the_import_test_holds() -> None:
    (line,) = re.findall(r"^cli ▶ .*$", PAGE.read_text(), re.MULTILINE)
    floors = [set(re.findall(r"\w+", part)) for part in line.split("▶")]
    held = [set(floor) for floor in reversed(FLOORS) if "__init__" not in floor]
    assert floors == held
