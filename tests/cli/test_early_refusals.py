"""Everyday mistakes are refused before torch, Transformers, vLLM or lm-eval is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scoremode.core.disk.folders import cache_folder
from scoremode.core.engine.registry import find_engine, read_options

HEAVY = ("torch", "transformers", "vllm", "lm_eval", "datasets", "tokenizers", "pyarrow")
TYPED = {
    "there is no method 'gpt'; did you mean 'gptq'?": "ppl {model} --method gpt --text abc",
    "there is no corpus or file 'nofile.txt'": "plan {model} --corpus nofile.txt",
    "no file matches the pattern": "ppl {model} --corpus {folder}/*.nothing",
    "--dtype fp17 is not known; give one of auto, float32": "ppl {model} --dtype fp17 --text abc",
    "there is no engine 'vlm'; did you mean 'vllm'?": "paths {model} --vary noise --engine vlm --text abc",
    "there is no model or folder 'nothing'": "ppl nothing --text abc",
    "there is no statistic 'kl_men'": "compare {model} {model} --text abc --fail-if kl_men>1",
    "--corpus and --text were given together": "reference {model} --out {folder}/out --text abc --corpus python-docs",
    "--num-samples 0 leaves no text": "compare {model} {model} --corpus python-docs --num-samples 0",
}
SCRIPT = """
import contextlib, io, json, sys
from scoremode.cli.main import main
for line in sys.stdin:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(json.loads(line))
    heavy = [name for name in sys.argv[1:] if name in sys.modules]
    print(json.dumps([code, said.getvalue(), heavy]), flush=True)
"""


@pytest.fixture(scope="module")
def told(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
    """What one fresh process says to all mistakes, and the libraries that it has imported by then."""
    folder = tmp_path_factory.mktemp("mistakes")
    words = [[w.format(model=tiny, folder=folder) for w in typed.split()] for typed in TYPED.values()]
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, *HEAVY],
        input="\n".join(map(json.dumps, words)),
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={**os.environ, "SCOREMODE_CACHE": str(cache_folder())},
    )
    return dict(zip(TYPED, map(json.loads, found.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("words", TYPED)
def test_a_mistake_is_told_before_anything_heavy_is_imported(words: str, told: dict[str, Any]) -> None:
    code, said, heavy = told[words]
    assert code == 2
    assert words in said
    assert said.count("\n") == 1
    assert heavy == []


@pytest.mark.parametrize(("typed", "stored"), [("fp16", "float16"), ("bf16", "bfloat16"), ("fp32", "float32")])
def test_short_names_of_dtypes_are_stored_under_one_name(typed: str, stored: str) -> None:
    for engine in ("transformers", "vllm"):
        options = read_options(find_engine(engine), {"dtype": typed})
        assert options.identity() == {"dtype": stored}
