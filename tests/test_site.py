"""The documentation as a site: it builds without a warning, has every page and public name, and needs no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import scoremode
from tests.browser import CHROMIUM, Browser

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


class Page(HTMLParser):
    """What a page loads, where it links to, and which anchors it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag in LOADS and LOADS[tag] in given and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given[LOADS[tag]])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly, with a proxy that refuses everything: a build that wants the network fails.

    Not with --quiet: it hides warnings, and then mkdocs does not count them.
    """
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    navigation = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert pages <= set(navigation)
    assert len(navigation) == len(set(navigation))
    assert not list(site.rglob("__pycache__"))
    assert [page for page in navigation if not (site / page).with_suffix(".html").exists()] == []


def test_every_public_name_has_a_section_on_the_api_page(pages: dict[Path, Page], site: Path) -> None:
    names = {f"scoremode{name.lower()}" for name in scoremode.__all__ if name != "__version__"}
    assert names <= pages[site / "api.html"].anchors


def test_nothing_is_loaded_from_the_network(site: Path, pages: dict[Path, Page]) -> None:
    loaded = {source for page in pages.values() for source in page.loads}
    assert [
        source for source in loaded if urlsplit(source).scheme in ("http", "https") or source.startswith("//")
    ] == []
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?https?:", styles) == []


def test_internal_links_lead_to_a_page_and_its_anchor(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links begin at the root of the server
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            missing = not target.exists() or (
                anchor and target in pages and anchor not in pages[target].anchors and anchor != "__skip"
            )
            if missing:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
def test_the_search_finds_pages_on_a_disk(site: Path, tmp_path: Path) -> None:
    """Opened as a file: the index is a script, and the worker a hidden frame."""
    browser = Browser(tmp_path)
    try:
        browser.screen(1280)
        browser.open(site / "index.html")
        found = browser.ask(
            "new Promise((found) => {"
            "const field = document.querySelector('[data-md-component=search-query]');"
            "field.focus(); field.value = 'Pinsker'; field.dispatchEvent(new Event('keyup', {bubbles: true}));"
            "const look = () => [...document.querySelectorAll('.md-search-result__link')].map((a) => a.href);"
            "const timer = setInterval(() => look().length && (clearInterval(timer), found(look())), 50); })"
        )
        assert "/reading.html" in found[0]
        assert browser.problems() == []
    finally:
        browser.close()
