"""The cache's entries and their removal: only scoremode's own, never one in use, complete or clearly marked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import scoremode as sm
from scoremode.cli.cache import cache
from scoremode.core.cache.entries import (
    CHANGED,
    IN_USE,
    cache_limit,
    entries,
    evict,
    hold_entry,
    inspect_entry,
    make_room,
    mark_used,
    remove,
)
from scoremode.core.cache.units import parse_age, parse_size
from scoremode.core.disk import locks
from scoremode.core.disk.folders import entry_folder
from scoremode.core.disk.locks import Lock
from scoremode.core.store import runs
from tests import forked

DAY = 86_400.0
HELD = """
import sys
from pathlib import Path
from scoremode.core.disk.locks import Lock
assert Lock(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.readline()
"""
READING = """
import sys
from scoremode.core.references.reader import Reference
reference = Reference.open(sys.argv[1])
print("held", flush=True)
sys.stdin.readline()
"""
STOPS_AFTER_RENAMING = """
import shutil, time
def wait(path, ignore_errors):
    print("renamed", flush=True)
    time.sleep(60)
shutil.rmtree = wait
from scoremode.cli.cache import cache
cache("prune", older_than=0.0)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache without a limit."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SCOREMODE_CACHE", str(folder))
    monkeypatch.setenv("SCOREMODE_CACHE_LIMIT", "none")
    return folder


@pytest.fixture
def a_run(root: Path) -> Callable[..., Path]:
    """A run in the cache: last used this many days ago, with this many bytes of scores beside its manifest."""
    made = iter(range(100_000))

    def make(days: float = 0.0, size: int = 1000, kind: str = "runs") -> Path:
        folder = root / kind / f"{next(made):020x}"
        folder.mkdir(parents=True)
        manifest = {"format": 2, "identity": {}, "model": "m", "targets": 5}
        text = json.dumps(manifest)
        (folder / "scores.parquet").write_bytes(b"x" * (size - len(text)))
        if kind == "references":
            (folder / "reference.json").write_text("")
        (folder / "manifest.json").write_text(text)
        os.utime(folder / "manifest.json", (time.time() - days * DAY,) * 2)
        return folder

    return make


@contextmanager
def another_process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lock until the block ends."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip()
        try:
            yield process
        finally:
            process.kill()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ── units ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("0GB", 0), ("1B", 1), ("500mb", 500 * 10**6), ("2kB", 2000), ("2KiB", 2048)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "10", "10G", "-1GB", "1e3MB", "nanGB", "1,5GB", "10XB", " 10GB", "١GB"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size, as in 500MB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "d", "30", "30m", "30D", "-1d", "1d2h", "1e9d", "nand", "1" * 500 + "d"])
def test_what_is_not_an_age(text: str) -> None:
    with pytest.raises(ValueError, match="is not an age, as in 12h") as error:
        parse_age(text)
    assert len(str(error.value)) < 150


