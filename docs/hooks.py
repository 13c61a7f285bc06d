"""What the site needs in addition to mkdocs: pages from the root of the repository, and links that point outside docs/.

The same files are read on GitHub and on the site. There, README.md links to docs/compare.md, and docs/vllm.md to
../examples/…. Here, the first is a page next to it and the second a file in the repository. A link to a file that does
not exist stays as it is, and the strict build fails on it.
"""

from __future__ import annotations

import html
import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

from griffe import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PUBLISHED = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?=\))")
ARGUMENTS = "<!-- docs/hooks.py writes the tables of arguments here -->"
DOCTEST = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*)*", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Publish the pages of the root together with those of docs/."""
    for name, page in PUBLISHED.items():
        if (ROOT / name).exists():
            files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point every link to a file of the repository at its page, or at the repository."""
    origin = next((name for name, path in PUBLISHED.items() if path == page.file.src_uri), f"docs/{page.file.src_uri}")
    folder = posixpath.dirname(page.file.src_uri)

    def lead(found: re.Match[str]) -> str:
        path, anchor = found["path"], found["anchor"] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if target in PUBLISHED:
            return posixpath.relpath(PUBLISHED[target], folder or ".") + anchor
        if target.startswith("docs/"):
            return posixpath.relpath(target.removeprefix("docs/"), folder or ".") + anchor
        if (ROOT / target).exists():
            return f"{config.repo_url}/blob/main/{target}{anchor}"
        return found[0]

    markdown = LINK.sub(lead, markdown)
    return markdown.replace(ARGUMENTS, argument_tables()) if page.file.src_uri == "api.md" else markdown


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Without this mark, the theme asks GitHub for the number of stars on every page."""
    return output.replace('data-md-component="source"', "")


def argument_tables() -> str:
    """Every argument of a question, of an engine and of replicas, each with an anchor that signatures link to."""
    from scoremode.core.engine.registry import all_options
    from scoremode.core.text.corpus import TextArguments
    from scoremode.core.verbs.arguments import QuestionArguments
    from scoremode.core.verbs.compare import OutputArguments
    from scoremode.core.verbs.reference import FileArguments
    from scoremode.core.verbs.replicas import SpreadArguments

    owners = [("Of a text", TextArguments), ("Of a question", QuestionArguments)]
    owners += [("Of a reference", FileArguments), ("Of a comparison", OutputArguments)]
    owners += [("Of replicas", SpreadArguments)]
    parts = []
    for title, owner in owners:
        lines = re.findall(r"^    (\w+): ([^#\n]+?)(?:  # (.*))?$", inspect.getsource(owner), re.MULTILINE)
        parts.append(_table(title, [(name, kind, about) for name, kind, about in lines]))
    options = [
        (name, f"{option.kind} | None", f"{option.details.help} ({', '.join(engines)})")
        for name, (engines, option) in sorted(all_options().items())
    ]
    return "\n\n".join([*parts, _table("Of engines", options)])


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    """A table of arguments: name, type, meaning."""
    lines = [f"### {title}", "", "| argument | type | meaning |", "|---|---|---|"]
    for name, kind, about in rows:
        cells = (f"`{kind}`".replace("|", "\\|"), html.escape(about).replace("|", "\\|"))
        lines.append(f'| <a id="argument-{name}"></a>`{name}` | {cells[0]} | {cells[1]} |')
    return "\n".join(lines)


class DoctestsAsCode(Extension):
    """Docstrings are plain text with doctests: show these as code, and a role such as :func:`ask` as its name."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r":(?:func|class|mod|meth):(?=`)", "", obj.docstring.value)
            obj.docstring.value = DOCTEST.sub(_fenced, text)
        groups = [str(p.annotation) for p in getattr(obj, "parameters", ()) if "Unpack[" in str(p.annotation)]
        if groups and obj.docstring:
            obj.docstring.value += "\n\n" + _linked(groups[0])


def _linked(annotation: str) -> str:
    """The arguments that a function takes besides those of its signature, each a link to the table."""
    from scoremode.core.verbs import arguments, compare, reference, session

    group = re.findall(r"\w+", annotation)[-1]
    homes = (arguments, compare, reference, session)
    names = next(vars(home)[group].__annotations__ for home in homes if group in vars(home))
    # HTML, because mkdocstrings puts the function's name in front of the anchors of Markdown links
    return "More arguments: " + ", ".join(f'<a href="#argument-{n}"><code>{n}</code></a>' for n in names) + "."


def _fenced(found: re.Match[str]) -> str:
    return f"{found['indent']}```pycon\n{found[0]}\n{found['indent']}```"
