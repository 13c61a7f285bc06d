"""llama.cpp's own llama-perplexity as the judge of the llama.cpp engine, chunk by chunk, in all digits that it prints.

SCOREMODE_LLAMA_PERPLEXITY names the program. All digits are equal only if it runs the kernels of the package that the
engine uses, so it must be linked to that package's library. SCOREMODE_LLAMACPP_TOOLS names a folder with a launcher
``llama`` (``llama llama-quantize …``), with which other types are made of the embedded model.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import scoremode as sm
from scoremode.core.models.embedded import embedded_gguf
from tests.gguf_files import require_llamacpp

pytestmark = pytest.mark.slow

CHUNKS, CONTEXT = 3, 512
TYPES = ("Q4_1 as it is", "F16", "Q8_0", "Q4_K_M", "IQ4_NL")


@pytest.fixture(scope="module")
def program() -> str:
    require_llamacpp()
    path = os.environ.get("SCOREMODE_LLAMA_PERPLEXITY")
    if path is None:
        pytest.skip("needs llama.cpp's programs")
    return str(path)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences that are no two alike, of more than three chunks."""
    generator = np.random.default_rng(0)
    words = Path(sm.__file__).read_text().split()
    lines = [f"{i}. " + " ".join(generator.choice(words, 12)) + f" naïve {i * i}.\n" for i in range(120)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module", params=TYPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == TYPES[0]:
        return embedded_gguf()
    folder = os.environ.get("SCOREMODE_LLAMACPP_TOOLS")
    if folder is None:
        pytest.skip("needs llama.cpp's programs")
    made = tmp_path_factory.mktemp("quantized") / f"{request.param}.gguf"
    line = [str(Path(str(folder)) / "llama"), "llama-quantize", "--allow-requantize"]
    subprocess.run([*line, str(embedded_gguf()), str(made), request.param], check=True, capture_output=True)
    return made


@pytest.mark.parametrize("flash", ["off", "on"])
def test_every_chunk_has_the_perplexity_that_llama_perplexity_prints(
    program: str, model: Path, text: Path, flash: str
) -> None:
    sizes = ("-c", CONTEXT, "-b", CONTEXT, "--chunks", CHUNKS, "-fa", flash, "-t", 2)
    done = subprocess.run(
        [program, "-m", str(model), "-f", str(text), *map(str, sizes)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = re.findall(r"\[(\d+)\](\d+\.\d+)", done.stdout + done.stderr)
    assert [int(chunk) for chunk, _ in theirs] == list(range(1, CHUNKS + 1))
    run = sm.ppl(
        str(model),
        corpus=text,
        method="llamacpp",
        context_length=CONTEXT,
        max_windows=CHUNKS,
        n_batch=CONTEXT,
        flash_attn=flash,
        threads=2,
    )
    windows = run.facts.window
    means = [np.exp(-run.scores.logprob[windows <= chunk].mean()) for chunk in range(CHUNKS)]
    assert [f"{mean:.4f}" for mean in means] == [printed for _, printed in theirs]
