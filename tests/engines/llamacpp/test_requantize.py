"""examples/requantize_gguf.py: a file that llama.cpp opens, in the type that was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

import scoremode as sm
from scoremode.core.models.gguf import read_gguf
from tests.gguf_files import gguf_of

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "requantize_gguf.py"


def test_a_file_is_rounded_to_another_type(wider: Path, tmp_path: Path) -> None:
    source = gguf_of(wider, tmp_path / "wide.gguf")
    command = [sys.executable, str(EXAMPLE), str(source), str(tmp_path), "--types", "Q8_0"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    made = tmp_path / f"{source.stem}-Q8_0.gguf"
    before, after = read_gguf(str(source)), read_gguf(str(made))
    assert after.quantization == "Q8_0"
    assert [t.name for t in after.tensors] == [t.name for t in before.tensors]
    assert sm.ppl(str(made), text="a cab, a bad cab and a dab").perplexity.value > 1
    one, other = (GGUFReader(file).tensors for file in (source, made))
    for mine, its in zip(one, other, strict=True):
        exact, rounded = (dequantize(t.data, t.tensor_type) for t in (mine, its))
        error = np.sqrt(np.mean((exact - rounded) ** 2) / np.mean(exact**2))
        assert error <= 0.01
        assert (error == 0) == (exact.ndim == 1)
