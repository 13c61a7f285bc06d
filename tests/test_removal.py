"""Every wing comes off: with its folder deleted, the core works, and the wing's verbs, flags and names are gone.

A copy of the house without the folder is loaded in a fresh process, forked from one that has the libraries.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest

from scoremode.core.models.facts import resolve
from tests.forked import LIBRARIES
from tests.house import HOUSE, ROOT, WINGS, arrows, imported

KEPT = ("engines/transformers", "engines/table")  # the embedded model, and the model whose answers are known
REMOVED = sorted(
    path.relative_to(HOUSE).as_posix()
    for path in (
        *(wing for room in WINGS for wing in (HOUSE / room).iterdir()),
        HOUSE / "reports" / "html",
    )
    if (path / "__init__.py").exists() and path.relative_to(HOUSE).as_posix() not in KEPT
)
CORE = {"ppl", "compare", "reference", "report"}  # verbs that stay, and lose a flag
GONE = {
    "engines/exllamav3": ["ppl smollm2-135m --text words --engine exllamav3"],
    "engines/llamacpp": ["ppl smollm2-135m --text words --engine llamacpp"],
    "engines/mlx": ["ppl smollm2-135m --text words --engine mlx"],
    "engines/server": ["ppl smollm2-135m --text words --engine http://localhost:1"],
    "engines/vllm": ["ppl smollm2-135m --text words --engine vllm", "serve smollm2-135m"],
    "remote/models": ["ppl ollama:llama3.2:3b --text words"],
    "remote/ray": ["ppl smollm2-135m --text words --replicas 2"],
    "remote/service": ["serve smollm2-135m"],
    "remote/storage": ["ppl smollm2-135m --text words --out s3://bucket/run"],
    "reports/html": ["report run -o page.html", "compare smollm2-135m smollm2-135m --report page.html"],
    "studies/attribution": ["attribute smollm2-135m other"],
    "studies/kld": ["reference smollm2-135m --kld base.kld"],
    "studies/paths": ["paths smollm2-135m", "noise smollm2-135m"],
    "studies/records": ["compare smollm2-135m smollm2-135m --records records", "report record.json"],
    "studies/rollouts": ["rollouts smollm2-135m", "mismatch texts smollm2-135m", "compare rollouts:texts smollm2-135m"],
    "studies/tasks": ["tasks a b", "lm-eval --tasks arc_easy"],
}
"""Commands that each folder takes along. Each is answered in one line that names what was typed."""

WORDS = {
    "engines/exllamav3": ["EXL3", "exllama"],
    "engines/llamacpp": ["a GGUF file", "engine llamacpp"],
    "engines/mlx": ["engine mlx", "mlx-lm"],
    "engines/server": ["server's name", "http://"],
    "engines/vllm": ["vllm", "vLLM", "serve "],
    "remote/models": ["ollama"],
    "remote/ray": ["replica", "Ray"],
    "remote/service": ["serve "],
    "remote/storage": [],
    "reports/html": ["--report", "--output", "HTML"],
    "studies/attribution": ["attribut"],
    "studies/kld": ["kld", "llama.cpp's tool", "--llamacpp", "or llamacpp"],
    "studies/paths": ["noise"],
    "studies/records": ["record"],
    "studies/rollouts": ["rollouts", "answers:", "clip"],
    "studies/tasks": ["lm-eval", "tasks"],
}
"""Words that no help text has without the folder."""

SERVER = """
import contextlib, gc, importlib, io, json, os, sys
import rich.console, rich.table, torch
for library in sys.argv[1:]:  # shared by all forks
    with contextlib.suppress(ImportError):
        importlib.import_module(library)
gc.freeze()

def run(main, line):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line if isinstance(line, list) else line.split())
    return [code, out.getvalue(), err.getvalue()]

