"""Help fits on a screen and has examples that can be parsed; --help-all has every flag; completion knows them all."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from scoremode.cli.commands import COMMANDS, GROUPS, build_parser, verb_of
from tests.command_line import Command

SCREEN = 40  # lines of 80 columns
WITHOUT_JSON = {"completion", "lm-eval", "serve"}
OURS = [verb for verb in COMMANDS if verb != "lm-eval"]


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def flags_of(verb: str) -> set[str]:
    found: set[str] = build_parser().verbs()[verb].flags()
    return found - {"--token"}  # refused, and not shown


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_fits_on_a_screen_and_ends_with_examples(verb: str, command: Command) -> None:
    lines = command(verb, "--help").out.splitlines()
    assert len(lines) <= SCREEN
    assert [line for line in lines if len(line) > 80] == []
    assert any("--json" in line for line in lines) == (verb not in WITHOUT_JSON)
    examples = lines[lines.index("examples:") + 1 :]
    assert len(examples) == 2
    assert all(f"scoremode {verb}" in example for example in examples)


@pytest.mark.parametrize("verb", OURS)
def test_the_examples_can_be_parsed(verb: str) -> None:
    for example in verb_of(verb).examples:
        words = shlex.split(example.split("(")[-1].split(">")[0].split(")")[0])
        parsed = build_parser().parse_args(words[words.index("scoremode") + 1 :])
        assert parsed.verb == verb


@pytest.mark.parametrize("verb", OURS)
def test_everything_is_in_help_all_and_every_everyday_flag_exists(verb: str, command: Command) -> None:
    everything = command(verb, "--help-all").out
    assert [flag for flag in flags_of(verb) if f" {flag}" not in everything] == []
    assert set(verb_of(verb).everyday or ()) <= flags_of(verb)


def test_flags_of_one_engine_are_apart_and_only_in_help_all(command: Command) -> None:
    assert "--n-gpu-layers" not in command("ppl", "--help").out
    everything = command("ppl", "--help-all").out
    titles = [line for line in everything.splitlines() if line.endswith(":") and not line.startswith(" ")]
    engines = [title for title in titles if title.startswith("engine ")]
    assert "engine llamacpp:" in engines
    assert titles[-2 - len(engines) : -2] == engines  # after all others, before "more:" and "examples:"


def test_verbs_are_in_groups(command: Command) -> None:
    shown = command("--help").out
    positions = [shown.index(f"\n{title}:\n") for title in GROUPS]
    assert positions == sorted(positions)
    assert [verb for verb in COMMANDS if f"  {verb} " not in shown] == []
    assert len(shown.splitlines()) <= 45


@pytest.mark.parametrize("words", ["GGUF", "EXL3", "http://HOST:PORT"])
def test_the_help_on_model_names_every_kind(words: str, command: Command) -> None:
    assert words in command("ppl", "--help").out


def test_a_token_is_refused_and_not_repeated(command: Command) -> None:
    outcome = command("ppl", "table:uniform", "--text", "a", "--token", "hf_verysecret")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "HF_TOKEN" in outcome.err
    assert "hf_verysecret" not in outcome.err


def test_completion_without_its_library_is_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    outcome = command("completion", "bash")
    assert (outcome.code, outcome.err.count("\n"), "pip install 'shtab" in outcome.err) == (2, 1, True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_knows_every_verb_and_flag(shell: str, command: Command) -> None:
    pytest.importorskip("shtab")
    script = command("completion", shell).out
    wanted = {flag for verb in OURS for flag in flags_of(verb)} if shell != "fish" else set()
    assert [name for name in {*COMMANDS, *wanted} if name not in script] == []


def test_bash_completes_verbs_flags_names_and_files(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    (tmp_path / "script").write_text(command("completion", "bash").out)
    (tmp_path / "notes.txt").touch()
    typed = ["co", "ppl --context", "ppl m --method gp", f"ppl m --corpus {tmp_path}/no"]
    lines = [f"source {tmp_path}/script"]
    for words in typed:
        lines += [f"COMP_WORDS=(scoremode {words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))"]
        lines += ["COMPREPLY=(); _shtab_scoremode; echo ${COMPREPLY[@]}"]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["compare completion", "--context-length", "gptq", f"{tmp_path}/notes.txt"]
