"""A manifest that was changed in any field, by accident or on purpose, gives an error of one line, never a crash."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import scoremode as sm
from scoremode.cli.main import main
from scoremode.core.disk.files import file_sha256
from scoremode.core.disk.manifests import sealed
from scoremode.core.plan.question import Question
from scoremode.core.store.run import StoredQuestion
from scoremode.core.store.runs import MANIFEST, SCORES
from scoremode.core.verbs.compare import compare
from scoremode.core.verbs.reference import reference
from scoremode.errors import RunError
from tests.house import needs_wing

ASKED: dict[str, Any] = {"text": "abcdefgh" * 4, "context_length": 16, "stride": 8}
FLAGS = ["--text", ASKED["text"], "--context-length", "16", "--stride", "8"]
DEEP = json.loads("[" * 40 + "]" * 40)
WRONG: tuple[Any, ...] = (None, True, -1, 0, 1e308, 10**400, "<img src=x>", "\ud800", [], [None], {"x": [{}]}, DEEP)

SERVED = {
    "model_format": "GGUF Q4_K_M",
    "bits_per_weight": 4.85,
    "weight_bytes": 485,
    "sizes": {"body": {"bytes": 400, "weights": 700}, "embedding": {"bytes": 85, "weights": 100}},
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, a reference, and a candidate that was scored against it."""
    folder = tmp_path_factory.mktemp("stored")
    sm.ppl("table:uniform", out=folder / "run", **ASKED)
    reference("table:uniform", folder / "ref", **ASKED)
    compare(str(folder / "ref"), "table:uniform", out=folder / "out")
    path = folder / "out/table:uniform" / MANIFEST
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), **SERVED})))
    return folder


def places(value: Any, so_far: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field of a manifest, at any depth; of a list, only its first element."""
    if isinstance(value, dict):
        for name in value:
            yield (*so_far, name)
            yield from places(value[name], (*so_far, name))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*so_far, 0))


def changed(manifest: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(manifest)
    inner: Any = made
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    return made


def verbs(folder: Path) -> dict[str, list[list[str]]]:
    """The commands that read each of the three folders."""
    run, ref, candidate = (str(folder / name) for name in ("run", "ref", "out/table:uniform"))
    page = str(folder / "page.html")
    return {
        "run": [
            ["report", run],
            ["report", run, "--json"],
            ["report", run, "-o", page],
            ["compare", run, candidate],
            ["ppl", "table:uniform", *FLAGS, "--out", run],
        ],
        "ref": [
            ["report", ref, candidate, "-o", page],
            ["compare", ref, "table:uniform", "--json", "--out", str(folder / "out")],
            ["reference", "table:uniform", *FLAGS, "--out", ref],
        ],
        "out/table:uniform": [["compare", ref, candidate, "--markdown"], ["report", ref, candidate, "-o", page]],
    }


def can_be_read(folder: Path) -> bool:
    try:
        sm.load(folder)
    except RunError:
        return False
    return True


@needs_wing("reports/html")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "ref", "out/table:uniform"])
def test_no_wrong_value_in_any_field_is_a_crash(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Every field × wrong values × the verbs that read it, with the old seal and with a recomputed one.

    Each field gets one of the wrong values, the next field another; ``SCOREMODE_HOSTILE=all`` gives all.
    """
    folder = tmp_path / "stored"
    shutil.copytree(stored, folder)
    path = folder / name / MANIFEST
    manifest = json.loads(path.read_text())
    commands = verbs(folder)[name]
    assert [main(command) for command in commands] == [0] * len(commands)
    capsys.readouterr()
    tried, wrong, turn = 0, [], itertools.cycle(commands)
    fields = list(places(manifest))
    every = 1 if os.environ.get("SCOREMODE_HOSTILE") == "all" else len(WRONG)
    chosen = [(place, value) for i, place in enumerate(fields) for value in WRONG[i % every :: every]]
    for place, value in chosen:
        hostile = changed(manifest, place, value)
        for made in [hostile] if hostile == manifest or place == ("seal",) else [hostile, sealed(hostile)]:
            path.write_text(json.dumps(made))
            readable = can_be_read(folder / name)
            assert not readable or made == sealed(hostile)
            for command in commands if readable else [next(turn)]:  # what cannot be read is refused in one place
                code, error = main(command), capsys.readouterr().err
                tried += 1
                page = (folder / "page.html").read_text()
                if "<img" in page or not ((readable and code == 0) or (code == 2 and error.count("\n") == 1)):
                    wrong.append((place, repr(value)[:30], command[0], code, error[:200]))
    assert not wrong, f"{len(wrong)} of {tried}: {wrong[:5]}"
    assert tried > 1500 / every


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"[" * 200_000, b'{"a":' * 100_000, b"\xff\xfe", b'{"format": NaN}', b"null"]
)
def test_what_is_no_manifest_is_one_line_from_every_verb(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes
) -> None:
    folder = tmp_path / "stored"
    shutil.copytree(stored, folder)
    for name, commands in verbs(folder).items():
        before = (folder / name / MANIFEST).read_bytes()
        (folder / name / MANIFEST).write_bytes(data)
        for command in commands:
            assert main(command) == 2
            assert capsys.readouterr().err.count("\n") == 1
        (folder / name / MANIFEST).write_bytes(before)
    (folder / "run" / MANIFEST).write_bytes(data)
    again = main(["ppl", "table:uniform", *FLAGS, "--out", str(folder / "run"), "--fresh"])
    assert again == (2 if data else 0), "it may be somebody's own"
    assert ((folder / "run" / MANIFEST).read_bytes() == data) is bool(data)


def test_columns_of_something_else_are_refused(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "stored"
    shutil.copytree(stored, folder)
    path, columns = folder / "run" / MANIFEST, folder / "run" / SCORES
    manifest, table = json.loads(path.read_text()), pq.read_table(columns)
    pq.write_table(table.drop_columns(["rank"]), columns)
    for sha256 in (manifest["scores_sha256"], file_sha256(columns)):
        path.write_text(json.dumps(sealed({**manifest, "scores_sha256": sha256})))
        for command in verbs(folder)["run"]:
            assert main(command) == 2, command
            assert capsys.readouterr().err.count("\n") == 1


def test_the_table_of_questions_names_what_can_be_asked() -> None:
    """Also another tokenizer, which references store as well."""
    assert set(StoredQuestion.__struct_fields__) == {*Question.options(), "tokenizer"}