for asked in sys.stdin:
    house, folder, lines = json.loads(asked)
    read, write = os.pipe()
    if os.fork() == 0:
        torch.set_num_threads(1)
        os.chdir(folder)
        sys.path.insert(0, house)
        import scoremode
        assert scoremode.__file__.startswith(house), scoremode.__file__
        from scoremode.cli.main import main
        answers = [run(main, line) for line in lines] + [sorted(scoremode.__all__)]
        os.write(write, json.dumps(answers).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answered:
        print(json.dumps(answered.read()), flush=True)
    os.wait()
"""
EMBEDDED, SMALL = "smollm2-135m", str(ROOT / "tests/data/stories260K")


CORE_VERBS = ("ppl", "prob", "plan", "compare", "reference", "report", "card", "cache", "info")
HELP: list[str | list[str]] = ["--help", *(f"{verb} --help-all" for verb in CORE_VERBS)]


def core_lines(model: str) -> list[str | list[str]]:
    """What works without any wing."""
    return [
        "--help",
        ["ppl", model, "--text", "Once upon a time", "--out", "run", "--json"],
        ["prob", model, "--prompt", "Once upon", "--target", " a", "--json"],
        ["compare", model, model, "--text", "Once upon a time", "--json"],
        "compare run run --json",
        "report run --json",
    ]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Answers to command lines of a house without some folder."""
    resolve("smollm2-135m")
    words = [sys.executable, "-c", SERVER, *(name for name in LIBRARIES if not name.startswith("scoremode"))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forks:
        stdin, stdout = forks.stdin, forks.stdout
        assert stdin is not None
        assert stdout is not None

        def ask(removed: Sequence[str], lines: list[str | list[str]]) -> Any:
            house, folder = tmp_path_factory.mktemp("house"), tmp_path_factory.mktemp("work")
            shutil.copytree(HOUSE, house / "scoremode")  # with what Python compiled
            for wing in removed:
                shutil.rmtree(house / "scoremode" / wing)
            stdin.write(json.dumps([str(house), str(folder), lines]) + "\n")
            stdin.flush()
            return json.loads(json.loads(stdout.readline()) or "null")

        yield ask
        stdin.close()


@pytest.fixture(scope="module")
def whole(answers: Any) -> Any:
    return answers([], core_lines(SMALL))


def test_every_wing_is_tried() -> None:
    assert list(GONE) == list(WORDS) == REMOVED


def test_a_wing_declares_the_wings_that_it_needs() -> None:
    """Files of an ability for one engine are loaded with that engine alone."""
    for importer, targets in arrows().items():
        wing, rest = "/".join(importer.split(".")[:2]), importer.split(".")[2:]
        if wing not in REMOVED or not importer.startswith(("studies", "remote")) or rest[:1] == ["engines"]:
            continue
        needs = import_module(f"scoremode.{wing.replace('/', '.')}.wing").WING.needs
        others = {"/".join(target.split(".")[:2]) for target in targets if target.startswith(WINGS)}
        assert others & {*REMOVED} - {wing} <= {*needs}, importer


def test_tests_of_the_core_import_no_wing() -> None:
    """``python -m tests.without_wings`` runs them in a house that has none."""
    wings = [f"scoremode.{removed.replace('/', '.')}." for removed in REMOVED]
    for file in sorted((ROOT / "tests" / "core").rglob("*.py")):
        names = [f"{name}." for name in imported(ast.parse(file.read_text()))]
        assert [name for name in names for wing in wings if name.startswith(wing)] == [], file


@pytest.mark.parametrize("removed", REMOVED)
def test_a_wing_comes_off(answers: Any, whole: Any, removed: str) -> None:
    works, typed = core_lines(SMALL), GONE[removed]
    said = answers([removed], [*works, *typed, *HELP])
    assert said is not None, "the process ended early"
    *answered, names = said
    _require_silent([removed], answered[-len(HELP) :])
    del answered[-len(HELP) :]
    for line, (code, out, err), (_, before, _) in zip(works, answered[: len(works)], whole[:-1], strict=True):
        assert code == 0, (line, err)
        assert line == "--help" or _numbers(out) == _numbers(before)
    for line, (code, out, err) in zip(typed, answered[len(works) :], strict=True):
        assert (code, out) == (2, ""), (line, out, err)
        assert len(err.strip().splitlines()) == 1, err
    listed = {line.split()[0] for line in answered[0][1].splitlines() if line.startswith("  ")}
    assert not listed & {line.split()[0] for line in typed} - CORE
    assert set(names) <= set(whole[-1])


def test_the_core_works_without_any_wing_on_the_embedded_model(answers: Any) -> None:
    works = core_lines(EMBEDDED)
    said = answers(REMOVED, [*works, *HELP])
    assert said is not None, "the process ended early"
    *answered, names = said
    _require_silent(REMOVED, answered[-len(HELP) :])
    del answered[-len(HELP) :]
    assert [(line, err) for line, (code, _, err) in zip(works, answered, strict=True) if code] == []
    assert {"ppl", "prob", "compare", "reference", "plan", "open"} <= set(names)
    assert not {"attribute", "rollouts", "tasks", "noise", "report"} & set(names)


def _require_silent(removed: Sequence[str], answered: Sequence[Any]) -> None:
    """No help text names what is gone."""
    for line, (code, out, _) in zip(HELP, answered, strict=True):
        assert code == 0
        assert [word for wing in removed for word in WORDS[wing] if word in " ".join(out.split())] == [], line


TIMES = {"seconds", "tokens_per_second"}


def _numbers(out: str) -> Any:
    """What does not depend on time or place."""
    found = json.loads(out)
    one = found[0] if isinstance(found, list) else found
    one = one["candidates"][0] if "candidates" in one else one
    return {name: value for name, value in one.items() if isinstance(value, float) and name not in TIMES}
