"""The import graph of scoremode, read from the source: every arrow, those of imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import scoremode

HOUSE = Path(scoremode.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "values", "version"),
    ("head",),
    ("core",),
    ("engines", "reports"),
    ("console",),
    ("studies", "remote"),
    ("cli",),
    ("__init__", "__main__"),
)
"""Rooms from the ground up. A room imports from itself and from lower floors; rooms of one floor do not know each
other, but for the ground floor, whose files may."""

CORE_FLOORS: tuple[tuple[str, ...], ...] = (
    ("arguments", "strict_json", "entry_points", "installation", "extensions", "hub", "free_memory", "reading"),
    ("disk",),
    ("typed",),
    ("options",),
    ("text",),
    ("scores",),
    ("plan",),
    ("cache",),
    ("references",),
    ("store",),
    ("models", "statistics"),
    ("engine",),
    ("verbs",),
)
"""The rooms of the core, from the ground up."""

WINGS = ("engines", "studies", "remote")
"""Rooms whose folders are wings: each can be taken off, so no wing imports another of its room."""

FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
CORE_FLOOR = {room: number for number, rooms in enumerate(CORE_FLOORS) for room in rooms}


def needs_wing(*wings: str) -> pytest.MarkDecorator:
    """For a test of the core that shows what a wing makes of it: skipped in a house without the wing."""
    missing = [wing for wing in wings if not (HOUSE / wing / "__init__.py").exists()]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing or wings)}")


def files() -> list[Path]:
    return sorted(HOUSE.rglob("*.py"))


def name_of(path: Path) -> str:
    """``store.runs`` of core/store/runs.py, ``store`` of store/__init__.py."""
    parts = path.relative_to(HOUSE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def room_of(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


SEAMS = "core.extensions"
"""What wings hand over: for its types alone, this page looks up to the rooms that ask for them."""


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of everything that a piece of code imports, wherever in it the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports here are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows() -> dict[str, set[str]]:
    """Every file of the house, and the files that it imports."""
    known = {name_of(path) for path in files()}
    found: dict[str, set[str]] = {}
    for path in files():
        own, targets = name_of(path), set()
        tree = ast.parse(path.read_text())
        if own == SEAMS:
            tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
        for full in imported(tree):
            parts = full.split(".")
            if parts[0] != "scoremode" or len(parts) == 1:
                continue
            names = [".".join(parts[1:length]) for length in range(len(parts), 1, -1)]
            target = next((name for name in names if name in known), "__init__")  # a name of scoremode itself
            if target != own:
                targets.add(target)
        found[own] = targets
    return found


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Arrows to a higher floor, to another room of the same floor, or from one wing to another."""
    return sorted(
        f"{own} -> {target}" for own, targets in graph.items() for target in targets if _is_wrong(own, target)
    )


def _is_wrong(own: str, target: str) -> bool:
    room, other = room_of(own), room_of(target)
    if room != other:
        return FLOOR[other] > FLOOR[room] or 0 < FLOOR[other] == FLOOR[room]
    if room not in ("core", *WINGS) or "." not in own or "." not in target:
        return False
    inner, its = own.split(".")[1], target.split(".")[1]
    if room in WINGS:
        return inner != its
    return inner != its and (CORE_FLOOR[its] > CORE_FLOOR[inner] or 0 < CORE_FLOOR[its] == CORE_FLOOR[inner])


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of files that import each other, directly or by way of others (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[len(stack) - len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found
