"""How much memory may still be used: the smallest limit of the machine, the container and the shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scoremode.core import free_memory as memory

GIB = 1 << 30
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def system(folder: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, int | str]) -> int | None:
    """The available memory on a machine of 8 GiB with these cgroup files."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    (folder / "proc" / "self" / "status").write_text("VmSize:\t1024 kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, value in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    monkeypatch.setattr(memory, "PROC", folder / "proc")
    monkeypatch.setattr(memory, "CGROUPS", folder / "cgroup")
    return memory.available()


JOB: dict[str, int | str] = {"job/memory.max": 4 * GIB, "job/memory.current": GIB}
CACHED = f"anon 5\ninactive_file {GIB}"


@pytest.mark.parametrize(
    ("cgroup", "files", "left"),
    [
        ("0::/\n", {"memory.max": "max", "memory.current": GIB}, 8),
        ("0::/job\n", JOB, 3),
        ("0::/job/step\n", {**JOB, "job/step/memory.max": "max"}, 3),  # a limit further up
        ("0::/\n", {"memory.max": 4 * GIB, "memory.current": 3 * GIB, "memory.stat": CACHED}, 2),  # files are dropped
    ],
)
def test_the_smallest_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, int | str], left: int
) -> None:
    assert system(tmp_path, monkeypatch, cgroup, files) == left * GIB


def test_without_proc_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PROC", tmp_path)
    assert memory.available() is None


def test_this_process_is_told_what_a_limit_of_the_shell_leaves() -> None:
    code = (
        "import resource\nfrom scoremode.core import free_memory as memory\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({GIB}, {GIB}))\nprint(memory.available())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < GIB
