"""scoremode card --write: only what stands between two markers changes, whatever the rest of the file is."""

from __future__ import annotations

from pathlib import Path

import pytest

from scoremode.errors import InputError
from scoremode.reports.card import MARKERS, YAML_MARKERS, check_readme, replace_between

BEGIN, END = MARKERS
TEXT = "| a ± b |\n| – |\n"


def file_with(folder: Path, content: bytes) -> Path:
    path = folder / "README.md"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_every_other_byte_stays(tmp_path: Path, encoding: str, end: str) -> None:
    page = f"# Größe{end}{end}{BEGIN}{end}old{end}{END}{end}ende ß, no final line"
    path = file_with(tmp_path, page.encode(encoding))
    assert replace_between(check_readme(str(path), MARKERS), TEXT, MARKERS)
    assert path.read_bytes() == page.replace(f"{end}old{end}", f"\n{TEXT}".replace("\n", end)).encode(encoding)
    assert not replace_between(check_readme(str(path), MARKERS), TEXT, MARKERS), "nothing is left to change"


def test_metadata_has_markers_of_its_own(tmp_path: Path) -> None:
    path = file_with(tmp_path, b"---\nlicense: mit\n# scoremode begin\n# scoremode end\n---\n# Title\n")
    assert replace_between(check_readme(str(path), YAML_MARKERS), "model-index: []\n", YAML_MARKERS)
    assert path.read_text() == "---\nlicense: mit\n# scoremode begin\nmodel-index: []\n# scoremode end\n---\n# Title\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"# Title\n", f"does not have one .*; add these two lines .*{BEGIN} and {END}"),
        (f"{BEGIN}\n".encode(), "does not have one"),
        (f"{END}\n{BEGIN}\n".encode(), "does not have one"),
        (f"{BEGIN}\n{END}\n{BEGIN}\n{END}\n".encode(), "does not have one"),
        (f"{BEGIN}\n{END}\nß".encode("cp1252"), "is not UTF-8"),
    ],
)
def test_a_file_without_a_clear_place_is_left_alone(tmp_path: Path, content: bytes, words: str) -> None:
    path = file_with(tmp_path, content)
    with pytest.raises(InputError, match=words):
        check_readme(str(path), MARKERS)
    assert path.read_bytes() == content


def test_a_missing_file_is_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be read \(No such file"):
        check_readme(str(tmp_path / "README.md"), MARKERS)
