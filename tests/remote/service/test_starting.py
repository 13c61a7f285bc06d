"""The command line of a service: what is passed on, what is refused, and what is never shown. Starts no server."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from scoremode.cli.main import main
from scoremode.core.installation import pip_install
from scoremode.engines.vllm import VllmPlugin, support
from scoremode.errors import ModelError, OptionError
from scoremode.remote.service import starting
from scoremode.remote.service.starting import READY, ServiceOptions, command, read_flags
from tests import forked

NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")


@pytest.fixture(autouse=True)
def entry_points_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an older installation may be seen here; tests/remote/service/test_service.py starts the real thing."""
    monkeypatch.setattr(starting, "_plugins", lambda: "scoremode")


def test_flags_are_read_as_they_are_typed() -> None:
    words = ["--port", "80", "--api-key=x", "--enforce-eager", "--dtype", "float32", "-tp", "2", "--no-enable-x"]
    values = {"port": "80", "api_key": "x", "enforce_eager": None, "dtype": "float32", "tp": "2", "no_enable_x": None}
    assert read_flags(words) == values


REFUSED: dict[str, tuple[list[str], str]] = {
    "runner": (["--runner", "generate"], "--runner cannot be given"),
    "one field of the pooler": (["--pooler-config.task", "embed"], "--pooler-config cannot be given"),
    "KL": (["--divergence", "all"], "cannot be given: .*scoremode compare"),
    "heads of baselines": (["--most-heads-mib=100"], "cannot be given: .*scoremode compare"),
    "a second model": (["--model", "x"], "--model is not passed on"),
    "a file of flags": (["--config", "x.yaml"], "--config is not passed on"),
    "fast prefill": (["--kv-sharing-fast-prefill"], "skips rows that must be scored"),
    "context parallelism": (["--prefill-context-parallel-size", "2"], "hides rows from the pooler"),
    "other log-probabilities": (["--logprobs-mode", "raw_logits"], "unmodified model"),
    "overrides that are no JSON": (["--hf-overrides", "x"], "not a JSON object"),
    "ranks that are no number": (["--tensor-parallel-size", "two"], "is not a number"),
    "more ranks than atoms": (["--tensor-parallel-size", "9" * 5000], "is not a number"),
    "a length below 0": (["--max-model-len", "-5"], "max_model_len Input should be"),
    "more than the model's context": (["--max-model-len", "99999"], "is greater than the derived"),
    "a share above 1": (["--gpu-memory-utilization", "3"], "gpu_memory_utilization Input should be"),
    "an unknown flag": (["--no-such-flag", "3"], "unrecognized arguments: --no-such-flag"),
    "a second name": (["another-model"], "unrecognized arguments: another-model"),
    "an unknown quantization": (["--quantization", "nope"], "Unknown quantization method: nope"),
    "overrides too deep": (["--hf-overrides", "[" * 100_000], "--hf-overrides is not a JSON object"),
}


@NEEDS_VLLM
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_loaded(name: str, tiny: Path) -> None:
    flags, words = REFUSED[name]
    with pytest.raises(OptionError, match=words) as caught:
        command(str(tiny), ServiceOptions(), flags)
    assert caught.value.fix


@NEEDS_VLLM
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head_kernel": "x"}, "--head-kernel x is not known"),
        ({"head_kernel": "plain", "head": "as-served"}, "does not apply"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], words: str, tiny: Path) -> None:
    with pytest.raises(OptionError, match=words):
        command(str(tiny), ServiceOptions(**options), [])


@NEEDS_VLLM
def test_the_command_is_that_of_stock_vllm(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-verysecret")
    flags = ["--port", "81", "--data-parallel-size", "2", "--hf-overrides", '{"a": 1}']
    made = command(str(tiny), ServiceOptions(api_key_env=("SERVER_KEY",)), flags)
    assert made.words[made.words.index("--runner") + 1] == "pooling"
    assert '{"head_dtype": "model", "a": 1}' in made.words
    assert made.words[: len(made.words)].count("--dtype") == 1
    assert made.environment["SCOREMODE_VLLM"] == "1"
    assert made.address == "http://localhost:81"
    assert "verysecret" not in " ".join(made.words), "anybody on the machine can list command lines"
    digest = hashlib.sha256(b"sk-verysecret").hexdigest()
    assert made.environment["SCOREMODE_SERVICE_KEYS"] == digest
    assert made.words[-2:] == ["--middleware", "scoremode.remote.service.access.Access"], (
        "the last one is the outermost"
    )


@NEEDS_VLLM
def test_int4_on_a_cpu_without_a_kernel_has_a_remedy_that_a_server_has(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "has_int4_kernel", lambda: False)
    monkeypatch.setattr(support, "_int4_weights_alone", lambda _: True)
    with pytest.raises(ModelError, match="no CPU kernel for int4") as caught:
        command(str(tiny), ServiceOptions(), [])
    assert caught.value.fix == "start it on a GPU"


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--api-key", "sk-x"], "--api-key-env NAME"),
        (["--port", "80", "--api_key=sk-x"], "--api-key-env NAME"),
        (["--hf-token", "sk-x"], "HF_TOKEN"),
    ],
)
def test_secrets_are_not_taken_from_the_command_line(words: list[str], instead: str) -> None:
    with pytest.raises(OptionError, match="everybody who lists") as refused:
        command("MODEL", ServiceOptions(), words)
    assert instead in str(refused.value)
    assert "sk-x" not in str(refused.value)


