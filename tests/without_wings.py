"""Runs the tests of the core in a copy of the house that has no wing.

python -m tests.without_wings [flags of pytest]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.house import HOUSE, ROOT
from tests.test_removal import REMOVED


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        house = Path(folder) / "src"
        shutil.copytree(HOUSE, house / "scoremode")
        for removed in REMOVED:
            shutil.rmtree(house / "scoremode" / removed)
        command = [sys.executable, "-m", "pytest", "tests/core", *sys.argv[1:]]
        return subprocess.run(command, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(house)}).returncode


if __name__ == "__main__":
    sys.exit(main())
