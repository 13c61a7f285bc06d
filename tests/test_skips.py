"""The lines at the end of a run count every test that was skipped, as ``make test`` runs them: in several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "test_whole.py": "import pytest\npytest.importorskip('no_such_package')\ndef test_a(): pass\n",
    "test_parts.py": """
import pytest
@pytest.fixture
def card(): pytest.skip("needs an NVIDIA GPU")
def test_a(card): pass
@pytest.mark.skip(reason="needs hqq")
@pytest.mark.parametrize("n", range(3))
def test_b(n): pass
def test_c(): pass
""",
}


def test_every_skipped_test_is_counted_by_its_reason(tmp_path: Path) -> None:
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    command = [
        *(sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.skips", "-n", "1", "--rootdir", str(tmp_path)),
    ]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("skipped")]
    assert sorted(lines) == [
        "skipped    1: needs an NVIDIA GPU",
        "skipped    1: needs no_such_package",
        "skipped    3: needs hqq",
    ]