@pytest.mark.parametrize(
    ("given", "limit"), [("", 50 * 10**9), ("20GB", 20 * 10**9), ("0", None), ("none", None), ("None", None)]
)
def test_the_limit(given: str, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCOREMODE_CACHE_LIMIT", given)
    assert cache_limit() == limit


# ── what is there ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_real_runs_and_references_are_described(root: Path) -> None:
    sm.ppl("table:uniform", text="any text")
    sm.reference("table:uniform", text="any text")
    found = {entry["kind"]: entry for entry in cache()["entries"]}
    for entry in (found["runs"], found["references"]):
        assert entry["contents"] == "table:uniform, text, sliding-once, table"
        assert entry["size"] == sum(path.stat().st_size for path in (root / entry["path"]).iterdir())


def test_an_unfinished_run_is_listed(root: Path) -> None:
    identity = {"model": "fingerprint", "corpus": "sha", "engine": "table", "plan": "digest"}
    with runs.Claim(entry_folder("runs", identity), identity) as claim:
        claim.begin()
    [entry] = cache()["entries"]
    assert entry["contents"] == "unfinished"


@pytest.mark.parametrize(
    ("manifest", "contents"),
    [
        (b"", "manifest.json cannot be read"),
        (b"\xff\xfe", "manifest.json cannot be read"),
        (b"[" * 200_000, "manifest.json cannot be read"),
        (b"[]", "manifest.json cannot be read"),
        (b"{}", ""),
        (b'{"format": 1, "model": {"a": 1}, "facts": 5, "corpus": "\\ud800", "engine": "table"}', "table"),
    ],
)
def test_any_manifest_is_listed_and_can_be_removed(
    manifest: bytes, contents: str, a_run: Callable[..., Path], root: Path
) -> None:
    folder = a_run()
    (folder / "manifest.json").write_bytes(manifest)
    [entry] = cache()["entries"]
    assert entry["contents"] == contents
    assert len(cache("prune", older_than=0.0)["removed"]) == 1
    assert names(root / "runs") == set()


def test_damaged_folders_of_our_own_names(a_run: Callable[..., Path], root: Path) -> None:
    (a_run() / "scores.parquet").unlink()
    (a_run() / "manifest.json").unlink()
    (root / "runs" / ("f" * 20)).mkdir()
    journal = root / "runs" / ("e" * 20)
    journal.mkdir()
    (journal / "partial.journal").write_bytes(b"\x00\x01")
    assert len(cache()["entries"]) == 4
    assert len(cache("prune", older_than=0.0)["removed"]) == 4


def foreign_things(root: Path, a_run: Callable[..., Path]) -> dict[str, Path]:
    """Things in a cache folder that scoremode did not put there."""
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_text("years of work")
    beside, linked = a_run(99), a_run(99)
    (beside / "notes.txt").write_text("mine")
    (linked / "scores.parquet").unlink()
    (linked / "scores.parquet").symlink_to(outside / "thesis.txt")
    mine = root / "runs" / "my-run"
    shutil.copytree(a_run(), mine)
    (root / "runs" / ("a" * 20)).symlink_to(outside)
    (root / "runs" / ("b" * 20)).write_text("a file")
    (root / "references").symlink_to(outside)
    (root / "models" / "my-model").mkdir(parents=True)
    (root / "models" / "my-model" / "config.json").write_text("{}")
    own = {"my-checkpoint": '{"scoremode": 1}', "with-notes": '{"source": "", "sha256": "", "conversion": 1}'}
    for name, mark in own.items():
        (root / "models" / name).mkdir()
        (root / "models" / name / "scoremode.json").write_text(mark)
        (root / "models" / name / "model.safetensors").write_text("mine")
    (root / "models" / "with-notes" / "notes.txt").write_text("mine")
    for name in ("files/" + "c" * 20, "files/.removed-a-" + "d" * 16, "runs/.removed-b-" + "d" * 16):
        (root / name).mkdir(parents=True)
        (root / name / "thesis.txt").write_text("mine")
        (root / name / "notes.txt").write_text("mine")
    (beside / ".scoremode-mine.tmp").write_text("mine")
    (root / "photos").mkdir()
    (root / "photos" / "cat.jpg").write_text("cat")
    (root / os.fsdecode(b"not-utf8-\xff")).write_text("x")
    return {"outside": outside, "cache": root}


def everything(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path): path.read_bytes() if path.is_file() and not path.is_symlink() else None for path in folder.rglob("*")
    }


def test_nothing_that_is_not_ours_is_removed_measured_or_followed(a_run: Callable[..., Path], root: Path) -> None:
    places = foreign_things(root, a_run)
    shutil.rmtree(a_run(0).parent / f"{2:020x}")  # the one that was copied
    ours = f"{3:020x}"
    before = {name: everything(folder) for name, folder in places.items()}
    found = cache()
    assert ([entry["path"] for entry in found["entries"]], found["size"]) == ([f"runs/{ours}"], 1000)
    removed = cache("prune", older_than=0.0, larger_than=0)["removed"]
    assert [entry["path"] for entry in removed] == [f"runs/{ours}"]
    after = {name: everything(folder) for name, folder in places.items()}
    assert {path for path in before["cache"] if path not in after["cache"]} == {
        path for path in before["cache"] if ours in path
    }
    assert after["outside"] == before["outside"]


