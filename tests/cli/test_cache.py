"""scoremode cache and scoremode cache prune."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from scoremode.core.disk.folders import ABOUT
from scoremode.core.disk.locks import Lock
from tests.command_line import Command, Refused

DAY = 86_400.0
PPL = ("ppl", "table:uniform", "--text")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SCOREMODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SCOREMODE_CACHE_LIMIT", raising=False)
    return tmp_path / "cache"


def kept(command: Command, text: str, days: float = 0.0) -> str:
    """A run in the cache, last used so many days ago; its path in the cache."""
    folder = Path(command(*PPL, text, "--json").json["run"])
    os.utime(folder / "manifest.json", (time.time() - days * DAY,) * 2)
    return f"runs/{folder.name}"


# ── list ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_empty_cache(command: Command, root: Path) -> None:
    outcome = command("cache")
    assert (outcome.code, outcome.err) == (0, "")
    assert " ".join(outcome.out.split()) == f"{root}: 0 B, limit 50 GB for runs and references"


def test_runs_are_listed_newest_use_first_with_totals(command: Command, root: Path) -> None:
    old, new = kept(command, "an old text", 40), kept(command, "a new text", 3)
    lines = command("cache").out.splitlines()
    order = [line.split()[0] for line in lines if line.startswith("runs/")]
    assert order == [new, old]
    [line] = [line for line in lines if line.startswith(old)]
    assert "40 d ago" in line
    assert line.endswith("ago   table:uniform, text, sliding-once, table")
    assert any(line.startswith("2 runs, ") for line in lines)
    assert any(line.startswith(f"{root}: ") for line in lines)


def test_as_json(command: Command, root: Path) -> None:
    path = kept(command, "a text", 2)
    found = command("cache", "--json").json
    assert (found["folder"], found["limit"]) == (str(root), 50 * 10**9)
    [entry] = [entry for entry in found["entries"] if entry["kind"] == "runs"]
    assert (entry["path"], entry["contents"]) == (path, "table:uniform, text, sliding-once, table")
    assert entry["age_seconds"] == pytest.approx(2 * DAY, abs=60)
    assert found["totals"]["runs"] == {"entries": 1, "size": entry["size"]}
    assert found["size"] == sum(entry["size"] for entry in found["entries"])


def test_an_unfinished_entry_says_what_it_is_of(command: Command, root: Path) -> None:
    folder = root / kept(command, "a text")
    (folder / "manifest.json").rename(folder / ABOUT)
    entries = {entry["kind"]: entry for entry in command("cache", "--json").json["entries"]}
    assert entries["runs"]["contents"] == "unfinished: table:uniform, text, sliding-once, table"


def test_only_one_kind(command: Command) -> None:
    kept(command, "a text")
    assert command("cache", "--kind", "references", "--json").json["entries"] == []
    assert len(command("cache", "--kind", "runs", "--kind", "references", "--json").json["entries"]) == 1


def test_what_others_wrote_is_harmless_to_a_terminal(command: Command, root: Path) -> None:
    folder = root / "runs" / ("0" * 20)
    folder.mkdir(parents=True)
    (folder / "scores.parquet").touch()
    (folder / "manifest.json").write_text(json.dumps({"format": 2, "identity": {}, "model": "\x1b[2Jevil\nline"}))
    (root / "a\x1b[2J\nfile").touch()
    outcome = command("cache")
    assert outcome.code == 0
    assert "\x1b" not in outcome.out
    assert len(outcome.out.splitlines()) == 5


def test_a_cache_folder_that_is_a_file(refused: Refused, root: Path) -> None:
    root.write_text("not a folder")
    assert "Not a directory" in refused("cache")


# ── prune ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_prune_says_what_it_removed_and_what_was_freed(command: Command, root: Path) -> None:
    old, new = kept(command, "an old text", 40), kept(command, "a new text", 3)
    size = sum(path.stat().st_size for path in (root / old).iterdir())
    planned = command("cache", "prune", "--older-than", "30d", "--dry-run")
    assert planned.out.splitlines()[-1].startswith("would remove 1 run (")
    assert (root / old).exists()
    outcome = command("cache", "prune", "--older-than", "30d", "--json")
    assert [entry["path"] for entry in outcome.json["removed"]] == [old]
    assert outcome.json["freed"] == size
    assert ((root / old).exists(), (root / new).exists()) == (False, True)
    assert command("cache", "prune", "--older-than", "4w").out.startswith("removed nothing; ")


def test_a_skipped_entry_is_said(command: Command, root: Path) -> None:
    path = kept(command, "a text", 40)
    lock = Lock(root / path / ".lock")
    assert lock.acquire()
    outcome = command("cache", "prune", "--older-than", "1h")
    lock.release()
    assert f"skipped {path}: another process is using it\n" in outcome.out


# ── the limit ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_bad_limit(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE_LIMIT", "fifty")
    assert "SCOREMODE_CACHE_LIMIT: 'fifty' is not a size" in refused(*PPL, "a text")
    assert "SCOREMODE_CACHE_LIMIT" in refused("cache")
