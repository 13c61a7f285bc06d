"""Writes what is made from the engines' options: arguments.py, for editors and type checkers, and tables for the docs.

    python -m scoremode.engines.signature        # after an option was added to an engine; ``make format`` does it too

At run time the options themselves decide; a test compares the file with them.
"""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

from scoremode.engines.options import KnownOption
from scoremode.engines.registry import GROUP, all_options, known_engines

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


def docs_table(engine: str) -> str:
    """The options of an engine as a Markdown table, for docs/engines.md."""
    rows = [
        f"| `{option.flag}{' ' + option.details.metavar if option.details.metavar else ''}` | `{option.name}` | "
        f"{_plain(option)} |\n"
        for option in known_engines()[engine].options.known().values()
    ]
    return "| flag | in Python | meaning |\n|---|---|---|\n" + "".join(rows)


def _plain(option: KnownOption) -> str:
    choices = f" ({' or '.join(option.details.choices)})" if option.details.choices else ""
    return option.details.help.replace("|", "\\|") + choices


def docs(page: str) -> str:
    """A page with the table between each ``<!-- options of ENGINE -->`` and ``<!-- end -->`` written anew."""

    def written(found: re.Match[str]) -> str:
        return f"{found[1]}\n\n{docs_table(found[2])}\n<!-- end -->"

    return re.sub(r"(<!-- options of (\w+) -->).*?<!-- end -->", written, page, flags=re.DOTALL)


def main() -> None:
    """Write arguments.py, and the tables of a checkout's docs/engines.md."""
    FILE.write_text(source())
    page = FILE.parents[3] / "docs" / "engines.md"
    if page.exists():
        page.write_text(docs(page.read_text()))


if __name__ == "__main__":
    main()
