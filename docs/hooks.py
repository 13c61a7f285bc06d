"""What the site needs in addition to mkdocs: pages from the root of the repository, and links that point outside docs/.

The same files are read on GitHub and on the site. There, README.md links to docs/compare.md, and docs/vllm.md to
../examples/…. Here, the first is a page next to it and the second a file in the repository. A link to a file that does
not exist stays as it is, and the strict build fails on it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

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

    return LINK.sub(lead, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Without this mark, the theme asks GitHub for the number of stars on every page."""
    return output.replace('data-md-component="source"', "")
