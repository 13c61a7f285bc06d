"""Runs the numeric tests under other kernels of the same libraries: what another CPU would choose.

    python -m tests.kernels                        # every setting for this machine; exits 1 if a test fails
    python -m tests.kernels MKL_CBWR=COMPATIBLE    # the settings that contain this

Libraries read these variables when they are loaded, so that every setting has a fresh interpreter.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = (
    "tests/test_rounding.py",
    "tests/head",
    "tests/core/statistics",
    "tests/core/scores",
    "tests/engines/transformers",
    "tests/engines/llamacpp/test_decode.py",
    "tests/engines/llamacpp/test_engine.py",
    "tests/engines/mlx",
    "tests/engines/vllm/test_decode.py",
    "tests/engines/vllm/test_writing.py",
    "tests/studies/attribution/test_attribute.py",
    "tests/studies/paths/test_paths.py",
    "tests/studies/rollouts/test_writing.py",
)
NUMPY = ("tests/head/test_fused.py", "tests/core/statistics", "tests/core/scores", "tests/studies/kld")


@dataclass(frozen=True)
class Setting:
    variables: dict[str, str]
    needs: str = ""  # an instruction set, as /proc/cpuinfo names it
    tests: tuple[str, ...] = TORCH

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.variables.items())


def openblas(core: str, needs: str = "") -> Setting:
    return Setting({"OPENBLAS_CORETYPE": core}, needs, NUMPY)


X86 = [
    Setting({"MKL_CBWR": "COMPATIBLE"}),
    Setting({"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}),
    Setting({"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, "avx2"),
    Setting({"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}),
    Setting({"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2"),
    openblas("Nehalem"),
    openblas("Haswell", "avx2"),
    openblas("Zen", "avx2"),
    openblas("SkylakeX", "avx512f"),
]
ARM = [
    Setting({"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "DEFAULT"}),
    openblas("ARMV8"),
    openblas("NEOVERSEN1", "asimddp"),
]
THREADS = [Setting({"OMP_NUM_THREADS": "1"}), Setting({"OMP_NUM_THREADS": "2"})]


def settings() -> list[Setting]:
    """What this machine's CPU can run."""
    facts = Path("/proc/cpuinfo")
    words = set(facts.read_text().split()) if facts.is_file() else set[str]()
    chosen = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}.get(platform.machine().lower(), [])
    return [one for one in (*chosen, *THREADS) if not one.needs or one.needs in words]


def run(setting: Setting, tests: Sequence[str], *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs tests in a fresh interpreter: with one thread, unless the setting says otherwise."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags, *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **setting.variables}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def main(wanted: Sequence[str]) -> int:
    code = 0
    for setting in settings():
        if wanted and not any(words in str(setting) for words in wanted):
            continue
        done = run(setting, setting.tests)
        counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", done.stdout)
        print(f"{setting!s:56} {', '.join(counts) or done.stderr[-500:]}", flush=True)
        if done.returncode:
            code = 1
            print(*re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE), sep="\n", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
