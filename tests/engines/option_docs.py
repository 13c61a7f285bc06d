"""Writes what is made from declarations of arguments: types and texts for editors, tables for docs, docs/api.md.

    python -m tests.engines.option_docs        # after an argument changed; ``make format`` does it too

At run time the declarations themselves decide; a test compares these files with them.
"""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import fill

from scoremode.core.engine.options import KnownOption
from scoremode.core.engine.registry import GROUP, all_options, known_engines
from scoremode.core.verbs.shared_flags import argument_texts
from tests import api_docs

ROOT = Path(__file__).parents[2]
VERBS = ROOT / "src" / "scoremode" / "core" / "verbs"
OPTIONS = VERBS / "engine_options.py"
FILES = (VERBS / "arguments.py", VERBS / "replicas.py", ROOT / "src" / "scoremode" / "core" / "text" / "corpus.py")
PAGES = sorted((ROOT / "docs").glob("*.md"))
GROUPS = re.compile(r'(class (?:Text|Question|Spread)Arguments\(.*\n    """.*"""\n\n)((?:    .*\n)+)')
FIELD = re.compile(r'^(    (\w+): .*\n)(?:    """[\s\S]*?"""\n)?', re.MULTILINE)
INDENT = " " * 4
HEAD = '''\
"""The options of the built-in engines, for editors, type checkers and ``help()``: written by ``make format``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from scoremode.core.engine.options import Pairs, Plain


class EngineOptionArguments(TypedDict, total=False):
    """Options of an engine, by name. None means: the engine's own choice."""

'''


def options_module() -> str:
    """The text of core/verbs/engine_options.py."""
    brought = {point.name for point in entry_points(group=GROUP)}  # engines of other packages
    options = {name: option for name, (engines, option) in sorted(all_options().items()) if set(engines) - brought}
    return HEAD + with_texts("".join(f"    {n}: {option.type_in_python()} | None\n" for n, option in options.items()))


def with_texts(fields: str) -> str:
    """Fields of a TypedDict, each with what it does below it: there editors look for it."""

    def written(field: re.Match[str]) -> str:
        about = f'"""{argument_texts()[field[2]]}"""'
        return field[1] + fill(about, 120, initial_indent=INDENT, subsequent_indent=INDENT) + "\n"

    return FIELD.sub(written, fields)


def groups(source: str) -> str:
    """A module with the texts of its groups of arguments written anew."""
    return GROUPS.sub(lambda group: group[1] + with_texts(group[2]), source)


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


def made_files() -> dict[Path, str]:
    """Every file of which a part is made, with its text."""
    made = {OPTIONS: options_module(), **{file: groups(file.read_text()) for file in FILES}}
    return made | {page: docs(page.read_text()) for page in PAGES} | {api_docs.PAGE: api_docs.page()}


def main() -> None:
    """Write the files that are not up to date."""
    for path, text in made_files().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main()
