"""What installs a browser for the suite: only where it is missing, only as root, and never a failure."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "chromium"


@pytest.mark.parametrize(
    ("programs", "says", "asked_for"),
    [
        ({"chromium": "exit 1", "id": "echo 0", "apt-get": "echo $* >> asked"}, "", ""),
        ({"id": "echo 1000", "apt-get": "echo $* >> asked"}, "only root can install it", ""),
        ({"id": "echo 0"}, "will be skipped", ""),
        ({"id": "echo 0", "apt-get": "exit 100"}, "apt-get could not install chromium", ""),
        ({"id": "echo 0", "apt-get": "echo $* >> asked"}, "installing chromium", "chromium"),
    ],
)
def test_chromium_is_installed_where_it_can_be(
    programs: dict[str, str], says: str, asked_for: str, tmp_path: Path
) -> None:
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [str(SCRIPT)], env={"PATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert bool(done.stdout) == bool(says)
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert asked_for in asked
    assert bool(asked) == bool(asked_for)