def test_a_model_that_this_process_uses_stays(root: Path) -> None:
    model = root / "models" / "smollm2-135m-1"
    model.mkdir(parents=True)
    (model / "scoremode.json").write_text(json.dumps({"source": "a.gguf", "sha256": "0", "conversion": 1}))
    (model / "model.safetensors").write_bytes(b"x" * 500)
    hold_entry(model)
    [entry] = cache("prune", older_than=0.0)["skipped"]
    assert (entry["reason"], entry["contents"], entry["size"] > 500) == (IN_USE, "a.gguf", True)
    os.close(locks._shared.popitem()[1])
    assert len(cache("prune", older_than=0.0)["removed"]) == 1
    assert names(root / "models") == set()


# ── which go ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("older", "larger", "left"),
    [
        (25 * DAY, None, {0, 10, 20}),
        (100 * DAY, None, {0, 10, 20, 30}),
        (0.0, None, set()),
        (None, 10_000, {0, 10, 20, 30}),
        (None, 4000, {0, 10, 20, 30}),
        (None, 3999, {0, 10, 20}),
        (None, 1500, {0}),
        (None, 0, set()),
        (25 * DAY, 2000, {0, 10}),
        (5 * DAY, 2000, {0}),
    ],
)
def test_what_is_old_goes_and_then_what_was_used_least_recently(
    older: float | None, larger: int | None, left: set[int], a_run: Callable[..., Path], root: Path
) -> None:
    days = {a_run(days).name: days for days in (20, 0, 30, 10)}
    planned = evict(entries(root), older_than=older, larger_than=larger, dry_run=True)
    assert len(names(root / "runs")) == 4, "a dry run removes nothing"
    outcome = evict(entries(root), older_than=older, larger_than=larger)
    assert {days[name] for name in names(root / "runs")} == left
    assert outcome.left == 1000 * len(left)
    assert outcome.freed == 4000 - outcome.left
    assert [entry.path for entry in planned.removed] == [entry.path for entry in outcome.removed]


def test_only_the_chosen_kinds(a_run: Callable[..., Path], root: Path) -> None:
    a_run(3), a_run(2, kind="references")
    assert [e["kind"] for e in cache("prune", larger_than=0, kind=["references"])["removed"]] == ["references"]
    assert len(names(root / "runs")) == 1


# ── in use ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_folder_that_another_process_writes_into_stays(a_run: Callable[..., Path], root: Path) -> None:
    held, free = a_run(9), a_run(9)
    with another_process(HELD, held / ".lock"):
        outcome = cache("prune", larger_than=0)
    assert [(entry["path"], entry["reason"]) for entry in outcome["skipped"]] == [(f"runs/{held.name}", IN_USE)]
    assert [entry["path"] for entry in outcome["removed"]] == [f"runs/{free.name}"]
    assert names(held) == {"scores.parquet", "manifest.json", ".lock"}
    assert cache("prune", larger_than=0)["skipped"] == [], "the lock ends with its process, kill -9 included"


def test_a_reference_that_another_process_reads_stays(root: Path) -> None:
    folder = str(sm.reference("table:uniform", text="any text").path)
    with another_process(READING, folder):
        assert [entry["reason"] for entry in cache("prune", older_than=0.0)["skipped"]] == [IN_USE]
    assert len(cache("prune", older_than=0.0)["removed"]) == 1


def test_what_was_used_since_it_was_listed_stays(a_run: Callable[..., Path], root: Path) -> None:
    folder = a_run(9)
    [entry] = entries(root)
    mark_used(folder)
    assert remove(entry) == CHANGED
    assert names(folder) == {"scores.parquet", "manifest.json"}


