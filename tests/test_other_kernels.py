"""Numbers hold under kernels that another CPU would choose: the quick and decisive tests, under two settings.

``python -m tests.kernels`` runs all numeric tests under all settings.
"""

from __future__ import annotations

import platform

import pytest

from tests import kernels
from tests.makers import with_triton

CPU = ["tests/head/test_blocked.py", "tests/head/test_divergence_columns.py", "tests/studies/rollouts/test_writing.py"]
CHOSEN = "ties or naive or function or log_probabilities"
ON_X86 = platform.machine().lower() in ("x86_64", "amd64")


def test_the_head_and_written_texts_under_the_plainest_products() -> None:
    setting = kernels.Setting({"MKL_CBWR": "COMPATIBLE"} if ON_X86 else {"ATEN_CPU_CAPABILITY": "default"})
    done = kernels.run(setting, CPU, "-k", CHOSEN)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.slow
def test_the_fused_head_under_products_in_another_order() -> None:
    """NumPy multiplies for Triton's interpreter."""
    variables = {"OPENBLAS_CORETYPE": "Haswell" if ON_X86 else "ARMV8", "ATEN_CPU_CAPABILITY": "default"}
    setting = kernels.Setting({**with_triton(), **variables, "TRITON_INTERPRET": "1"})
    done = kernels.run(setting, ["tests/head/fused_checks.py"], "-W", "ignore", "-k", "batching or kept_logits")
    assert done.returncode == 0, done.stdout[-5000:]
