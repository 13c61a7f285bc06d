"""A release, the gate for pull requests and the script for rented machines: valid files, whose steps run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import forked

ROOT = Path(__file__).parent.parent
RELEASE = ROOT / ".github" / "workflows" / "release.yml"
SCRIPT = ROOT / ".ci" / "release.py"
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
BASH = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c"]  # as GitHub runs a step
NEED_A_NETWORK = {"tools", "a fresh environment", "publish"}


def jobs(file: Path = RELEASE) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text())["jobs"]
    return found


def steps(file: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(file).values() for step in job.get("steps", ())]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What is needed for building and for a version."""
    folder = tmp_path / "checkout"
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", ".ci", "src/scoremode"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def release(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ".ci/release.py", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


# ── workflows ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_no_workflow_puts_a_value_into_a_script_and_only_publishers_get_rights() -> None:
    for file in (RELEASE, RELEASE.with_name("test.yml")):
        assert yaml.safe_load(file.read_text())["permissions"] == {"contents": "read"}
        assert [step["run"] for step in steps(file) if "${{" in step.get("run", "")] == []
        used = [step["uses"] for step in steps(file) if "uses" in step]
        assert [name for name in used if "." not in name[:1] and not re.search(r"@[\w./]+$", name)] == []
    assert [step["run"] for step in ACTION["runs"]["steps"] if "${{" in step["run"]] == []
    rights = {name: job["permissions"] for name, job in jobs().items() if "permissions" in job}
    assert {name for name, its in rights.items() if "id-token" in its} == {"testpypi", "pypi"}
    assert (jobs()["testpypi"]["needs"], jobs()["pypi"]["needs"]) == (["test", "build"], "testpypi")