def test_a_process_that_waits_for_a_removed_folder_creates_it_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prune may remove the folder between its creation and its lock."""
    left = [2]

    class LateLock(Lock):
        def acquire(self, *, waiting: str | None = None) -> bool:
            if left[0]:
                left[0] -= 1
                entry = inspect_entry("runs", self.path.parent)
                assert entry is not None
                assert remove(entry) is None
            return super().acquire(waiting=waiting)

    monkeypatch.setattr("scoremode.core.store.resumable.Lock", LateLock)
    assert sm.ppl("table:uniform", text="any text").perplexity.value == pytest.approx(256)
    assert left[0] < 2, "the folder was removed, and created again"


# ── killed ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_kill_after_the_renaming_leaves_what_the_next_prune_removes(a_run: Callable[..., Path], root: Path) -> None:
    folder = a_run(9)
    with another_process(STOPS_AFTER_RENAMING) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    [left] = names(root / "runs")
    assert left.startswith(f".removed-{folder.name}-")
    [entry] = cache()["entries"]
    assert (entry["path"], entry["size"]) == (f"runs/{left}", 1000)
    a_run(0)
    assert [e["path"] for e in cache("prune", older_than=DAY)["removed"]] == [f"runs/{left}"]
    assert len(names(root / "runs")) == 1


# ── the limit ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_beyond_the_limit_the_least_recently_used_go_and_one_line_says_so(
    a_run: Callable[..., Path], root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = [a_run(days, size=20_000) for days in (30, 20, 10)]
    reference = a_run(25, size=20_000, kind="references")
    monkeypatch.setenv("SCOREMODE_CACHE_LIMIT", "60kB")
    run = sm.ppl("table:uniform", text="any text")
    said = (
        "cache: removed 1 run and 1 reference (40 kB), to stay below 60 kB; SCOREMODE_CACHE_LIMIT changes the limit\n"
    )
    assert capsys.readouterr().err == said
    assert [folder.exists() for folder in (*old, reference, Path(str(run.path)))] == [False, True, True, False, True]
    sm.ppl("table:uniform", text="some other text")
    assert capsys.readouterr().err == "", "there is room now"


def test_a_run_that_is_read_again_is_used(
    a_run: Callable[..., Path], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Path(str(sm.ppl("table:uniform", text="any text").path))
    os.utime(first / "manifest.json", (time.time() - 90 * DAY,) * 2)
    other = a_run(30, size=20_000)
    assert sm.ppl("table:uniform", text="any text").cached
    monkeypatch.setenv("SCOREMODE_CACHE_LIMIT", "20kB")
    sm.ppl("table:uniform", text="some other text")
    assert (first.exists(), other.exists()) == (True, False)


def test_models_and_named_runs_are_neither_counted_nor_removed(
    a_run: Callable[..., Path], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = root / "models" / "smollm2-135m-1"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"x" * 100_000)
    (model / "scoremode.json").write_text(json.dumps({"source": "a.gguf", "sha256": "0", "conversion": 1}))
    old = a_run(30)
    monkeypatch.setenv("SCOREMODE_CACHE_LIMIT", "50kB")
    sm.ppl("table:uniform", text="any text")
    assert (model.exists(), old.exists()) == (True, True)
    monkeypatch.setenv("SCOREMODE_CACHE_LIMIT", "1kB")
    sm.ppl("table:uniform", text="any text", out=tmp_path / "named")
    assert old.exists(), "what is kept elsewhere needs no room here"


# ── a cache that cannot be written ───────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache with one run that this process may read but not write; root becomes another user for it."""
    folder = Path(tempfile.mkdtemp(prefix="scoremode-test-", dir="/tmp"))
    monkeypatch.setenv("SCOREMODE_CACHE", str(folder / "cache"))
    sm.ppl("table:uniform", text="any text")
    os.utime(next(folder.glob("cache/runs/*/manifest.json")), (time.time() - 9 * DAY,) * 2)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    am_root = os.geteuid() == 0
    if am_root:
        os.seteuid(65534)
    yield folder / "cache"
    if am_root:
        os.seteuid(0)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode | stat.S_IRWXU)
    shutil.rmtree(folder)


def test_a_read_only_cache_is_read_listed_and_left_alone(read_only: Path) -> None:
    assert sm.ppl("table:uniform", text="any text").cached
    assert len(cache()["entries"]) == 1
    outcome = cache("prune", older_than=0.0)
    assert outcome["removed"] == []
    assert "cannot be written" in outcome["skipped"][0]["reason"]
    make_room(next((read_only / "runs").iterdir()))
    assert len(names(next((read_only / "runs").iterdir()))) == 2


def test_a_cache_that_is_not_there_is_empty(root: Path) -> None:
    assert cache()["entries"] == []
    assert cache("prune", older_than=0.0)["removed"] == []
    mark_used(root / "runs" / ("0" * 20))
    assert not root.exists()
