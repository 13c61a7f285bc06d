"""The documentation is true: every verb, flag and method is in it, its links lead somewhere, its commands run.

In README.md and docs/:

```console    every line "$ …" runs in a shell, in a folder of the page's own, and fails only where a refusal is shown.
              Output shown below a command is compared, but for spaces at line ends; a line "…" stands for any lines.
```python     runs where it uses a "table:" model; else it must only compile.
any other     is for the eye
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scoremode.cli.commands import COMMANDS, build_parser, verb_of
from scoremode.core.plan.recipes import METHODS, Method
from tests import forked
from tests.command_line import Command

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}
EVERYTHING = "\n".join(TEXT.values())
TRAINING = ["--steps", "2", "--every", "1"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT[page], re.DOTALL | re.MULTILINE)


def parsers() -> dict[str, argparse.ArgumentParser]:
    action = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


# ── complete ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_is_in_the_readme_and_on_the_page_of_commands(verb: str) -> None:
    assert f"`scoremode {verb}`" in TEXT[ROOT / "README.md"]
    assert f"| `scoremode {verb}" in TEXT[ROOT / "docs" / "commands.md"]


def test_the_readme_is_short() -> None:
    assert len(TEXT[ROOT / "README.md"].split()) <= 900
    assert max(map(len, TEXT[ROOT / "README.md"].splitlines())) < 260


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_flag_is_documented(verb: str) -> None:
    flags = {flag for action in parsers()[verb]._actions for flag in action.option_strings if flag.startswith("--")}
    missing = {flag for flag in flags - {"--help"} if not re.search(rf"{flag}(?![\w-])", EVERYTHING)}
    assert not missing


def test_every_flag_in_the_documentation_exists() -> None:
    """Flags in our own commands; other tools' flags are mentioned in prose alone, or passed on by ``serve``."""
    known = {flag for parser in parsers().values() for action in parser._actions for flag in action.option_strings}
    commands = re.findall(r"^(?:\$ )?(?:.*\| )?scoremode .*$", EVERYTHING, re.MULTILINE)
    others = "|".join(name for name in COMMANDS if verb_of(name).passes_on or verb_of(name).passes_all_on)
    ours = [command for command in commands if not re.search(rf"scoremode ({others})\b", command)]
    used = {flag for command in ours for flag in re.findall(r"(?<!\S)--[a-z-]+", command)}
    assert used
    assert used <= known


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_every_method_has_a_section_with_its_windows_drawn(method: Method) -> None:
    name, drawn = method.name, method.windows.__doc__ or ""
    sections = re.split(r"^## ", TEXT[ROOT / "docs" / "methods.md"], flags=re.MULTILINE)
    (words,) = [" ".join(section.split()) for section in sections if section.startswith(f"{name}\n")]
    feeds = [line for line in drawn.splitlines() if "[" in line and "score" in line]
    assert feeds
    for line in feeds:
        assert " ".join(line.split()) in words
    assert f"methods.md#{name})" in TEXT[ROOT / "README.md"]


def test_every_page_begins_with_what_to_type() -> None:
    """But for the page for people who work on scoremode."""
    pages = [page for page in PAGES if page.parent.name == "docs" and page.name != "design.md"]
    assert len(pages) < 33
    for page in pages:
        title, first, typed, *_ = (line for line in TEXT[page].splitlines() if line)
        assert title.startswith("# "), page
        assert first.startswith("```"), page
        assert re.match(r"(\$ |scoremode |import |pip |python |llama-perplexity )", typed), page


