"""The fused head's checks, in separate processes: on the GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.makers import with_triton

CHECKS = Path(__file__).with_name("fused_checks.py")
HALVES = ("diverg or shards or bits", "not (diverg or shards or bits)")  # about equally long, run side by side
AT_LEAST = 180  # tests: fewer means that something was not collected


@pytest.mark.slow
@pytest.mark.timeout(1800)  # of all of them
def test_the_fused_head_answers_to_the_definition() -> None:
    environment = with_triton()
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
        environment["OMP_NUM_THREADS"] = "1"  # arrays are tiny, so threads would only wait for each other
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(CHECKS), "-k"]
    running = [
        subprocess.Popen(
            [*command, half],
            cwd=CHECKS.parents[2],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for half in HALVES
    ]
    outputs = [process.communicate()[0] for process in running]
    codes = [process.returncode for process in running]
    tails = "\n".join(output[-5000:] for output in outputs)
    assert codes == [0, 0], tails
    passed = sum(int(count) for output in outputs for count in re.findall(r"(\d+) passed", output))
    assert passed >= AT_LEAST, f"only {passed} tests passed\n{tails}"
