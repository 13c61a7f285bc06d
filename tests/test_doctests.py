"""The examples in docstrings run, each module's in an empty folder. ``# doctest: +SKIP`` marks those that cannot."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import scoremode

PACKAGE = Path(scoremode.__file__).parent
NEEDS_TRITON = {"head/fused.py", "head/fused_kernels.py", "head/rows_triton.py"}  # imported by GPU code alone


def modules_with_examples() -> list[str]:
    files = sorted(path for path in PACKAGE.rglob("*.py") if ">>>" in path.read_text(encoding="utf-8"))
    names = [file.relative_to(PACKAGE).as_posix() for file in files]
    return [name for name in names if name not in NEEDS_TRITON]


def examples_of(name: str) -> list[doctest.DocTest]:
    parts = [part for part in name.removesuffix(".py").split("/") if part != "__init__"]
    module = importlib.import_module(".".join(["scoremode", *parts]))
    return [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tests = examples_of(name)
    assert tests, "the module holds >>> but no docstring with it"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test, out=said.append)
    assert runner.failures == 0, "".join(said)


def test_most_examples_can_run_anywhere() -> None:
    """An example that is skipped shows nothing: only what needs a GPU, vLLM or the hub may be."""
    examples = [example for name in modules_with_examples() for test in examples_of(name) for example in test.examples]
    skipped = [example for example in examples if example.options.get(doctest.SKIP)]
    assert len(examples) > 50
    assert len(skipped) < len(examples) / 3, [example.source for example in skipped]
