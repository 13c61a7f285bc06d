"""What `pip install scoremode` gives: the wheel is complete, and works from where it was installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("build")
pytest.importorskip("hatchling")

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment that has the wheel, and its dependencies from the environment of the tests.

    A .pth file adds that environment's packages at the end of the path. Files named .pth in there are not read, so the
    editable install of this checkout, which is one, stays out.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    bins = folder / "bin"
    python = bins / "python"
    target = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    command = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    packages = dict.fromkeys((sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]))
    (Path(target) / "dependencies.pth").write_text("\n".join(packages) + "\n")
    return bins


def run(installed: Path, *arguments: str, cwd: Path) -> str:
    """Run a program of the new environment, away from the checkout and without its source folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"SCOREMODE_CACHE": str(cwd / "cache")}
    command = [str(installed / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_of_the_source_folder_is_in_the_wheel_and_nothing_else(names: set[str]) -> None:
    """The report's style and script and the marker of types among them."""
    source = ROOT / "src"
    ours = {p.relative_to(source).as_posix() for p in (source / "scoremode").rglob("*") if p.is_file()}
    ours = {name for name in ours if "__pycache__" not in name}
    assert {Path(name).name for name in ours} >= {"report.css", "report.js", "py.typed"}
    assert {name for name in names if name.startswith("scoremode/")} == ours
    folders = {name.split("/")[0] for name in names}
    assert folders == {"scoremode", f"scoremode-{PROJECT['version']}.dist-info"}
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_entry_points_are_declared_and_can_be_loaded(installed: Path, tmp_path: Path) -> None:
    """The command, the vLLM plugin, and whatever else pyproject.toml declares."""
    declared = {("console_scripts", name): value for name, value in PROJECT["scripts"].items()}
    for group, entries in PROJECT.get("entry-points", {}).items():
        declared |= {(group, name): value for name, value in entries.items()}
    assert ("console_scripts", "scoremode") in declared
    assert ("vllm.general_plugins", "scoremode") in declared
    code = """
import importlib.metadata, json
found = importlib.metadata.distribution("scoremode").entry_points
for point in found:
    point.load()
print(json.dumps([[point.group, point.name, point.value] for point in found]))
"""
    found = json.loads(run(installed, "python", "-c", code, cwd=tmp_path).splitlines()[-1])
    assert {(group, name): value for group, name, value in found} == declared


def test_the_installed_command_is_the_wheels_and_its_report_finds_its_style_and_script(
    installed: Path, tmp_path: Path
) -> None:
    found = Path(run(installed, "python", "-c", "import scoremode; print(scoremode.__file__)", cwd=tmp_path).strip())
    assert not found.is_relative_to(ROOT)
    assert PROJECT["version"] in run(installed, "scoremode", "--version", cwd=tmp_path)
    asked = ("ppl", "table:uniform", "--text", "any text", "--out", "run", "--json")
    assert json.loads(run(installed, "scoremode", *asked, cwd=tmp_path))["perplexity"] == pytest.approx(256)
    run(installed, "scoremode", "report", "run", "-o", "report.html", cwd=tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<style>" in page
    assert "<script>" in page
