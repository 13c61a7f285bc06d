"""llama.cpp's library: which package brings it, the layout of its structs, and what happens when it gives up."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tomllib
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import scoremode as sm
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import choose, open_engine
from scoremode.engines.llamacpp import LlamaCppPlugin, library
from scoremode.engines.llamacpp.crash_handlers import raw_lines_into
from scoremode.engines.llamacpp.library import CONTEXT_DEFAULTS, MODEL_DEFAULTS, check_layout
from scoremode.errors import EngineError, OptionError, ScoremodeError
from tests import forked

PROJECT = tomllib.loads((forked.ROOT / "pyproject.toml").read_text())["project"]
(PINNED,) = [line.partition(";")[0] for line in PROJECT["dependencies"] if line.startswith("xllamacpp")]


def functions(model: dict[str, Any], context: dict[str, Any]) -> Any:
    """A library that says other defaults."""
    return SimpleNamespace(
        llama_model_default_params=lambda: SimpleNamespace(**{**MODEL_DEFAULTS, **model}),
        llama_context_default_params=lambda: SimpleNamespace(**{**CONTEXT_DEFAULTS, **context}),
    )


def test_the_installed_library_has_the_layout_that_is_known() -> None:
    check_layout(library.library().call, "this one", "")
    check_layout(functions({}, {}), "one that says the same", "")


@pytest.mark.parametrize(
    ("model", "context", "words"),
    [
        ({"main_gpu": 7}, {}, r"another llama_model_params \(main_gpu\)"),
        ({"devices": 140_000}, {}, r"another llama_model_params \(devices\)"),
        ({}, {"n_ctx": 0}, r"another llama_context_params \(n_ctx\)"),
        ({}, {"type_k": 0, "swa_full": False}, r"another llama_context_params \(type_k, swa_full\)"),
    ],
)
def test_a_library_with_other_defaults_is_refused(model: dict[str, Any], context: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words) as refused:
        check_layout(functions(model, context), "other 1.0", "install the known one")
    assert "other 1.0" in str(refused.value)
    assert "install the known one" in str(refused.value)


def test_a_broken_own_build_and_a_missing_package_say_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path
) -> None:
    monkeypatch.setattr(library, "installed", lambda: (library.OWN_BUILD, "0.0"))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    library.library.cache_clear()
    try:
        with pytest.raises(EngineError, match=r"llama-cpp-python 0.0 cannot be loaded.*pip uninstall llama-cpp-python"):
            library.library()
        monkeypatch.setattr(library, "installed", lambda: None)
        monkeypatch.setattr(platform, "machine", lambda: "riscv64")
        assert f"no build for riscv64 on {sys.platform}: pip install llama-cpp-" in str(LlamaCppPlugin().problem())
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        assert str(LlamaCppPlugin().problem()).endswith(f"; pip install {PINNED}")
        with pytest.raises(EngineError, match=r"not installed.*pip install"):
            choose(str(tiny_gguf))
    finally:
        library.library.cache_clear()


ENDING = """
import ctypes, os, sys
from scoremode.engines.llamacpp.crash_handlers import raw_lines_into
from scoremode.engines.llamacpp.library import library
found = library()
with raw_lines_into(found.complaints):
    os.write(2, b"a line that ggml prints itself\\n")
    {how}
