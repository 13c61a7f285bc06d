"""Writes arguments.py, the options of all built-in engines as a type that editors and type checkers read.

    python -m scoremode.engines.signature        # after an option was added to an engine; ``make format`` does it too

At run time the options themselves decide; a test compares the file with them.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from scoremode.engines.registry import GROUP, all_options

FILE = Path(__file__).with_name("arguments.py")
TYPES = {"Pairs": "Mapping[str, Any] | Pairs"}

HEADER = '''"""Options of the built-in engines by name, written by signature.py from their dataclasses: do not edit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from scoremode.engines.options import Pairs


class EngineArguments(TypedDict, total=False):
    """Options of an engine, by name. None means: the engine's own choice."""

'''


def source() -> str:
    """The text of arguments.py."""
    brought = {point.name for point in entry_points(group=GROUP)}  # engines of other packages
    lines = [
        f"    {name}: {TYPES.get(option.kind, option.kind)} | None\n"
        for name, (engines, option) in sorted(all_options().items())
        if set(engines) - brought
    ]
    return HEADER + "".join(lines)


def main() -> None:
    FILE.write_text(source())


if __name__ == "__main__":
    main()