def test_what_ppl_prints_of_the_embedded_model_has_the_form_that_is_shown(
    command: Command, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digits take a minute to compute: a smaller model prints the same lines with other and longer numbers."""
    monkeypatch.setenv("COLUMNS", "200")

    def form(line: str) -> str:
        return " ".join(re.sub(r"[\d.,]*\d(e[+-]?\d+)?", "#", line).split())

    printed = [form(line) for line in command("ppl", stories, "--num-samples", 6).out.splitlines()]
    blocks = [block for text in TEXT.values() for block in re.findall(r"\$ scoremode ppl smollm2-135m\n([^$`]+)", text)]
    shown = [line for block in blocks for line in block.splitlines() if "±" in line]
    assert len(shown) == 12
    assert [line for line in shown if form(line) not in printed] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


# ── true ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
PROGRAMS = {
    "scoremode": "from scoremode.cli.main import entry\nentry()\n",
    # the harness reads the thousands of tasks that it has itself for most of a minute
    "lm-eval": "from lm_eval.__main__ import cli_evaluate\nfrom lm_eval.tasks import TaskManager\n"
    "make = TaskManager.__init__\n"
    "TaskManager.__init__ = lambda self, **more: make(self, **{**more, 'include_defaults': False})\n"
    "cli_evaluate()\n",
}


@pytest.fixture
def shell_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A shell in an empty folder, with this checkout's ``scoremode`` and ``python``; without the tasks of lm-eval."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, code in PROGRAMS.items():
        (programs / name).write_text(f"#!{sys.executable}\n{code}")
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "SCOREMODE_CACHE": str(tmp_path / "cache")}


def matches(shown: list[str], printed: str) -> bool:
    """Is this what was shown? A line "…" stands for any lines, none included."""
    parts = [r"(?:.*\n)*?" if line.strip() == "…" else re.escape(line.rstrip()) + r"\n" for line in shown]
    stripped = "".join(line.rstrip() + "\n" for line in printed.splitlines())
    return re.fullmatch("".join(parts), stripped) is not None


def in_shell(command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What a shell does with the command. Where that is to start a program of Python, it is forked: faster."""
    how: dict[str, Any] = {"env": environment, "capture_output": True, "text": True, "timeout": 600}
    if not set(command) & set("|<>&;$`*?~#(){}[]!"):
        name, *arguments = shlex.split(command)
        program = shutil.which(name, path=environment["PATH"])
        if program and b"python" in Path(program).read_bytes().partition(b"\n")[0]:
            return forked.run([sys.executable, program, *arguments], **how)
    done: subprocess.CompletedProcess[str] = subprocess.run(["bash", "-c", command], check=False, **how)
    return done


def check_commands(block: str, environment: dict[str, str]) -> None:
    for chunk in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, *shown = chunk.splitlines()
        done = in_shell(command, environment)
        assert done.returncode in (0, 2), f"{command}\n{done.stderr}"
        refused = bool(shown) and shown[0].startswith("scoremode: ")
        assert (done.returncode == 2) == refused, f"{command}\n{done.stderr}"
        if shown:
            printed = done.stderr if refused else done.stdout
            assert matches(shown, printed), f"{command}\n{printed}"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "console")], ids=name_of)
def test_commands_run_and_print_what_is_shown(page: Path, shell_environment: dict[str, str]) -> None:
    for block in blocks(page, "console"):
        check_commands(block, shell_environment)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "tool"), [("from-lm-eval.md", "lm_eval"), ("from-mlx-lm.md", "mlx_lm")])
def test_another_tool_prints_what_its_page_shows(page: str, tool: str, shell_environment: dict[str, str]) -> None:
    """The first block of the page: the other tool's command and ours, on stories260K."""
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"needs {tool}")
    Path("stories260K").symlink_to(ROOT / "tests" / "data" / "stories260K")
    shell_environment["PATH"] += os.pathsep + str(Path(sys.executable).parent)
    shell_environment["HF_DATASETS_CACHE"] = str(Path("datasets").absolute())
    check_commands(blocks(ROOT / "docs" / page, "text")[0], shell_environment)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_python_runs_on_a_table_and_compiles_elsewhere(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "python"):
        code = compile(block, name_of(page), "exec")
        if '"table:' in block:
            exec(code, {"__name__": "__docs__"})


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_examples_run(example: Path, shell_environment: dict[str, str]) -> None:
    """On a table, for speed; those that need more than scoremode itself must at least say how they are run."""
    text = example.read_text(encoding="utf-8")
    if "compressed_tensors" in text and importlib.util.find_spec("compressed_tensors") is None:
        pytest.skip("needs compressed_tensors")
    needs_more = any(
        word in text for word in ("compressed_tensors", "vllm", "save_file", "GGUFWriter", "sm.tasks", "/// script")
    )
    arguments = ["--help"] if needs_more else TRAINING if example.name == "training_loop.py" else ["table:uniform"]
    command = [sys.executable, str(example), *arguments]
    done = forked.run(command, env=shell_environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
