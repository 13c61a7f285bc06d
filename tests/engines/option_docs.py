"""Writes what is made from declarations of arguments: types and texts for editors, tables for docs, docs/api.md.

    python -m tests.engines.option_docs        # after an argument changed; ``make format`` does it too

At run time the declarations themselves decide; a test compares these files with them.
"""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import fill

from scoremode.core.engine.registry import GROUP, all_options, known_engines
from scoremode.core.options import KnownOption
from scoremode.core.plan.question import Question
from scoremode.core.verbs.replicas import Spread
from scoremode.core.verbs.shared_flags import shared_texts
from scoremode.errors import in_python
from tests import api_docs

ROOT = Path(__file__).parents[2]
ARGUMENTS = ROOT / "src" / "scoremode" / "core" / "verbs" / "argument_types.py"
PAGES = sorted((ROOT / "docs").glob("*.md"))
INDENT = " " * 4
HEAD = '''\
"""The arguments of verbs by name, for editors, type checkers and ``help()``: written by ``make format``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from scoremode.core.options import Pairs, Plain
from scoremode.core.text.corpus import Corpus, CorpusSource, Spec
'''


def arguments_module() -> str:
    """The text of core/verbs/argument_types.py."""
    brought = {point.name for point in entry_points(group=GROUP)}  # engines of other packages
    options = {name: option for name, (engines, option) in sorted(all_options().items()) if set(engines) - brought}
    types = {f"{group.__name__}Arguments": {f.name: str(f.type) for f in fields(group)} for group in (Question, Spread)}
    types["EngineOptionArguments"] = {name: option.type_in_python() for name, option in options.items()}
    abouts = {
        "QuestionArguments": "A text, and the method that scores it. None means: the default.",
        "SpreadArguments": "One model as several replicas. None of them is part of a run's identity.",
        "EngineOptionArguments": "Options of an engine. None means: the engine's own choice.",
    }
    return HEAD + "".join(_group(name, abouts[name], each) for name, each in types.items())


def _group(name: str, about: str, types: dict[str, str]) -> str:
    """A TypedDict whose fields have what they do below them: there editors look for it."""
    texts = argument_texts()
    written = [f'\n\nclass {name}(TypedDict, total=False):\n    """{about}"""\n\n']
    for field, kind in types.items():
        text = fill(f'"""{texts[field]}"""', 120, initial_indent=INDENT, subsequent_indent=INDENT)
        written.append(f"    {field}: {kind.removesuffix(' | None')} | None\n{text}\n")
    return "".join(written)


def argument_texts() -> dict[str, str]:
    """What every argument does, by its name in Python."""
    options = {name: option for name, (_, option) in sorted(all_options().items())}
    declared = {**Question.options(), **Spread.options(), **options}
    return {name: in_python(option.details.help) for name, option in declared.items()} | shared_texts()


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
    pages = {page: docs(page.read_text()) for page in PAGES}
    return {ARGUMENTS: arguments_module(), **pages, api_docs.PAGE: api_docs.page(argument_texts())}


def main() -> None:
    """Write the files that are not up to date."""
    for path, text in made_files().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    main()
