"""Every benchmark runs, on the smallest sizes, and prints the figures that it is there for.

Scripts run in this process. A child of theirs is a call of the same script here, unless it is there to measure a whole
process: those are forked from one that has the libraries. Of scripts that need vLLM, several machines or lm-eval, the
command line alone is tried; their names and types are checked by mypy.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
import shlex
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import forked
from tests.benchmarks.conftest import FOLDER, load
from tests.engines.server.small_server import SmallServer
from tests.gguf_files import gguf_of, require_llamacpp
from tests.makers import make_tiny_model

NUMBER = r"(-?[\d.,]+(?:e[-+]?\d+)?|nan|-?inf)"


@dataclass(frozen=True)
class Row:
    """What is typed, and what must be printed: each pattern is found, and each # in it is a finite number."""

    script: str
    words: str  # {name}: the value of a fixture
    figures: tuple[str, ...]
    needs: str = ""  # a package

    def __str__(self) -> str:
        return f"{self.script} {self.words}"


ONLY_HELP = (
    *("decode", "gpu_checks", "harness", "replica_faults", "replicas"),
    *("rollouts", "scale", "service", "vllm_engine"),
)
ROWS = (
    Row(
        "attribute",
        "--quick",
        (
            "one scoring pass # s",
            "the baseline's pass that keeps states # s",
            "4 units # s = # × one scoring pass",
            "# MiB after a quarter of the units, # MiB after all",
            "the head's part of a unit # s",
        ),
    ),
    Row("compare", "memory --targets 100 1000", ("1,000 targets +# MiB at the peak +# s", "# bytes per target")),
    Row("compare", "bytes --tokens 1000", ("1/# of float16 logits", "stored once: 1/#")),
    Row(
        "compare",
        "models {tiny} {tiny} --tokens 140 --context 32 --repeat 1",
        (": # s, # s of CPU, # MiB at the peak",),
    ),
    Row("long_tails", "--draws 400", ("1.0, very uneven" + " +#" * 2, "one with half the KL told apart")),
    Row("honest_noise", "--references 6", ("# of 24  no difference found", "# of 24  changed")),
    Row("coverage", "--draws 2", ("documents: python_docs", "60" + " +#%" * 5, r"32,768" + " +#" * 5)),
    Row(
        "formats",
        "{gguf} --context 32 --windows 2 --repeat 1",
        ("tokens_per_second +#", "ratio +#", "batch_of_logits_mb +#", "perplexity +#"),
        needs="xllamacpp",
    ),
    Row(
        "head",
        "--device cpu --rows 20 --repeats 1 --shapes 32:700 --kernels "
        "--only 'naive,vllm,liger,scoremode,naive KL,scoremode KL,scoremode divergence'",
        (
            *("matmul +# +1.000 +#", "naive +# +# +# +#  logprob, rank", "liger +skipped: its kernels need a GPU"),
            *("scoremode +# +# +# +#  all five; blocked", r"scoremode \(plain\) +# +# +# +#  all five; plain"),
            *("naive KL +# +# +# +#  KL", "scoremode KL +# +# +# +#  KL, all five of q; blocked"),
            "scoremode divergence +# +# +# +#  all four, all five of q; blocked",
        ),
    ),
    Row(
        "hostile",
        "--inputs 2 --kills 1 --bytes 3000 --only 'ppl table'",
        ("all +2 +0 ", "ppl table +# +1 +# +# +0 +0 +0 +0"),
    ),
    Row(
        "llamacpp_types",
        "{by_heads_of_64} {text} --perplexity 'echo {estimates}' --quantize '{copy}' "
        "--context 32 --chunks 2 --types F32 Q8_0",
        ("'type': 'F32', 'llama-perplexity': .*'equal': True", "2 types, 0 unequal"),
        needs="xllamacpp",
    ),
    Row(
        "prob_rows",
        "--rows 40 --plain-rows 5",
        ("by hand, row by row +# rows/s +# MB", "scoremode prob --out +# rows/s +# MB .* # x by hand"),
    ),
    Row("prob_rows", "--driver --targets 20480", ("windows of   512 targets: +# scored +# resumed",)),
    Row(
        "same_numbers",
        "record {recorded} --only ppl-table-uniform-gptq reference-table",
        ("ppl-table-uniform-gptq: recorded", "reference-table: recorded"),
    ),
    Row(
        "same_numbers",
        "compare {recorded} {recorded}",
        (
            "ppl-table-gptq, columns of # targets: # compared, equal",
            "hidden states, heads and base logits: # compared, equal",
            "all equal",
        ),
    ),
    Row("same_numbers", "open {recorded} --only reference-table", ("reference-table: the same, cached: True",)),
    Row(
        "server_engine",
        "--url {server} --model small --context 40 --windows 4 --repeat 2 --concurrency 2",
        ("plain +# tokens/s", "ours +# tokens/s", "ratio +#"),
    ),
    Row(
        "start",
        "--model {tiny} --tokens 200 --context 64 --repeat 1",
        (
            "scoremode, whole process +# s",
            "stock, whole process +# s",
            "beyond stock, less scoring +# s",
            "loading weights +# s",
            r"head kernel: compilation and self-test +# s\n",
            "question 4 to an open engine: # s; scoring #, the rest #",
        ),
    ),
    Row(
        "transformers_engine",
        "--model {tiny} --context 32 --windows 2 --repeat 1",
        ("body +# +# +# +#", "naive +# +# +# +#", "scoremode +# +# +# +#"),
    ),
    Row("wider", "{tiny} {folder}/wide", (r"largest difference of a logit: [\d.]+e-0[4-9]",)),
    *(Row(script, "--help", ("usage: ", "options:")) for script in ONLY_HELP),
    Row("mlx_engine", "--help", ("usage: ", "options:"), needs="mlx_lm"),
)
MEASURE_PROCESSES = {"start"}
MISSED = {"server_engine"}  # exit code 1 is a missed goal: these sizes are too small for goals


