"""Output files that users name: written through links, never over something else."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.core.disk.manifests import sealed_text
from scoremode.core.verbs.outputs import FileKind, check_output, check_report
from scoremode.errors import InputError, RunError

DATA = b"results\n"


def write(path: Path, data: bytes = DATA) -> None:
    check_output(path, "-o").write(data)


# ── plain files ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_new_file_is_written_and_nothing_by_the_check(tmp_path: Path) -> None:
    output = check_output(tmp_path / "new", "-o")
    assert os.listdir(tmp_path) == []
    output.write(DATA)
    assert (os.listdir(tmp_path), (tmp_path / "new").read_bytes()) == (["new"], DATA)


def test_files_and_folder_of_a_run_keep_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        sm.ppl("table:uniform", text="some text", out=tmp_path / "run")
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "run", *(tmp_path / "run").iterdir())}
    assert modes == {"run": 0o700, "manifest.json": 0o600, "scores.parquet": 0o600}


def test_a_file_that_cannot_be_replaced_is_an_error_with_its_name(tmp_path: Path) -> None:
    output = check_output(tmp_path / "new", "-o")
    (tmp_path / "new").mkdir()  # after the check
    with pytest.raises(RunError, match="new cannot be written"):
        output.write(DATA)
    assert os.listdir(tmp_path) == ["new"]


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("dangling", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, dangling: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "target"
    (tmp_path / "link").symlink_to(target)
    if not dangling:
        target.write_bytes(b"old")
        target.chmod(0o600)
    output = check_output(
        tmp_path / "link", "-o", FileKind("old", lambda file: frozenset() if file.read() == b"old" else None)
    )
    output.write(DATA)
    assert (tmp_path / "link").is_symlink()
    assert target.read_bytes() == DATA
    assert dangling or stat.S_IMODE(target.stat().st_mode) == 0o600, "a file that is replaced keeps its mode"


def test_links_to_nowhere_and_what_is_no_plain_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    Path("link").symlink_to(tmp_path / "no" / "target")
    Path("a").symlink_to(tmp_path / "b")
    Path("b").symlink_to(tmp_path / "a")
    Path("null").symlink_to("/dev/null")
    os.mkfifo("fifo")
    others = ("a", "null", "fifo", "socket", "/dev/full", "/dev/fd/987")
    refused = {"link": "there is no folder", **dict.fromkeys(others, "is not a plain file")}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for name, words in refused.items():
            with pytest.raises(InputError, match=words):
                check_output(name, "-o")


@pytest.mark.parametrize("name", ["/dev/stdout", "/proc/self/fd/1", "log", "link"])
def test_the_file_that_standard_output_goes_to_is_not_replaced(tmp_path: Path, name: str) -> None:
    """To replace it would lose what was printed before and after."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    code = (
        "from scoremode.core.verbs.outputs import check_output\n"
        f"try: check_output({name!r}, '-o')\nexcept Exception as error: print(error)"
    )
    with (tmp_path / "log").open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True, cwd=tmp_path)
    assert (tmp_path / "log").read_text() == f"{name} is not a plain file; give another file to -o\n"


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["", "a\0b", "new/", "no/new", "file/new", "n" * 300])
def test_a_name_that_cannot_be_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(DATA)
    with pytest.raises(InputError) as caught:
        check_output(name, "-o")
    assert caught.value.fix
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_is_made_later_may_be_missing(tmp_path: Path) -> None:
    later = tmp_path / "runs" / "out"
    for folder in (later, later.parent):
        assert check_output(folder / "r.html", "--report", made_later=later).path == folder / "r.html"
    with pytest.raises(InputError, match="there is no folder"):
        check_output(later / "deeper" / "r.html", "--report", made_later=later)
    with pytest.raises(InputError, match="is a folder"):
        check_output(later, "--report", made_later=later)


RUN = {"manifest.json": b'{"identity": {"model": "m"}}', "scores.parquet": b"columns"}


@pytest.mark.parametrize(
    "files",
    [
        RUN,
        {"manifest.json": RUN["manifest.json"]},
        {"manifest.json": b"{damaged", "scores.parquet": b"columns"},
        {"partial.journal": b""},
        {"reference.json": RUN["manifest.json"]},
    ],
    ids="+".join,
)
@pytest.mark.parametrize("name", ["manifest.json", "scores.parquet", "new.html"])
def test_nothing_is_written_into_a_run_or_a_reference(tmp_path: Path, files: dict[str, bytes], name: str) -> None:
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    (tmp_path.parent / f"{tmp_path.name}.link").symlink_to(tmp_path / name)
    for path in (tmp_path / name, tmp_path.parent / f"{tmp_path.name}.link"):
        with pytest.raises(InputError, match="run or reference"):
            check_output(path, "-o")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == files


@pytest.mark.parametrize("files", [{"scores.parquet": b"mine"}, {"manifest.json": b'{"name": "my web page"}'}])
def test_files_of_the_same_name_do_not_make_a_folder_ours(tmp_path: Path, files: dict[str, bytes]) -> None:
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    write(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == DATA


PAGE = sealed_text("<!doctype html>\n", ["ab" * 8], ("<!-- ", " -->"))


# ── reports ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_older_report_and_an_empty_file_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    for before in ("", PAGE):
        path.write_text(before)
        check_report(path, page=PAGE + "").write(DATA)
        assert path.read_bytes() == DATA


MARKED = b'<!doctype html><meta name="generator" content="scoremode 0.1.0">\n<!-- scoremode: about 00, seal 00 -->\n'


@pytest.mark.parametrize(
    "before",
    [b"my notes", b"<!doctype html><html>another page</html>", MARKED, PAGE.encode() + b"\n", b" " + PAGE.encode()],
)
def test_any_other_file_is_refused(tmp_path: Path, before: bytes) -> None:
    (tmp_path / "notes").write_bytes(before)
    with pytest.raises(InputError, match="exists and is not a report of scoremode") as caught:
        check_report(tmp_path / "notes")
    assert caught.value.fix == "give another -o, or remove the file"
    assert (tmp_path / "notes").read_bytes() == before
