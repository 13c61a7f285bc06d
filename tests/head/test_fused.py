"""The fused head's checks, in a process of their own: on the GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.makers import with_triton

CHECKS = Path(__file__).with_name("fused_checks.py")
AT_LEAST = 150  # tests: fewer means that something was not collected


@pytest.mark.slow
@pytest.mark.timeout(1800)  # of all of them
def test_the_fused_head_answers_to_the_definition() -> None:
    environment = with_triton()
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
        environment["OMP_NUM_THREADS"] = "1"  # arrays are tiny, so threads would only wait for each other
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(CHECKS)]
    done = subprocess.run(command, cwd=CHECKS.parents[2], env=environment, capture_output=True, text=True, check=False)
    passed = sum(int(count) for count in re.findall(r"(\d+) passed", done.stdout))
    assert (done.returncode, passed >= AT_LEAST) == (0, True), done.stdout[-5000:] + done.stderr[-2000:]