# ── what rows need ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(scope="session")
def gguf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_llamacpp()
    return gguf_of(tiny, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    return path


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.fixture
def server() -> Iterator[str]:
    with SmallServer() as running:
        yield running.address


@pytest.fixture(scope="session")
def by_heads_of_64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like SmolLM2: three heads of attention for each of keys and values."""
    require_llamacpp()
    made = tmp_path_factory.mktemp("heads")
    shape = {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}
    return gguf_of(make_tiny_model(made, adds_bos=False, **shape), made / "heads.gguf")


@pytest.fixture
def estimates(by_heads_of_64: Path, text: Path) -> str:
    """What llama-perplexity prints, for the model before it is widened: its logits are the same."""
    found = load("llamacpp_types").by_scoremode(by_heads_of_64, text, 32, 2)
    return "".join(f"[{number}]{estimate}," for number, estimate in enumerate(found, 1))


@pytest.fixture
def copy(tmp_path: Path) -> str:
    """Takes the place of llama-quantize, and rounds nothing."""
    script = tmp_path / "copy.sh"
    script.write_text('cp "$1" "$2"\n')
    return f"sh {script}"


# ── scripts, and children of scripts ─────────────────────────────────────────────────────────────────────────────────
def called_here(command: Sequence[str], environment: dict[str, str], log: Path, timeout: float) -> str | None:
    """As ``common.run_child``, but in this process."""
    with pytest.MonkeyPatch.context() as patch, log.open("w", encoding="utf-8") as file:
        for name, value in environment.items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(file):
            try:
                code = load(Path(command[0]).stem).main(list(command[1:]))
            except Exception:
                traceback.print_exc()
                return traceback.format_exc()
    return None if code == 0 else f"exit code {code}"


def run_here(row: Row, words: list[str], patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    script = load(row.script)
    for module in (load("common"), script):
        if hasattr(module, "run_child"):
            patch.setattr(module, "run_child", called_here)
    if row.script in MEASURE_PROCESSES:
        patch.setattr(script, "subprocess", forked)
    try:
        code = script.main(words)
    except SystemExit as ended:  # after --help
        code = ended.code
    said = capsys.readouterr()
    assert code == 0 or row.script in MISSED, said.err[-3000:]
    return said.out + said.err


# ── tests ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_it_runs_and_prints_its_figures(
    row: Row, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if row.needs and find_spec(row.needs) is None:
        pytest.skip(f"needs {row.needs}")
    names = re.findall(r"(?<!\{)\{(\w+)\}", row.words)
    words = shlex.split(row.words.format(**{name: request.getfixturevalue(name) for name in names}))
    printed = run_here(row, words, monkeypatch, capsys)
    for figure in row.figures:
        found = re.search(figure.replace("#", NUMBER), printed)
        assert found, f"{figure!r} is not in:\n{printed}"
        assert all(math.isfinite(float(number.replace(",", ""))) for number in found.groups()), found[0]


def test_every_benchmark_has_a_row() -> None:
    """Scripts have rows; other files are imported by those that have."""
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.py")}
    used, waiting = set[str](), {row.script for row in ROWS}
    while waiting:
        used.add(name := waiting.pop())
        nodes = [node for node in ast.walk(trees[name]) if isinstance(node, ast.Import | ast.ImportFrom)]
        imported = {node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes}
        waiting |= (imported & trees.keys()) - used
    assert trees.keys() == used