@pytest.mark.parametrize("value", ["", "two words"])
def test_a_key_that_is_empty_or_unusable_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it comes from a variable that is not set. vLLM would start a server that is open to all."""
    monkeypatch.setenv("SERVER_KEY", value)
    with pytest.raises(OptionError, match="--api-key-env"):
        command("MODEL", ServiceOptions(api_key_env=("SERVER_KEY",)), [])


@NEEDS_VLLM
def test_the_users_own_choices_win(tiny: Path) -> None:
    flags = ["--dtype", "float16", "--no-enable-prefix-caching", "--max-num-batched-tokens", "77", "--enforce-eager"]
    made = command(str(tiny), ServiceOptions(), flags)
    for once in ("--dtype", "--max-num-batched-tokens", "--enforce-eager"):
        assert made.words.count(once) == 1
    assert "--enable-prefix-caching" not in made.words


def test_without_vllm_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as without:
        without.setattr(support, "DISTRIBUTIONS", ())
        assert main(["serve", "MODEL"]) == 2
        assert capsys.readouterr().err == f"scoremode: vLLM is not installed; {pip_install('vllm')}\n"
        assert str(VllmPlugin().problem()).endswith("or use --engine transformers")  # other verbs have that flag
    monkeypatch.setattr(support, "installed_version", lambda: "0.11.0")
    assert main(["serve", "MODEL"]) == 2
    said = capsys.readouterr().err
    assert "vLLM 0.11.0 is untested" in said
    assert said.count("\n") == 1


@NEEDS_VLLM
@pytest.mark.parametrize(("version", "count"), [("0.25.1", 2), ("0.26.0", 1)])
def test_versions_without_endpoint_plugins_get_a_middleware(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, version: str, count: int
) -> None:
    monkeypatch.setattr(support, "installed_version", lambda: version)
    made = command(str(tiny), ServiceOptions(), [])
    assert made.words.count("--middleware") == count
    assert made.words[-1] == "scoremode.remote.service.access.Access", "the last one is the outermost"
    assert ("VLLM_PLUGINS" in made.environment) == (count == 1)


def test_the_process_becomes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(os, "execve", lambda program, words, environment: found.update(words=words, **environment))
    become: Any = starting.become
    become(starting.Command([sys.executable, "-m", "server", "serve", "org/m", "x"], {"A": "1"}, "http://x", "m"))
    assert found["words"][1:] == ["-m", "scoremode", "serve", "org/m"]
    assert (json.loads(found[starting.WORDS]), found["A"]) == (["server", "serve", "org/m", "x"], "1")
    assert found["SCOREMODE_VLLM_PARENT"] == str(os.getpid())
    assert len(found["SCOREMODE_SERVICE_INSTANCE"]) == 32


PLANTED = {  # what a server says and does: the exit code, the last line, and whether the rest is on the terminal
    "fails at once": ("raise ValueError('no such layer')", 2, "(no such layer); its log is", False),
    "fails later": (f"print('{READY}', flush=True); time.sleep(2); raise ValueError('x')", 2, "(x); its log is", True),
    "leaves": ("sys.exit(3)", 2, "(exit code 3)", False),
    "ends": ("sys.exit(0)", 0, "until it is ready, its output goes to", False),
    "is told to end": ("os.kill(os.getpid(), 15); time.sleep(9)", 143, "terminated; nothing was kept", False),
    "swallows it": (
        "try:\n    os.kill(os.getpid(), 15)\nexcept BaseException:\n    time.sleep(50)",
        *(143, "terminated; nothing was kept", False),
    ),
    "makes an interrupt of it": (
        "import signal\ndef end(*_): raise KeyboardInterrupt('terminated')\nend.__module__ = 'vllm.entrypoints.x'\n"
        "signal.signal(15, end)\ntry:\n    os.kill(os.getpid(), 15)\nexcept BaseException:\n    time.sleep(50)",
        *(143, "terminated; nothing was kept", False),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_server_that_does_not_start_is_one_line(name: str, tmp_path: Path) -> None:
    code, exit_code, last, is_shown = PLANTED[name]
    planted = f"import os, sys, time\nprint('many lines\\n' * 167, file=sys.stderr)\n{code}"
    (tmp_path / "planted_server.py").write_text(planted)
    words = {starting.WORDS: json.dumps(["planted_server", "--port", "1"])}
    environment = {**os.environ, **words, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "scoremode", "serve", "m"]
    done = forked.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    lines = done.stderr.splitlines()
    assert done.returncode == exit_code
    assert last in lines[-1]
    assert all(line.startswith("scoremode: ") for line in lines)
    assert len(lines) <= 2 + is_shown
    assert ("scoremode: the server is ready" in lines) == is_shown
