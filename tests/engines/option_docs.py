"""Writes what is made from the engines' options: a TypedDict for editors and type checkers, and tables for the docs.

    python -m tests.engines.option_docs        # after an option was added to an engine; ``make format`` does it too

At run time the options themselves decide; a test compares these files with them.
"""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path

from scoremode.core.engine.options import KnownOption
from scoremode.core.engine.registry import GROUP, all_options, known_engines

ROOT = Path(__file__).parents[2]
FILE = ROOT / "src" / "scoremode" / "core" / "verbs" / "arguments.py"
PAGES = sorted((ROOT / "docs").glob("*.md"))
FIELDS = re.compile(r'(class EngineOptionArguments.*?"""\n\n).*?(?=\n\n)', re.DOTALL)
TYPES = {"Pairs": "Mapping[str, Plain] | Pairs"}


def source() -> str:
    """The text of core/verbs/arguments.py, with the fields of EngineOptionArguments written anew."""
    brought = {point.name for point in entry_points(group=GROUP)}  # engines of other packages
    lines = [
        f"    {name}: {_type(option)} | None"
        for name, (engines, option) in sorted(all_options().items())
        if set(engines) - brought
    ]
    return FIELDS.sub(lambda found: found[1] + "\n".join(lines), FILE.read_text())


def _type(option: KnownOption) -> str:
    """The type of an option in Python, without None."""
    several = f" | Sequence[{option.kind}]" if option.details.cache_part else ""
    return TYPES.get(option.kind, option.kind) + several


def docs_table(engine: str) -> str:
    """The options of an engine as a Markdown table."""
    rows = [
        f"| {_flag(option)} | `{option.name}` | {_plain(option)} |\n"
        for option in known_engines()[engine].options.known().values()
    ]
    return "| flag | in Python | meaning |\n|---|---|---|\n" + "".join(rows)


def _flag(option: KnownOption) -> str:
    if option.details.instead_of_flag is not None:
        return "none: it is a secret"
    return f"`{option.flag}{' ' + option.details.metavar if option.details.metavar else ''}`"


def _plain(option: KnownOption) -> str:
    listed = option.details.choices if option.details.aliases is None else None  # else the help lists them
    choices = f" ({' or '.join(listed)})" if listed else ""
    return option.details.help.replace("|", "\\|") + choices


def docs(page: str) -> str:
    """A page with the table between each ``<!-- options of ENGINE -->`` and ``<!-- end -->`` written anew."""

    def written(found: re.Match[str]) -> str:
        return f"{found[1]}\n\n{docs_table(found[2])}\n<!-- end -->"

    return re.sub(r"(<!-- options of (\w+) -->).*?<!-- end -->", written, page, flags=re.DOTALL)


def main() -> None:
    """Write core/verbs/arguments.py, and the tables on the pages that have one."""
    FILE.write_text(source())
    for page in PAGES:
        if (text := page.read_text()) != (written := docs(text)):
            page.write_text(written)


if __name__ == "__main__":
    main()
