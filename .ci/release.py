"""What a release takes from the files of the repository. .github/workflows/release.yml calls it.

python .ci/release.py check v0.2.0     tag, package and citation have one version, and the changelog has its section
python .ci/release.py notes v0.2.0     prints that section: the text of the release
python .ci/release.py readme v0.2.0    lets the links of README.md name the repository: PyPI shows it alone
python .ci/release.py site FOLDER      writes index.html into the folder that has the documentation of each version
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REPOSITORY = "https://github.com/scoremode/scoremode"
STATED = {
    "pyproject.toml": r'^version = "(.+)"$',
    "src/scoremode/version.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def version_of(tag: str) -> str:
    if not re.fullmatch(r"v\d+\.\d+\.\d+((a|b|rc)\d+)?", tag):
        sys.exit(f"{tag} is not the tag of a release; give one such as v0.2.0 or v0.2.0rc1")
    return tag[1:]


def check(tag: str) -> None:
    version = version_of(tag)
    for file, pattern in STATED.items():
        (stated,) = re.findall(pattern, Path(file).read_text(encoding="utf-8"), re.MULTILINE)
        if stated != version:
            sys.exit(f"{file} has version {stated}, and the tag is {tag}; change one of them")
    section(version)


def section(version: str) -> str:
    """The text of a version in the changelog, from its heading to the next."""
    parts = re.split(r"^## +(.*)$", Path("CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = [text.strip() for title, text in zip(parts[1::2], parts[2::2], strict=True) if title.split()[0] == version]
    if len(found) != 1 or not found[0]:
        sys.exit(f"CHANGELOG.md has no text under '## {version}'; rename '## Unreleased'")
    return found[0]


def notes(tag: str) -> None:
    print(section(version_of(tag)))


def readme(tag: str) -> None:
    version_of(tag)

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({REPOSITORY}/{kind}/{tag}/{link[3]})"

    file = Path("README.md")
    file.write_text(LINK.sub(absolute, file.read_text(encoding="utf-8")), encoding="utf-8")


def site(folder: str) -> None:
    """The list of all versions, the newest first; a pre-release comes before its release."""

    def age(version: str) -> list[tuple[int, ...]]:
        release, _, candidate = re.sub(r"a|b|rc", "-", version).partition("-")
        return [tuple(map(int, release.split("."))), (0, int(candidate)) if candidate else (1,)]

    found = [path.parent.name for path in Path(folder).glob("*/index.html") if path.parent.name[0].isdigit()]
    rows = "".join(f'<li><a href="{one}/">{one}</a></li>' for one in sorted(found, key=age, reverse=True))
    page = f"<!doctype html><meta charset=utf-8><title>scoremode</title><h1>scoremode</h1><ul>{rows}</ul>\n"
    Path(folder, "index.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    verbs = {"check": check, "notes": notes, "readme": readme, "site": site}
    if len(sys.argv) != 3 or sys.argv[1] not in verbs:
        sys.exit(__doc__)
    verbs[sys.argv[1]](sys.argv[2])