def test_the_build_of_a_release_runs(checkout: Path) -> None:
    for module in ("build", "hatchling", "twine"):
        pytest.importorskip(module)
    version = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["version"]
    (checkout / "bin").mkdir()
    paths = [str(checkout / "bin"), os.environ["PATH"]]
    (checkout / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (checkout / "bin" / "python").chmod(0o755)
    environment = {**os.environ, "PATH": os.pathsep.join(paths), "TAG": f"v{version}"}
    for step in jobs()["build"]["steps"]:
        if "run" in step and step["name"] not in NEED_A_NETWORK:
            done = subprocess.run(
                [*BASH, step["run"]], cwd=checkout, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{step['name']}: {done.stdout}{done.stderr}"
    assert {path.suffix for path in (checkout / "dist").iterdir()} == {".whl", ".gz"}
    assert "](docs/" not in (checkout / "README.md").read_text()
    assert (checkout / "notes.md").read_text().strip()


def test_the_text_of_a_release_is_its_section(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0 (2027)\n\nnew\n\n### Added\n\n## 0.1.0\n\nold\n")
    assert release(checkout, "notes", "v0.2.0").stdout == "new\n\n### Added\n"
    assert release(checkout, "notes", "v0.1.0").stdout == "old\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("check", "v9.9.9"), "pyproject.toml has version"),
        (("notes", "v9.9.9"), "CHANGELOG.md has no text under '## 9.9.9'"),
        (("notes", "latest"), "is not the tag of a release"),
        (("readme", "v1.0.0; rm -r ."), "is not the tag of a release"),
        ((), "python .ci/release.py check"),
    ],
)
def test_a_release_that_cannot_be_made_is_refused(checkout: Path, words: tuple[str, ...], said: str) -> None:
    done = release(checkout, *words)
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr


def test_the_page_of_versions_has_the_newest_first(checkout: Path, tmp_path: Path) -> None:
    for name in ("0.9.0", "0.10.0", "0.10.0rc1", "assets"):
        (tmp_path / "pages" / name).mkdir(parents=True)
        (tmp_path / "pages" / name / "index.html").touch()
    assert release(checkout, "site", str(tmp_path / "pages")).returncode == 0
    page = (tmp_path / "pages" / "index.html").read_text()
    assert re.findall('href="(.+?)/"', page) == ["0.10.0", "0.10.0rc1", "0.9.0"]


# ── the gate ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("extras", "asked"), [("", "/an action"), ("vllm,ray", "/an action[vllm,ray]")])
def test_the_gate_installs_its_own_version(tmp_path: Path, extras: str, asked: str) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    (step,) = [one for one in ACTION["runs"]["steps"] if one["name"] == "install"]
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "EXTRAS": extras}
    environment |= {"GITHUB_ACTION_PATH": "/an action"}
    done = subprocess.run([*BASH, step["run"]], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["-m", "pip", "install", "--quiet", "--", asked]


def gate(folder: Path, **given: str) -> tuple[int, str, str]:
    """The exit code of the action's step with some inputs, its log, and its summary."""
    inputs = {name: str(its.get("default", "")) for name, its in ACTION["inputs"].items()}
    inputs |= {name.replace("_", "-"): value for name, value in given.items()}
    (step,) = [one for one in ACTION["runs"]["steps"] if one["name"] == "compare"]
    wanted = {name: inputs[re.fullmatch(r"\$\{\{ inputs\.(.+) \}\}", value)[1]] for name, value in step["env"].items()}  # type: ignore[index]
    summary, bins = folder / "summary.md", folder / "bin"
    bins.mkdir(exist_ok=True)
    (bins / "scoremode").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m scoremode "$@"\n')
    (bins / "scoremode").chmod(0o755)
    environment = {**os.environ, "PATH": f"{bins}{os.pathsep}{os.environ['PATH']}", **wanted}
    environment |= {"GITHUB_STEP_SUMMARY": str(summary), "SCOREMODE_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [*BASH, step["run"]], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr, summary.read_text() if summary.exists() else ""


def test_the_gate_passes_and_fails_and_writes_a_summary(tmp_path: Path) -> None:
    (tmp_path / "a text.txt").write_text("one two three")
    given = {"baseline": "table:uniform", "corpus": "a text.txt", "flags": "--context-length\n8", "report": "page.html"}
    code, log, summary = gate(tmp_path, candidates="table:uniform\n", fail_if="kl_mean > 0.1\nsame_top < 0.5", **given)
    assert code == 0, log
    assert "### scoremode: passed" in summary
    assert "KL mean" in summary
    assert (tmp_path / "page.html").exists()
    code, log, summary = gate(tmp_path, candidates="table:successor", fail_if="kl_mean > 0.1", **given)
    assert code == 1, log
    assert "### scoremode: FAILED\n" in summary
    assert "scoremode: table:successor: kl_mean is" in summary


def test_an_input_of_the_gate_is_never_run(tmp_path: Path) -> None:
    evil = "$(touch pwned)`touch pwned`'\"; touch pwned"
    code, log, summary = gate(tmp_path, baseline=evil, candidates=f"--out=pwned\n{evil}", fail_if=f"kl_mean > 1 {evil}")
    assert code == 2, log
    assert "FAILED: not everything was measured" in summary
    assert not (tmp_path / "pwned").exists()


# ── the script ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_script_states_what_it_needs_and_names_the_smallest_that_is_good(tmp_path: Path) -> None:
    script = ROOT / "examples" / "compare_quantizations.py"
    block = re.search(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", script.read_text())
    assert block is not None
    stated = tomllib.loads("".join(line.removeprefix("#").lstrip(" ") for line in block["content"].splitlines(True)))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert stated == {"requires-python": project["requires-python"], "dependencies": [project["name"]]}
    environment = {**os.environ, "SCOREMODE_CACHE": str(tmp_path / "cache")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), *words]
        return forked.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    done = run("table:uniform", "table:uniform")
    assert (done.returncode, "KL up to 0.01: table:uniform" in done.stdout) == (0, True), done.stderr
    assert (tmp_path / "quantizations.html").exists()
    done = run("table:uniform", "nothing")
    assert (done.returncode, "nothing" in done.stderr) == (2, True), done.stderr