print("still here")
"""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            'found.call.ggml_abort(b"/build/there/somewhere.c", 7, b"a check \\x1b[2J failed")',
            ": somewhere.c:7: a check",
        ),
        ("found.call._ZSt9terminatev()", "a C++ exception"),
        ("ctypes.string_at(0)", "(SIGSEGV)"),
    ],
)
def test_where_llamacpp_ends_the_process_one_line_says_so(how: str, words: str) -> None:
    program = ENDING.replace("{how}", how)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2, "1 means that a rule failed"
    assert "still here" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("scoremode: llama.cpp ")
    assert words in line
    assert "kept" not in line, "nothing was scored"
    assert "\x1b" not in line


def test_what_ggml_prints_itself_is_caught_and_explains_what_was_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    complaints: deque[str] = deque()
    with raw_lines_into(complaints):
        os.write(2, b"ggml_validate_row_data: found nan\nanything else\n")
    assert list(complaints) == ["ggml_validate_row_data: found nan"]
    with raw_lines_into(complaints):
        os.write(2, b"ggml_again: once more\n")
    assert len(complaints) == 1, "what was logged is enough"
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


QUESTION: dict[str, Any] = {"text": "The quick brown fox jumps over the lazy dog. " * 8, "context_length": 64}
LOGPROBS = """
import sys, json
from scoremode.engines.llamacpp.library import library
import scoremode as sm
run = sm.ppl(sys.argv[1], fresh=True, **json.loads(sys.argv[2]))
print(json.dumps([library().package, run.scores.logprob.tolist()]))
"""


@pytest.mark.parametrize("source", ["llama-cpp-python", "path"])
def test_another_build_is_preferred_and_gives_the_same_numbers(source: str, tiny_gguf: Path, tmp_path: Path) -> None:
    """SCOREMODE_LLAMA_CPP_PYTHON names the folder of an installed llama-cpp-python, if it is not found otherwise."""
    file, folder = library._prebuilt()[0], os.environ.get("SCOREMODE_LLAMA_CPP_PYTHON", "")
    if source == "llama-cpp-python" and not folder:
        pytest.skip("needs llama-cpp-python (SCOREMODE_LLAMA_CPP_PYTHON)")
    paths = os.pathsep.join([folder, *sys.path] if source == "llama-cpp-python" else sys.path)
    own_file = {library.OWN_FILE: str(file)} if source == "path" else {}
    environment = {**os.environ, "PYTHONPATH": paths, "SCOREMODE_CACHE": str(tmp_path / "cache"), **own_file}
    command = [sys.executable, "-c", LOGPROBS, str(tiny_gguf), json.dumps(QUESTION)]
    done = forked.run(command, capture_output=True, text=True, env=environment, check=True, timeout=60)
    package, logprob = json.loads(done.stdout.splitlines()[-1])
    assert package == (file.name if source == "path" else source)
    expected = sm.ppl(str(tiny_gguf), fresh=True, **QUESTION).scores.logprob
    assert logprob == pytest.approx(expected, abs=0 if source == "path" else 2e-2), "a cache of keys in float16"


@pytest.mark.parametrize("what", ["no library", "nothing"])
def test_a_path_that_is_no_library_is_refused_in_one_line(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "libllama.so"
    if what == "no library":
        file.write_bytes(b"text")
    monkeypatch.setenv(library.OWN_FILE, str(file))
    with pytest.raises(EngineError, match=r"libllama.so cannot be loaded .*unset SCOREMODE_LLAMACPP"):
        library.library.__wrapped__()


def test_a_build_that_is_slower_than_the_machine_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    there = library.library()

    def told(flags: str, kernels: bytes) -> tuple[str, ...]:
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"flags : {flags}\n")
        build: Any = SimpleNamespace(llama_print_system_info=lambda: kernels)
        return replace(there, call=build).slowness()

    (line,) = told("fp asimd asimddp i8mm", b"CPU : NEON = 1 | ")
    assert "does not use DOTPROD and MATMUL_INT8 of this processor" in line
    assert f"pip install {library.BUILT_HERE}" in line
    assert "AVX512 of" in told("sse2 avx2 avx512f", b"CPU : AVX2 = 1 | ")[0]
    assert told("asimddp i8mm", b"CPU : DOTPROD = 1 | MATMUL_INT8 = 1 | ") == told("fp", b"CPU : ") == ()


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_type_v": "q8_0"}, "only with flash attention; add --flash-attn on"),
        ({"n_batch": 64, "n_ubatch": 65}, "--n-ubatch 65 is larger than --n-batch 64"),
        ({"n_ubatch": 4096}, "--n-ubatch 4096 is larger than --n-batch 2048"),
        ({"threads": 513}, "--threads 513 is not above 0 and up to 512"),
        *(({name: 2**31}, f"{2**31} is not .* up to {2**31 - 1}") for name in ("n_batch", "n_ubatch", "n_gpu_layers")),
        ({"n_gpu_layers": -2}, "--n-gpu-layers -2 is not above -2"),
        ({"cache_type_k": "q4_0"}, "stores blocks of 32, and a head of this model has 12; use --cache-type-k f16"),
        ({"cache_type_v": "q8_0", "flash_attn": "on"}, "stores blocks of 32, and a head of this model has 12"),
    ],
)
def test_options_that_cannot_work_are_refused(tiny_gguf: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        open_engine(choose(str(tiny_gguf), None, options), Work(longest=16))


def test_settings_before_opening_are_those_of_the_open_engine(tiny_gguf: Path) -> None:
    given = {"n_batch": 32, "cache_type_k": "bf16", "flash_attn": "on", "threads": 1}
    chosen = choose(str(tiny_gguf), None, given)
    before, engine = chosen.settings(), open_engine(chosen, Work(longest=40))
    assert before.items() >= given.items()
    for name, value in engine.facts.settings.items():
        assert before.get(name, value) == value
    assert before["library"] == engine.facts.versions["llamacpp"]
    assert engine.facts.context_length == 128


def test_a_gguf_belongs_to_this_engine(tiny_gguf: Path, tiny: Path, tmp_path: Path) -> None:
    plugin = LlamaCppPlugin()
    assert plugin.claims(str(tiny_gguf))
    assert plugin.claims("nowhere/MODEL.GGUF")
    assert plugin.claims(str(tiny_gguf.parent))
    assert not plugin.claims(str(tiny))
    assert not plugin.claims(str(tmp_path))
    (tmp_path / "mmproj-x.gguf").write_bytes(b"")
    assert not plugin.claims(str(tmp_path))
    with pytest.raises(ScoremodeError, match="use --engine llamacpp"):
        choose(str(tiny_gguf), "transformers")
